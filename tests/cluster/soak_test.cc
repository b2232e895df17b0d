// Something is killed every few seconds for as long as one likes, under load with cancellations, at the
// scheduler and through a router: no request fails, no process grows.
#include <gtest/gtest.h>

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>

#include "libs/base/random.h"
#include "tests/cluster/completions.h"
#include "tests/cluster/fault_flags.h"
#include "tests/cluster/keeper.h"
#include "tests/cluster/load.h"
#include "tests/cluster/router_load.h"

namespace conclave {
namespace {

constexpr uint32_t kStreams = 16, kClients = 8;
constexpr Nanos kBetween = 10 * kSecond;
constexpr Nanos kLimit = 120 * kSecond;
constexpr double kMoreMiB = 16;

TEST(SoakTest, LongKillsAndCancellations) {
  SplitMix64 random(fault_flags().seed);
  ClusterShape shape;
  shape.model = demo_model();
  shape.shards = 3;
  shape.workers = 2;
  ProcessCluster cluster(shape);
  cluster.start_router();
  Keeper keeper(cluster, /*with_router=*/true);
  ASSERT_TRUE(cluster.wait_ready());
  ASSERT_TRUE(cluster.wait_router_ready());
  const auto& expected = fault_free_tokens();
  const auto tokens = static_cast<uint32_t>(expected[0].size());
  std::vector<std::string> texts;
  for (uint32_t i = 0; i < kClients; ++i) {
    texts.push_back(complete(cluster.http_address(), i, tokens, false));
  }
  const TimePoint begin = steady_now(), end = begin + fault_flags().seconds * kSecond;
  std::map<std::string, uint32_t> kills;
  // By name: the most it held in the second third of the time, and in the last.
  std::map<std::string, double> middle, late;
  const auto sample = [&] {
    const TimePoint now = steady_now();
    const Nanos third = (end - begin) / 3;
    if (now < begin + third) return;
    for (const auto& [name, held] : keeper.holdings()) {
      double& most = now < begin + 2 * third ? middle[name] : late[name];
      most = std::max(most, static_cast<double>(held.anonymous_bytes) / (1 << 20));
    }
  };
  Load load(*cluster.gateway, expected, {.concurrency = kStreams, .cancelled = 0.2, .seed = random.next()});
  RouterLoad clients(cluster.http_address(), texts, tokens, kClients);
  while (steady_now() < end) {
    const std::vector<std::string> names = keeper.names();
    const std::string victim = names[random.below(names.size())];
    ++kills[victim];
    keeper.kill(victim);
    const TimePoint next = steady_now() + kBetween / 2 + static_cast<Nanos>(random.below(kBetween));
    keeper.tend_until(
        [&] {
          sample();
          return steady_now() >= std::min(next, end);
        },
        kLimit);
    const TimePoint now = steady_now();
    ASSERT_TRUE(keeper.tend_until([&] { return load.all_moved(now); }, kLimit))
        << "after the kill of " << victim;
  }
  load.stop();
  clients.stop();
  ASSERT_TRUE(keeper.tend_until([&] { return load.over() && clients.over(); }, kLimit));
  EXPECT_EQ(keeper.settle(kLimit), "");
  const LoadReport direct = load.report(), routed = clients.report();
  EXPECT_EQ(direct.wrong, 0u) << ::testing::PrintToString(direct.faults);
  EXPECT_EQ(routed.wrong, 0u) << ::testing::PrintToString(routed.faults);
  std::ostringstream line;
  line << fault_flags().seconds << " s: " << direct.completed + routed.completed << " requests completed, "
       << direct.cancelled << " cancelled, " << direct.wrong + routed.wrong << " wrong, "
       << direct.refused + routed.refused << " refused; " << clients.resumed()
       << " streams went with their router and were resumed; survivors that ended: "
       << keeper.unexpected().size();
  table_line(line.str());
  table_line("");
  table_line("| process | kills | most MiB, second third | most MiB, last third |");
  table_line("|---|---|---|---|");
  for (const auto& [name, most] : late) {
    std::ostringstream row;
    row << std::fixed << std::setprecision(1) << "| " << name << " | " << kills[name] << " | " << middle[name]
        << " | " << most << " |";
    table_line(row.str());
    EXPECT_LT(most, middle[name] + kMoreMiB) << name;
  }
}

}  // namespace
}  // namespace conclave
