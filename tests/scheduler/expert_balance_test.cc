#include "scheduler/core/expert_balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "libs/base/random.h"

namespace conclave::scheduler {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();
using Homes = std::vector<uint16_t>;

// A fleet over time: shards come, leave and die, and what each holds is carried from one answer to the next.
struct Fleet {
  uint32_t layers = 0;
  uint32_t experts = 0;
  BalanceOptions options;
  std::vector<double> load;
  std::vector<BalanceShard> shards;
  std::vector<Homes> homes;

  Fleet(uint32_t l, uint32_t e, BalanceOptions o = {}) : layers(l), experts(e), options(o) {}
  size_t all() const { return static_cast<size_t>(layers) * experts; }
  void join(uint64_t slots = kUnlimited) { shards.push_back({Incarnation(++last), slots, false}); }
  void lose(size_t index) {
    shards.erase(shards.begin() + static_cast<ptrdiff_t>(index));
    for (Homes& of_expert : homes) {
      std::erase(of_expert, index);
      for (uint16_t& home : of_expert) home -= home > index ? 1 : 0;
    }
  }
  Balance ask() const { return balance_experts(layers, experts, load, shards, homes, options); }
  // Asks, checks what must hold of every answer, and takes it.
  Balance settle() {
    Balance balance = ask();
    check(balance);
    homes = balance.homes;
    const Balance again = ask();
    EXPECT_EQ(again.homes, homes) << "a second call moves " << again.added << " more";
    EXPECT_EQ(again.added + again.removed, 0u);
    return balance;
  }
  void check(const Balance& balance) const;
  std::vector<uint64_t> held() const {
    std::vector<uint64_t> counts(shards.size());
    for (const Homes& of_expert : homes) {
      for (const uint16_t home : of_expert) ++counts[home];
    }
    return counts;
  }
  uint64_t last = 0;
};

void Fleet::check(const Balance& balance) const {
  ASSERT_EQ(balance.homes.size(), all());
  std::vector<uint64_t> used(shards.size());
  uint64_t added = 0, removed = 0;
  size_t fewest = balance.homes.empty() ? 1 : shards.size(), most = 0;
  for (size_t i = 0; i < all(); ++i) {
    const Homes& now = balance.homes[i];
    const Homes before = homes.empty() ? Homes() : homes[i];
    ASSERT_EQ(std::set<uint16_t>(now.begin(), now.end()).size(), now.size()) << "a home twice";
    for (const uint16_t home : now) {
      ASSERT_LT(home, shards.size());
      EXPECT_FALSE(shards[home].leaving);
      ++used[home];
      added += std::count(before.begin(), before.end(), home) == 0 ? 1 : 0;
    }
    for (const uint16_t home : before) removed += std::count(now.begin(), now.end(), home) == 0 ? 1 : 0;
    fewest = std::min(fewest, now.size());
    most = std::max(most, now.size());
  }
  EXPECT_EQ(balance.added, added);
  EXPECT_EQ(balance.removed, removed);
  uint64_t usable = 0, slots = 0;
  for (size_t s = 0; s < shards.size(); ++s) {
    EXPECT_LE(used[s], shards[s].slots);
    if (shards[s].leaving || shards[s].slots == 0) continue;
    ++usable;
    slots += std::min<uint64_t>(shards[s].slots, all());
  }
  const uint64_t replicas = std::min<uint64_t>(std::max(1u, options.min_replicas), usable);
  EXPECT_EQ(balance.complete, all() == 0 || fewest > 0);
  for (uint64_t n = 1; n <= replicas; ++n) {
    if (slots >= n * all()) {
      EXPECT_GE(fewest, n) << "slots " << slots << " for " << all();
    }
  }
  if (fewest == 0) {
    EXPECT_LE(most, 1u) << "a second home where one has none";
  }
  EXPECT_LE(most, std::max<size_t>(options.max_replicas, options.min_replicas));
}

// Loads of which some experts, `hot` of them in each layer, get ten times the mean of the layer.
std::vector<double> skewed(uint32_t layers, uint32_t experts, uint32_t hot, SplitMix64& random) {
  std::vector<double> load;
  for (uint32_t l = 0; l < layers; ++l) {
    std::vector<double> of_layer(experts);
    for (double& w : of_layer) w = 0.5 + random.uniform();
    const double rest = std::accumulate(of_layer.begin() + hot, of_layer.end(), 0.0);
    // x = 10 (hot x + rest) / experts
    for (uint32_t e = 0; e < hot; ++e) of_layer[e] = 10 * rest / (experts - 10.0 * hot);
    for (uint32_t e = experts - 1; e > 0; --e) std::swap(of_layer[e], of_layer[random.below(e + 1)]);
    load.insert(load.end(), of_layer.begin(), of_layer.end());
  }
  return load;
}

std::vector<double> noisy(std::vector<double> load, SplitMix64& random) {
  for (double& w : load) w *= 0.95 + 0.1 * random.uniform();
  return load;
}

TEST(ExpertBalance, SkewedLoadIsEvenedOut) {
  for (const uint32_t replicas : {1u, 2u}) {
    for (const uint32_t hot : {1u, 4u, 12u}) {
      for (uint64_t seed = 1; seed <= 5; ++seed) {
        SplitMix64 random(seed);
        Fleet fleet(4, 256, {.min_replicas = replicas});
        for (int i = 0; i < 4; ++i) fleet.join();
        fleet.settle();  // nothing known of the load
        EXPECT_EQ(fleet.held(), std::vector<uint64_t>(4, 256 * replicas));
        fleet.load = skewed(4, 256, hot, random);
        const Balance balance = fleet.settle();
        EXPECT_LE(balance.busiest_after, 1.15) << replicas << " homes, " << hot << " hot, seed " << seed;
      }
    }
  }
}

TEST(ExpertBalance, AnExpertTooHotForOneShardGetsMoreHomes) {
  for (const uint32_t replicas : {1u, 2u}) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      SplitMix64 random(seed);
      Fleet fleet(2, 32, {.min_replicas = replicas});
      for (int i = 0; i < 8; ++i) fleet.join();
      fleet.settle();
      fleet.load = skewed(2, 32, 2, random);  // each 2.5 times the share of one shard
      const Balance balance = fleet.settle();
      EXPECT_GT(balance.busiest_before, replicas == 1 ? 2.4 : 1.2);
      EXPECT_LE(balance.busiest_after, 1.15) << replicas << " homes, seed " << seed;
      // Others have no more than their due: an idle copy is only memory.
      size_t more = 0;
      for (const Homes& homes : fleet.homes) more += homes.size() > replicas ? 1 : 0;
      EXPECT_LE(more, replicas == 1 ? 12u : 8u);
    }
  }
}

