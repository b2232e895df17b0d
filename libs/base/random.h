// Two generators: a counter-based one for sampling, whose draws depend on nothing but their key, and a small
// sequential one for simulation, tests and identifiers.
#pragma once

#include <array>
#include <cstdint>

#include "libs/base/ids.h"

namespace conclave {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Pure.
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// What a draw is for; part of the counter, so that two purposes never share a draw. Values are part of the
// contract.
enum class DrawPurpose : uint32_t { kSample = 0, kInit = 1, kDraft = 2 };

// A uniform in [0, 1) with 24 bits, a function of (seed, choice, position, purpose) alone (design rule 1).
float uniform_draw(uint64_t seed, uint32_t choice, uint64_t position, DrawPurpose purpose);

// splitmix64: a sequence for simulation and tests, not for sampling.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t next();
  // Uniform in [0, bound); bound > 0.
  uint64_t below(uint64_t bound);
  // Uniform in [0, 1).
  double uniform();
  // True with probability p.
  bool chance(double p) { return uniform() < p; }

 private:
  uint64_t state_;
};

// Bits from the operating system's generator, for incarnations, request ids and missing seeds.
uint64_t system_random_u64();
// A fresh incarnation: wall time in ms and random bits (ids.h).
Incarnation make_incarnation();

}  // namespace conclave
