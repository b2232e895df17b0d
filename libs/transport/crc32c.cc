#include "libs/transport/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace conclave {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // reflected

constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c >> 1) ^ ((c & 1) ? kPolynomial : 0);
    t[0][i] = c;
  }
  for (uint32_t i = 0; i < 256; ++i) {
    for (size_t k = 1; k < 8; ++k) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xff];
  }
  return t;
}
constexpr auto kTables = make_tables();

#if defined(__x86_64__)
// crc * x^(8 * kLane) mod P, by tables: joins three lanes that were computed side by side. The instruction
// takes 3 cycles and starts one each cycle, so three lanes are three times as fast.
constexpr size_t kLane = 1024;

constexpr uint32_t shift_by_zeros(uint32_t crc, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) crc = (crc >> 8) ^ kTables[0][crc & 0xff];
  return crc;
}
constexpr std::array<std::array<uint32_t, 256>, 4> make_shift_tables() {
  // Shifting is linear: 32 single bits are enough, every table entry is their sum.
  std::array<uint32_t, 32> bit{};
  for (uint32_t b = 0; b < 32; ++b) bit[b] = shift_by_zeros(1u << b, kLane);
  std::array<std::array<uint32_t, 256>, 4> t{};
  for (uint32_t byte = 0; byte < 4; ++byte) {
    for (uint32_t v = 0; v < 256; ++v) {
      uint32_t sum = 0;
      for (uint32_t b = 0; b < 8; ++b) {
        if (v & (1u << b)) sum ^= bit[byte * 8 + b];
      }
      t[byte][v] = sum;
    }
  }
  return t;
}
const auto kShift = make_shift_tables();

uint32_t shift_lane(uint32_t crc) {
  return kShift[0][crc & 0xff] ^ kShift[1][(crc >> 8) & 0xff] ^ kShift[2][(crc >> 16) & 0xff] ^
         kShift[3][crc >> 24];
}

uint64_t load64(const std::byte* p) {
  uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}

__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(const std::byte* p, size_t n, uint32_t state) {
  uint64_t c = state;
  while (n >= 3 * kLane) {
    uint64_t a = c, b = 0, d = 0;
    for (size_t i = 0; i < kLane; i += 8) {
      a = _mm_crc32_u64(a, load64(p + i));
      b = _mm_crc32_u64(b, load64(p + kLane + i));
      d = _mm_crc32_u64(d, load64(p + 2 * kLane + i));
    }
    const uint32_t ab = shift_lane(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b);
    c = shift_lane(ab) ^ static_cast<uint32_t>(d);
    p += 3 * kLane;
    n -= 3 * kLane;
  }
  for (; n >= 8; p += 8, n -= 8) c = _mm_crc32_u64(c, load64(p));
  uint32_t tail = static_cast<uint32_t>(c);
  for (; n > 0; ++p, --n) tail = _mm_crc32_u8(tail, static_cast<uint8_t>(*p));
  return tail;
}

bool has_sse42() {
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
}
#endif

}  // namespace

uint32_t crc32c_portable(std::span<const std::byte> data, uint32_t crc) {
  uint32_t c = ~crc;
  const std::byte* p = data.data();
  size_t n = data.size();
  for (; n >= 8; p += 8, n -= 8) {
    uint32_t lo, hi;
    std::memcpy(&lo, p, 4);
    std::memcpy(&hi, p + 4, 4);
    lo ^= c;
    c = kTables[7][lo & 0xff] ^ kTables[6][(lo >> 8) & 0xff] ^ kTables[5][(lo >> 16) & 0xff] ^
        kTables[4][lo >> 24] ^ kTables[3][hi & 0xff] ^ kTables[2][(hi >> 8) & 0xff] ^
        kTables[1][(hi >> 16) & 0xff] ^ kTables[0][hi >> 24];
  }
  for (; n > 0; ++p, --n) c = (c >> 8) ^ kTables[0][(c ^ static_cast<uint8_t>(*p)) & 0xff];
  return ~c;
}

uint32_t crc32c(std::span<const std::byte> data, uint32_t crc) {
#if defined(__x86_64__)
  if (has_sse42()) return ~crc32c_sse42(data.data(), data.size(), ~crc);
#endif
  return crc32c_portable(data, crc);
}

}  // namespace conclave
