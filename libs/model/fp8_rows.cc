#include "libs/model/fp8_rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

namespace conclave {
namespace {

constexpr uint32_t kBlock = 128;

const std::array<float, 256>& code_values() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) t[i] = e4m3_to_float(static_cast<uint8_t>(i));
    return t;
  }();
  return table;
}

// float_to_e4m3 for |f| of at most 448 and NaN, without branches, so that compilers vectorise it.
inline uint8_t code_of(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 codes count steps of 2^-9: adding 2^14 leaves them, rounded to nearest even, in the lowest
  // bits.
  const float steps = std::bit_cast<float>(magnitude) + 0x1.0p14f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(steps) - std::bit_cast<uint32_t>(0x1.0p14f);
  uint32_t code = magnitude < 0x3c800000u ? subnormal : normal;  // 2^-6
  code = magnitude > 0x7f800000u ? 0x7fu : code;
  return static_cast<uint8_t>(code | ((u >> 24) & 0x80u));
}

}  // namespace

void encode_fp8_row(const float* row, uint32_t hidden, std::byte* out) {
  auto* codes = reinterpret_cast<uint8_t*>(out);
  std::byte* scales = out + hidden;
  for (uint32_t begin = 0; begin < hidden; begin += kBlock, scales += sizeof(float)) {
    const uint32_t n = std::min(kBlock, hidden - begin);
    // Bit patterns of magnitudes order as the magnitudes do, NaN above all.
    uint32_t largest = 0;
    for (uint32_t i = 0; i < n; ++i) {
      largest = std::max(largest, std::bit_cast<uint32_t>(row[begin + i]) & 0x7fffffffu);
    }
    float scale = std::bit_cast<float>(largest) / 448.0f;
    std::memcpy(scales, &scale, sizeof(scale));
    if (scale == 0) {
      // Zeros, or values so small that even 448 codes of the least scale exceed them.
      std::memset(codes + begin, 0, n);
      continue;
    }
    for (uint32_t i = 0; i < n; ++i) {
      const float q = row[begin + i] / scale;
      // A tiny scale is itself rounded, so that a quotient may pass 448; 464 and up would be another code.
      const float bound = std::isnan(q) ? q : std::clamp(q, -448.0f, 448.0f);
      codes[begin + i] = code_of(bound);
    }
  }
}

void decode_fp8_row(const std::byte* row, uint32_t hidden, Bf16* out) {
  const auto* codes = reinterpret_cast<const uint8_t*>(row);
  const std::byte* scales = row + hidden;
  const std::array<float, 256>& value = code_values();
  for (uint32_t begin = 0; begin < hidden; begin += kBlock, scales += sizeof(float)) {
    const uint32_t n = std::min(kBlock, hidden - begin);
    float scale;
    std::memcpy(&scale, scales, sizeof(scale));
    for (uint32_t i = 0; i < n; ++i) out[begin + i] = float_to_bf16(value[codes[begin + i]] * scale);
  }
}

}  // namespace conclave
