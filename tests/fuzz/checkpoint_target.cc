#include "tests/fuzz/checkpoint_target.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "libs/base/check.h"
#include "libs/checkpoint/model_config.h"
#include "libs/checkpoint/safetensors.h"

namespace conclave::fuzz {

bool try_safetensors(std::span<const std::byte> bytes) {
  FaultList faults;
  const std::vector<TensorInfo> tensors = parse_safetensors(bytes, "file", faults);
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  uint64_t sum = 0;
  [[maybe_unused]] volatile std::byte touched{};
  for (const TensorInfo& t : tensors) {
    CONCLAVE_CHECK(t.begin <= bytes.size() && t.bytes <= bytes.size() - t.begin);
    CONCLAVE_CHECK(t.data == bytes.data() + t.begin);
    if (const uint32_t size = safetensors_dtype_bytes(t.dtype); size != 0) {
      uint64_t elements = 1;
      for (const uint64_t n : t.shape) elements *= n;
      CONCLAVE_CHECK(elements * size == t.bytes);
    }
    if (t.bytes > 0) {  // a sanitizer sees a range that is not there
      touched = t.data[0];
      touched = t.data[t.bytes - 1];
    }
    sum += t.bytes;
    if (t.bytes > 0) ranges.emplace_back(t.begin, t.bytes);
  }
  CONCLAVE_CHECK(faults.to_status("file").ok() == faults.empty());
  CONCLAVE_CHECK(faults.lines().size() <= kMaxFaultsListed);
  if (!faults.empty()) return false;
  // No fault: the tensors tile the data.
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    CONCLAVE_CHECK(ranges[i - 1].first + ranges[i - 1].second == ranges[i].first);
  }
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  CONCLAVE_CHECK(8 + header + sum == bytes.size());
  return true;
}

bool try_safetensors_header(const std::string& json, size_t data_bytes) {
  std::vector<std::byte> file(8 + json.size() + data_bytes);
  const uint64_t n = json.size();
  std::memcpy(file.data(), &n, 8);
  std::memcpy(file.data() + 8, json.data(), json.size());
  return try_safetensors(file);
}

bool try_config(const std::string& text) {
  FaultList faults;
  const ParsedConfig parsed = parse_config({text, text, text, text}, "name", faults);
  if (!faults.empty()) return false;
  const ModelSpec& s = parsed.spec;
  CONCLAVE_CHECK(s.hidden_size > 0 && s.intermediate_size > 0 && s.num_layers > 0 && s.vocab_size > 0);
  CONCLAVE_CHECK(s.num_kv_heads > 0 && s.num_heads % s.num_kv_heads == 0 && s.head_dim > 0);
  CONCLAVE_CHECK(s.rotary_dim % 2 == 0 && s.rotary_dim <= s.head_dim);
  CONCLAVE_CHECK(s.experts_per_token > 0 && s.experts_per_token <= s.num_experts);
  CONCLAVE_CHECK(s.layer_kinds.size() == s.num_layers);
  for (const TokenId id : s.stop_token_ids) CONCLAVE_CHECK(id < s.vocab_size);
  return true;
}

}  // namespace conclave::fuzz
