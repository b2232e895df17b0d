// Parts of make_checkpoint, apart so that files stay small. Private to libs/checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "libs/base/status.h"
#include "libs/checkpoint/make.h"
#include "libs/model/model_spec.h"

namespace conclave::make {

struct MadeConfig {
  ModelSpec spec;
  std::string config_json;
};
// config.json for the options, checked by the same parser that will read it.
StatusOr<MadeConfig> make_config(const MakeOptions& options);

// How a tensor's values are drawn.
enum class Fill : uint8_t {
  kNormal,  // mean, std
  kE4m3,    // codes of a normal distribution whose largest are 448
  kScale,   // block scales: std spread over a factor of two
};

struct TensorPlan {
  std::string name;
  std::string dtype;
  std::vector<uint64_t> shape;
  uint64_t bytes = 0;
  Fill fill = Fill::kNormal;
  float mean = 0;
  float std = 1;
  // A tensor drawn in parts with keys of their own (fused experts), so that both name styles hold the same
  // values: part p has `part_bytes` and is drawn as `parts[p]`. Empty: one part, keyed by `name`.
  std::vector<std::string> parts;
  uint64_t part_bytes = 0;
};
// Every tensor of the model, in the order of its parameters.
std::vector<TensorPlan> plan_tensors(const ModelSpec& spec, const MakeOptions& options);

// Fills `out` with the bytes [offset, offset + out.size()) of a part. offset and size are multiples of 32.
void fill_bytes(const TensorPlan& plan, uint64_t key, uint64_t offset, std::span<std::byte> out);
// The counter key of a part.
uint64_t tensor_key(uint64_t seed, std::string_view part_name);

struct MadeTokenizer {
  std::string tokenizer_json;
  std::string tokenizer_config_json;
  std::string generation_config_json;
};
// Smallest vocabulary: 256 bytes and the added tokens.
uint32_t min_vocab_size();
MadeTokenizer make_tokenizer(uint32_t vocab_size, uint32_t max_positions);

// Own wording, M2's turn structure.
extern const char* const kChatTemplate;

}  // namespace conclave::make