TEST(ExpertBalance, AFurtherHomePaysOnceOthersMakeRoomForIt) {
  // Each hot one is more than a shard's share, and half of one more than any other shard can take beside what
  // it has.
  for (const uint32_t replicas : {1u, 2u}) {
    for (const uint32_t hot : {1u, 2u}) {
      SplitMix64 random(hot);
      Fleet fleet(1, 32, {.min_replicas = replicas});
      for (int i = 0; i < 4; ++i) fleet.join();
      fleet.load = skewed(1, 32, hot, random);
      EXPECT_LE(fleet.settle().busiest_after, 1.1) << replicas << " homes, " << hot << " hot";
    }
  }
}

TEST(ExpertBalance, NoiseMovesNothing) {
  for (const uint32_t replicas : {1u, 2u}) {
    for (const uint32_t shards : {2u, 4u, 8u}) {
      SplitMix64 random(shards);
      Fleet fleet(3, 128, {.min_replicas = replicas});
      for (uint32_t i = 0; i < shards; ++i) fleet.join();
      const std::vector<double> load = skewed(3, 128, 4, random);
      fleet.load = load;
      fleet.settle();
      for (int i = 0; i < 50; ++i) {
        fleet.load = noisy(load, random);
        const Balance balance = fleet.ask();
        EXPECT_EQ(balance.added + balance.removed, 0u);
        EXPECT_EQ(balance.homes, fleet.homes);
      }
    }
  }
}

TEST(ExpertBalance, AJoinMovesTheNewShardsShareAndLittleMore) {
  for (const bool even : {true, false}) {
    for (const uint32_t replicas : {1u, 2u}) {
      SplitMix64 random(3);
      Fleet fleet(4, 256, {.min_replicas = replicas});
      if (!even) {
        for (size_t i = 0; i < fleet.all(); ++i) fleet.load.push_back(0.25 + 1.5 * random.uniform());
      }
      for (uint32_t i = 0; i < replicas; ++i) fleet.join();
      fleet.settle();
      while (fleet.shards.size() < 16) {
        fleet.join();
        const auto count = static_cast<double>(fleet.shards.size());
        const double least = static_cast<double>(fleet.all()) * replicas / count;
        const Balance balance = fleet.settle();
        EXPECT_LE(static_cast<double>(balance.added), 1.2 * least) << count << " shards";
        EXPECT_EQ(balance.added, balance.removed);
        EXPECT_LE(balance.busiest_after, 1.1001) << count << " shards";
        if (even) {
          EXPECT_GE(static_cast<double>(fleet.held().back()), 0.9 * least) << count << " shards";
          EXPECT_LE(static_cast<double>(fleet.held().back()), 1.001 * least + 4) << count << " shards";
        }
      }
    }
  }
}

