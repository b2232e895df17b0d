// BF16 and E4M3 as bit patterns, with the exact conversions of the numerics contract. Pure, usable
// everywhere.
#pragma once

#include <bit>
#include <cstdint>

namespace conclave {

using Bf16 = uint16_t;  // the upper half of an IEEE binary32

inline float bf16_to_float(Bf16 b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

// Round to nearest, ties to even; NaN becomes a quiet NaN; subnormals are kept.
inline Bf16 float_to_bf16(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<Bf16>((u >> 16) | 0x0040u);
  return static_cast<Bf16>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// OCP FP8 E4M3 ("fn": no infinities, 0x7f/0xff are NaN, subnormal step 2^-9).
inline float e4m3_to_float(uint8_t b) {
  const uint32_t sign = static_cast<uint32_t>(b & 0x80u) << 24;
  const uint32_t exponent = (b >> 3) & 0xfu;
  const uint32_t mantissa = b & 7u;
  if (exponent == 0xf && mantissa == 7) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1.0p-9f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

// Round to nearest, ties to even, saturating at 448; NaN stays NaN.
inline uint8_t float_to_e4m3(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const uint8_t sign = static_cast<uint8_t>((u >> 24) & 0x80u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  const float a = std::bit_cast<float>(magnitude);
  if (a >= 464.0f) return static_cast<uint8_t>(sign | 0x7eu);  // 464 is the middle of 448 and the absent 480
  if (a < 0x1.0p-6f) {                                         // subnormal: count steps of 2^-9, ties to even
    const float steps = a * 0x1.0p9f;
    uint32_t n = static_cast<uint32_t>(steps);
    const float rest = steps - static_cast<float>(n);
    if (rest > 0.5f || (rest == 0.5f && (n & 1u))) ++n;
    return static_cast<uint8_t>(sign | n);
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  const uint32_t code = (rounded >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | (code > 0x7eu ? 0x7eu : code));
}

}  // namespace conclave
