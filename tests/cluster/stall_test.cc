// How long streams stand still when a process is killed: the longest gap between two tokens of a stream, over
// all streams, for each of many kills.
#include <gtest/gtest.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "libs/base/random.h"
#include "tests/cluster/fault_flags.h"
#include "tests/cluster/keeper.h"
#include "tests/cluster/load.h"

namespace conclave {
namespace {

constexpr uint32_t kStreams = 16;
constexpr Nanos kLimit = 60 * kSecond;
constexpr Nanos kQuiet = 2500 * kMillisecond;  // between kills; back-offs have started over by then

struct Kind {
  const char* name;
  uint32_t shards, workers;
  std::vector<std::string> victims;
  Nanos aim;
};

std::string milliseconds(Nanos time) { return std::to_string(time / kMillisecond); }

// Whether every process is a ready member, under load.
bool all_ready(Keeper& keeper, ProcessCluster& cluster) {
  for (const std::string& name : keeper.names()) {
    if (!keeper.process(name).running()) return false;
    const auto ready = http_get(cluster.ops(name), "/readyz");
    if (!ready.ok() || ready->code != 200) return false;
  }
  return true;
}

TEST(StallTest, LongKillsOfEachRole) {
  const Kind kinds[] = {{"a shard of three, whose experts others have too",
                         3,
                         1,
                         {"shard0", "shard1", "shard2"},
                         250 * kMillisecond},
                        {"a worker of two", 2, 2, {"worker", "worker1"}, 1500 * kMillisecond},
                        {"the scheduler", 2, 1, {"scheduler"}, 2 * kSecond}};
  SplitMix64 random(fault_flags().seed);
  table_line("| killed, " + std::to_string(fault_flags().kills) +
             " times | longest gap without a kill, ms | median, ms | maximum, ms | aim, ms |");
  table_line("|---|---|---|---|---|");
  for (const Kind& kind : kinds) {
    if (std::string(kind.name).find(fault_flags().only) == std::string::npos) continue;
    ClusterShape shape;
    shape.model = demo_model();
    shape.shards = kind.shards;
    shape.workers = kind.workers;
    ProcessCluster cluster(shape);
    ASSERT_TRUE(cluster.wait_ready());
    Keeper keeper(cluster);
    Load load(*cluster.gateway, fault_free_tokens(), {.concurrency = kStreams});
    ASSERT_TRUE(keeper.tend_until([&] { return load.running() == kStreams; }, kLimit));
    std::vector<Nanos> gaps;
    Nanos without = 0;
    for (uint32_t i = 0; i < fault_flags().kills; ++i) {
      ASSERT_TRUE(keeper.tend_until([&] { return all_ready(keeper, cluster); }, kLimit)) << kind.name;
      load.mark();
      keeper.tend_for(kQuiet);
      without = std::max(without, load.longest_gap());
      ASSERT_TRUE(keeper.tend_until([&] { return load.running() == kStreams; }, kLimit)) << kind.name;
      load.mark();
      keeper.kill(kind.victims[random.below(kind.victims.size())]);
      // Until it is back and everybody goes on: what its return costs is part of it.
      ASSERT_TRUE(keeper.tend_until([&] { return all_ready(keeper, cluster); }, kLimit)) << kind.name;
      const TimePoint back = steady_now();
      ASSERT_TRUE(keeper.tend_until([&] { return load.all_moved(back); }, kLimit)) << kind.name;
      gaps.push_back(load.longest_gap());
    }
    load.stop();
    ASSERT_TRUE(keeper.tend_until([&] { return load.over(); }, kLimit)) << kind.name;
    const LoadReport report = load.report();
    EXPECT_EQ(report.wrong, 0u) << kind.name << ": " << ::testing::PrintToString(report.faults);
    std::sort(gaps.begin(), gaps.end());
    std::string all;
    for (const Nanos gap : gaps) all += " " + milliseconds(gap);
    std::cout << "gaps in ms:" << all << "; survivors that ended: " << keeper.unexpected().size() << "\n";
    table_line("| " + std::string(kind.name) + " | " + milliseconds(without) + " | " +
               milliseconds(gaps[gaps.size() / 2]) + " | " + milliseconds(gaps.back()) + " | " +
               milliseconds(kind.aim) + " |");
  }
}

}  // namespace
}  // namespace conclave