TEST(ExpertBalance, FromOneShardToFiveAtOnce) {
  for (const uint32_t replicas : {1u, 2u}) {
    Fleet fleet(4, 256, {.min_replicas = replicas});
    fleet.join();
    EXPECT_EQ(fleet.settle().added, fleet.all());
    for (int i = 0; i < 4; ++i) fleet.join();
    const Balance balance = fleet.settle();
    const double least = static_cast<double>(fleet.all()) * replicas * 4 / 5;
    EXPECT_LE(static_cast<double>(balance.added), 1.2 * least);
    EXPECT_LE(balance.busiest_after, 1.05);
  }
}

TEST(ExpertBalance, ALossMakesAgainWhatWasLostAndADrainMovesWhatLeaves) {
  for (const bool drain : {false, true}) {
    for (const uint32_t replicas : {1u, 2u, 3u}) {
      for (uint64_t seed = 1; seed <= 10; ++seed) {
        SplitMix64 random(seed);
        Fleet fleet(3, 256, {.min_replicas = replicas});
        for (uint32_t i = 0; i < 6; ++i) fleet.join();
        for (size_t i = 0; i < fleet.all(); ++i) fleet.load.push_back(0.25 + 1.5 * random.uniform());
        fleet.settle();
        const size_t gone = random.below(6);
        const uint64_t had = fleet.held()[gone];
        std::vector<Homes> kept = fleet.homes;
        if (drain) {
          fleet.shards[gone].leaving = true;
          for (Homes& homes : kept) std::erase(homes, gone);
        } else {
          fleet.lose(gone);
          kept = fleet.homes;
        }
        const Balance balance = fleet.settle();
        EXPECT_EQ(balance.added, had);
        EXPECT_EQ(balance.removed, drain ? had : 0);
        EXPECT_LE(balance.busiest_after, 1.1001);
        for (size_t i = 0; i < kept.size(); ++i) {  // what stays keeps its order
          ASSERT_TRUE(std::equal(kept[i].begin(), kept[i].end(), fleet.homes[i].begin()));
        }
      }
    }
  }
}

TEST(ExpertBalance, WhenASlotIsShortASecondHomeGivesWayToAFirst) {
  Fleet fleet(2, 32);  // 64 pairs, twice
  for (int i = 0; i < 4; ++i) fleet.join(32);
  fleet.settle();
  EXPECT_EQ(fleet.held(), std::vector<uint64_t>(4, 32));
  fleet.lose(0);
  fleet.lose(0);  // 64 slots are left, and some experts lost both homes
  EXPECT_GT(std::count(fleet.homes.begin(), fleet.homes.end(), Homes()), 0);
  EXPECT_TRUE(fleet.settle().complete);
  fleet.lose(0);
  EXPECT_FALSE(fleet.settle().complete);
  EXPECT_EQ(fleet.held(), std::vector<uint64_t>{32});
  for (int i = 0; i < 3; ++i) fleet.join(32);
  EXPECT_TRUE(fleet.settle().complete);
  EXPECT_EQ(fleet.held(), std::vector<uint64_t>(4, 32));
}

TEST(ExpertBalance, SurplusHomesGoOnlyWhereSlotsAreShort) {
  SplitMix64 random(1);
  Fleet fleet(1, 32, {.min_replicas = 1});
  for (int i = 0; i < 4; ++i) fleet.join(16);
  fleet.load = skewed(1, 32, 2, random);
  fleet.settle();
  size_t homes = 0;
  for (const Homes& of_expert : fleet.homes) homes += of_expert.size();
  ASSERT_GT(homes, 32u);
  fleet.load.assign(32, 1.0);
  EXPECT_EQ(fleet.ask().removed, fleet.ask().added);  // moved at most, none given up
  fleet.lose(0);
  fleet.lose(0);  // exactly room for all
  EXPECT_TRUE(fleet.settle().complete);
  EXPECT_EQ(fleet.held(), std::vector<uint64_t>(2, 16));
}

