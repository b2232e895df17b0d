#include "libs/base/random.h"

#include <sys/random.h>

#include <utility>

#include "libs/base/check.h"
#include "libs/base/clock.h"

namespace conclave {

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xD2511F53ull * c[0];
    const uint64_t p1 = 0xCD9E8D57ull * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return c;
}

float uniform_draw(uint64_t seed, uint32_t choice, uint64_t position, DrawPurpose purpose) {
  const auto words = philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                                 choice, static_cast<uint32_t>(purpose)},
                                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return static_cast<float>(words[0] >> 8) * 0x1.0p-24f;
}

uint64_t SplitMix64::next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

uint64_t SplitMix64::below(uint64_t bound) {
  CONCLAVE_CHECK(bound > 0);
  return static_cast<uint64_t>((static_cast<__uint128_t>(next()) * bound) >> 64);
}

double SplitMix64::uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

uint64_t system_random_u64() {
  // By the block, from the kernel: std::random_device asks the processor for each word, which takes microseconds on some.
  // Blocks of up to 256 bytes come whole.
  thread_local std::array<uint64_t, 32> block;
  thread_local size_t left = 0;
  if (left == 0) {
    CONCLAVE_CHECK(getrandom(block.data(), sizeof block, 0) == static_cast<ssize_t>(sizeof block));
    left = block.size();
  }
  return std::exchange(block[--left], 0);  // nobody reads it twice
}

Incarnation make_incarnation() {
  const uint64_t ms = static_cast<uint64_t>(wall_now_ms());
  return Incarnation((ms << 22) | (system_random_u64() & ((1u << 22) - 1)));
}

}  // namespace conclave
