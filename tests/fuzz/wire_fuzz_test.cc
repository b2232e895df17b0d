// A seeded mutation loop over wire messages; fast enough for every run. The libFuzzer entry of the same
// target is wire_libfuzzer.cc (built where clang is the compiler).
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "libs/base/random.h"
#include "libs/transport/wire.h"
#include "tests/fuzz/wire_target.h"

namespace conclave::fuzz {
namespace {

using Bytes = std::vector<std::byte>;

// A valid message with random contents within the target's limits.
Bytes seed_message(SplitMix64& random) {
  const wire::Envelope e{Incarnation(random.next()), random.next(), random.below(100), random.below(10000)};
  Bytes out;
  switch (random.below(8)) {
    case 0: {
      DispatchBatch b;
      b.id = {e.sender, random.next()};
      b.hidden = 1 + static_cast<uint32_t>(random.below(16));
      b.dtype = static_cast<RowDtype>(1 + random.below(3));
      const auto rows = random.below(6);
      if (rows > 0) b.expert_begin.push_back(0);
      for (uint64_t r = 0; r < rows; ++r) {
        for (uint64_t k = random.below(5); k > 0; --k)
          b.expert_ids.push_back(static_cast<uint16_t>(random.next()));
        b.expert_begin.push_back(static_cast<uint32_t>(b.expert_ids.size()));
      }
      b.rows = std::make_shared<Bytes>(rows * b.row_bytes());
      const std::byte extra[5] = {};
      const std::vector<wire::Section> sections = {{static_cast<uint16_t>(random.next()), 1, extra}};
      wire::encode(
          e, b, random.chance(0.5), out,
          random.chance(0.5) ? std::span<const wire::Section>(sections) : std::span<const wire::Section>{});
      out.insert(out.end(), b.rows->begin(), b.rows->end());
      return out;
    }
    case 1: {
      CombineBatch b;
      b.id = {e.sender, random.next()};
      b.hidden = 1 + static_cast<uint32_t>(random.below(16));
      uint32_t item = 0;
      for (uint64_t i = random.below(6); i > 0; --i) {
        b.items.push_back(item);
        item += 1 + static_cast<uint32_t>(random.below(3));
      }
      for (uint64_t i = random.below(3); i > 0; --i)
        b.missing.push_back(static_cast<uint16_t>(random.next()));
      b.outputs = std::make_shared<Bytes>(b.items.size() * b.row_bytes());
      wire::encode(e, b, random.chance(0.5), out);
      out.insert(out.end(), b.outputs->begin(), b.outputs->end());
      return out;
    }
    case 2: {
      wire::HelloBody b;
      b.session = 1;
      b.address.assign(random.below(40), 'a');
      b.fleet.assign(random.below(40), 'f');
      wire::encode(e, b, out);
      return out;
    }
    case 3: {
      wire::HelloAckBody b;
      b.session = 1;
      b.message.assign(random.below(40), 'm');
      wire::encode(e, b, out);
      return out;
    }
    case 4:
      wire::encode(e, wire::PingBody{1, 2}, out);
      return out;
    case 5:
      wire::encode_cancel(e, {e.sender, 1}, out);
      return out;
    case 6:
      wire::encode_bye(e, 7, out);
      return out;
    default:
      wire::encode_ack(e, out);
      return out;
  }
}

void mutate(Bytes& m, SplitMix64& random) {
  static constexpr uint64_t kNasty[] = {0,      1,          2,          0x7f,         0xff,
                                        0xffff, 0x7fffffff, 0xffffffff, ~uint64_t{0}, 1u << 20};
  const size_t at = m.empty() ? 0 : random.below(m.size());
  switch (random.below(5)) {
    case 0:
      if (!m.empty()) m[at] ^= static_cast<std::byte>(1u << random.below(8));
      break;
    case 1: {
      const uint64_t v = kNasty[random.below(std::size(kNasty))];
      const size_t n = size_t{1} << random.below(4);
      const size_t aligned = at / n * n;
      if (aligned + n <= m.size()) std::memcpy(m.data() + aligned, &v, n);
      break;
    }
    case 2:
      m.resize(at);
      break;
    case 3:
      m.insert(m.end(), random.below(40), static_cast<std::byte>(random.next()));
      break;
    default:
      if (!m.empty()) m[at] = static_cast<std::byte>(random.next());
  }
}

TEST(WireFuzz, MutatedMessagesNeverBreakTheDecoder) {
  constexpr int kCases = 120'000;
  SplitMix64 random(20261);
  int accepted = 0, mended_accepted = 0;
  for (int i = 0; i < kCases; ++i) {
    Bytes m = seed_message(random);
    const bool mend = random.chance(0.8);
    for (uint64_t n = 1 + random.below(4); n > 0; --n) mutate(m, random);
    const bool ok = try_wire_message(m, mend);
    accepted += ok && !mend;
    mended_accepted += ok && mend;
  }
  std::printf("[ MEASURED ] %d cases: %d accepted behind a mended CRC, %d without\n", kCases, mended_accepted,
              accepted);
  // Mutations of rows without a CRC, or that undo each other, leave a valid message; most must not.
  EXPECT_GT(mended_accepted, kCases / 100) << "the checks behind the CRC were not reached";
  EXPECT_LT(accepted, kCases / 50);
}

TEST(WireFuzz, UnmutatedSeedsAreAccepted) {
  SplitMix64 random(7);
  for (int i = 0; i < 2000; ++i) ASSERT_TRUE(try_wire_message(seed_message(random), false)) << i;
}

TEST(WireFuzz, NoiseIsRefused) {
  SplitMix64 random(8);
  for (int i = 0; i < 20000; ++i) {
    Bytes m(random.below(300));
    for (auto& b : m) b = static_cast<std::byte>(random.next());
    if (m.size() >= 4 && random.chance(0.5)) std::memcpy(m.data(), &wire::kMagic, 4);
    ASSERT_FALSE(try_wire_message(m, random.chance(0.5)));
  }
}

}  // namespace
}  // namespace conclave::fuzz