TEST(ExpertBalance, ASmallNewShardHelpsEveryLayer) {
  Fleet fleet(8, 64, {.min_replicas = 1});
  fleet.join();
  fleet.join();
  fleet.settle();
  fleet.join(80);  // its fair share would be 171
  fleet.settle();
  std::vector<uint32_t> of_layer(8);
  for (size_t i = 0; i < fleet.all(); ++i) {
    of_layer[i / 64] += static_cast<uint32_t>(std::count(fleet.homes[i].begin(), fleet.homes[i].end(), 2));
  }
  EXPECT_EQ(of_layer, std::vector<uint32_t>(8, 10));
}

TEST(ExpertBalance, RepairLeavesLoadAlone) {
  SplitMix64 random(1);
  Fleet fleet(2, 64, {.min_replicas = 2});
  for (int i = 0; i < 4; ++i) fleet.join();
  fleet.settle();
  fleet.load = skewed(2, 64, 4, random);
  fleet.join();
  fleet.options.repair_only = true;
  EXPECT_EQ(fleet.ask().added, 0u);
  fleet.lose(1);
  const auto lost = static_cast<uint64_t>(
      std::count_if(fleet.homes.begin(), fleet.homes.end(), [](const Homes& h) { return h.size() < 2; }));
  EXPECT_EQ(fleet.ask().added, lost);
  EXPECT_EQ(fleet.ask().removed, 0u);
  fleet.options.repair_only = false;
  EXPECT_GT(fleet.ask().added, lost);
}

TEST(ExpertBalance, NothingToPlaceAndNowhereToPlaceIt) {
  EXPECT_TRUE(balance_experts(0, 0, {}, {}, {}, {}).complete);
  Fleet fleet(2, 8);
  Balance balance = fleet.settle();  // no shard
  EXPECT_FALSE(balance.complete);
  EXPECT_EQ(balance.busiest_after, 0);
  fleet.join();
  balance = fleet.settle();
  EXPECT_TRUE(balance.complete);
  EXPECT_EQ(balance.busiest_after, 1);
  fleet.join(0);  // can hold nothing
  EXPECT_EQ(fleet.settle().added, 0u);
  fleet.shards[0].leaving = fleet.shards[1].leaving = true;
  balance = fleet.settle();
  EXPECT_FALSE(balance.complete);
  EXPECT_EQ(balance.removed, 16u);
}

TEST(ExpertBalance, AnyLoadAnyFleetAnyHistory) {
  std::map<std::string, uint64_t> seen;
  for (uint64_t seed = 1; seed <= 1500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SplitMix64 random(seed);
    BalanceOptions options;
    options.min_replicas = static_cast<uint32_t>(random.below(4));
    options.max_replicas = static_cast<uint32_t>(1 + random.below(8));
    options.improve_ratio = random.chance(0.2) ? 1.02 + 0.3 * random.uniform() : 1.10;
    Fleet fleet(static_cast<uint32_t>(1 + random.below(4)), static_cast<uint32_t>(1 + random.below(24)),
                options);
    const bool tight = random.chance(0.5);
    const auto slots = [&] {
      if (!tight) return kUnlimited;
      return random.below(1 + fleet.all() * (random.chance(0.3) ? 2 : 1));
    };
    for (uint64_t i = random.below(7); i > 0; --i) fleet.join(slots());
    for (int round = 0; round < 6; ++round) {
      SCOPED_TRACE("round " + std::to_string(round));
      switch (random.below(6)) {
        case 0:
          fleet.join(slots());
          break;
        case 1:
          if (!fleet.shards.empty()) fleet.lose(random.below(fleet.shards.size()));
          break;
        case 2:
          if (!fleet.shards.empty()) fleet.shards[random.below(fleet.shards.size())].leaving = true;
          break;
        case 3:
          for (BalanceShard& shard : fleet.shards) shard.leaving = random.chance(0.3);
          break;
        default:
          fleet.load.assign(fleet.all(), 0);
          for (double& w : fleet.load) {
            w = random.chance(0.1) ? 0 : std::exp(4 * random.uniform());
            if (random.chance(0.01)) w = random.chance(0.5) ? -1 : std::numeric_limits<double>::quiet_NaN();
          }
      }
      const Balance balance = fleet.settle();
      ++seen[balance.complete ? "complete" : "incomplete"];
      seen["moved"] += balance.added;
      for (const Homes& homes : fleet.homes) ++seen["homes " + std::to_string(homes.size())];
      if (testing::Test::HasFailure()) return;
    }
  }
  for (const char* what :
       {"complete", "incomplete", "moved", "homes 0", "homes 1", "homes 2", "homes 3", "homes 5"}) {
    EXPECT_GT(seen[what], 20u) << what;
  }
}

}  // namespace
}  // namespace conclave::scheduler
