// Growing, shrinking and rolling upgrades under load: nothing fails, nothing changes, and work goes on.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "tests/cluster/completions.h"
#include "tests/cluster/fault_flags.h"
#include "tests/cluster/keeper.h"
#include "tests/cluster/load.h"
#include "tests/cluster/router_load.h"

namespace conclave {
namespace {

constexpr uint32_t kStreams = 16;
constexpr Nanos kLimit = 60 * kSecond;
constexpr double kMostMoved = 1.2;      // over the least
constexpr Nanos kWindow = 2 * kSecond;  // of the rates before and after
constexpr Nanos kLook = 50 * kMillisecond;

// Whether there are so many shards, and every process is ready.
bool whole(Keeper& keeper, ProcessCluster& cluster, size_t shards) {
  if (cluster.metric("scheduler", "conclave_scheduler_shards") != static_cast<double>(shards)) return false;
  for (const std::string& name : keeper.names()) {
    if (!keeper.process(name).running()) return false;
    const auto answer = http_get(cluster.ops(name), "/readyz");
    if (!answer.ok() || answer->code != 200) return false;
  }
  return true;
}

struct ScaleTest : ::testing::Test {
  ScaleTest()
      : cluster([] {
          ClusterShape shape;
          shape.model = demo_model();
          shape.shards = 1;
          return shape;
        }()),
        keeper(cluster) {}

  // Seldom looks, since on a small machine a look takes from what is measured.
  bool ready(size_t shards) {
    if (steady_now() < next_look) return false;
    next_look = steady_now() + kLook;
    return whole(keeper, cluster, shards);
  }

  struct Rate {
    uint64_t tokens = 0;
    double seconds = 0;
    double longest_gap_ms = 0;  // of any stream
    double tokens_per_s() const { return static_cast<double>(tokens) / seconds; }
  };
  // Adds what comes while `act` runs.
  void add(Rate& rate, Load& load, const std::function<void()>& act) {
    const uint64_t tokens = load.report().tokens;
    load.mark();
    const TimePoint begin = steady_now();
    act();
    rate.seconds += static_cast<double>(steady_now() - begin) * 1e-9;
    rate.tokens += load.report().tokens - tokens;
    rate.longest_gap_ms = std::max(rate.longest_gap_ms, static_cast<double>(load.longest_gap()) * 1e-6);
  }
  Rate rate(Load& load, const std::function<void()>& act) {
    Rate rate;
    add(rate, load, act);
    return rate;
  }

  // Of the shards first, first + 1, ..., last - 1.
  double sum_of(const char* metric, size_t first, size_t last) {
    double sum = 0;
    for (size_t i = first; i < last; ++i)
      sum += std::max(0.0, cluster.metric("shard" + std::to_string(i), metric));
    return sum;
  }
  double warmed_bytes(size_t shards) {
    return sum_of("conclave_expert_warmed_weight_bytes_total", 0, shards);
  }
  // `least`: what has to be read whatever the order: what the new shards hold in the end, or what those that
  // left held, each when it left.
  void row(const char* what, const Rate& before, const Rate& during, const Rate& after, double bytes, double least) {
    std::ostringstream line;
    line << std::fixed << std::setprecision(0) << "| " << what << " | " << before.tokens_per_s() << " | "
         << during.tokens_per_s() << " | " << after.tokens_per_s() << " | " << std::setprecision(2)
         << during.tokens_per_s() / std::min(before.tokens_per_s(), after.tokens_per_s()) << " | " << during.seconds << " | "
         << std::setprecision(0) << during.longest_gap_ms << " | " << std::setprecision(2) << bytes / (1 << 20)
         << " | " << bytes / least << " |";
    table_line(line.str());
    EXPECT_LE(bytes, kMostMoved * least) << what;
  }

  ProcessCluster cluster;
  Keeper keeper;
  TimePoint next_look = 0;
};

TEST_F(ScaleTest, FromOneShardToFiveAndBackToTwoUnderLoad) {
  ASSERT_TRUE(cluster.wait_ready());
  Load load(*cluster.gateway, fault_free_tokens(), {.concurrency = kStreams});
  ASSERT_TRUE(keeper.tend_until([&] { return load.running() == kStreams; }, kLimit));
  const auto window = [&] { keeper.tend_for(kWindow); };
  const Rate one = rate(load, window);
  const double bytes_of_one = warmed_bytes(1);
  const Rate up = rate(load, [&] {
    for (size_t i = 1; i < 5; ++i) {
      cluster.shards.emplace_back();
      keeper.start("shard" + std::to_string(i));
    }
    EXPECT_TRUE(keeper.tend_until([&] { return ready(5); }, kLimit)) << cluster.scheduler.log();
  });
  const double read_up = warmed_bytes(5) - bytes_of_one;
  const double least_up = sum_of("conclave_expert_held_weight_bytes", 1, 5);
  const Rate five = rate(load, window);
  double read_down = 0, least_down = 0;
  Rate down;  // without what this test asks the shards for in between
  for (size_t i = 4; i >= 2; --i) {
    const std::string name = "shard" + std::to_string(i);
    const double before = warmed_bytes(i);
    least_down += sum_of("conclave_expert_held_weight_bytes", i, i + 1);
    Process& process = keeper.process(name);
    add(down, load, [&] {
      keeper.let_go(name);
      process.signal(SIGTERM);
      EXPECT_TRUE(keeper.tend_until([&] { return !process.running(); }, kLimit)) << process.log();
      EXPECT_TRUE(keeper.tend_until([&] { return ready(i); }, kLimit)) << cluster.scheduler.log();
    });
    EXPECT_EQ(process.wait(0), 0) << process.log();
    read_down += warmed_bytes(i) - before;
  }
  const Rate two = rate(load, window);
  load.stop();
  ASSERT_TRUE(keeper.tend_until([&] { return load.over(); }, kLimit));
  const LoadReport report = load.report();
  EXPECT_EQ(report.wrong, 0u) << ::testing::PrintToString(report.faults);
  EXPECT_EQ(report.refused, 0u);
  EXPECT_GT(report.completed, kStreams);
  EXPECT_EQ(keeper.settle(kLimit), "");
  // Work goes on. How fast is measured, not asserted: processes that start take the cores of a small machine.
  EXPECT_GT(up.tokens_per_s(), 0);
  EXPECT_GT(down.tokens_per_s(), 0);
  table_line(
      "| change | before, tokens/s | during | after | during / lower of both | s | longest gap, ms | MiB read | of the "
      "least |");
  table_line("|---|---|---|---|---|---|---|---|---|");
  row("1 to 5 shards", one, up, five, read_up, least_up);
  row("5 to 2 shards", five, down, two, read_down, least_down);
}

// Every process is told to end and started again, one after the other, as an upgrade does it.
TEST(RollingTest, EveryProcessIsReplacedUnderLoad) {
  ClusterShape shape;
  shape.model = demo_model();
  shape.workers = 2;
  shape.shards = 3;
  ProcessCluster cluster(shape);
  cluster.start_router();
  Keeper keeper(cluster, /*with_router=*/true);
  ASSERT_TRUE(cluster.wait_ready());
  ASSERT_TRUE(cluster.wait_router_ready());
  const auto tokens = static_cast<uint32_t>(fault_free_tokens()[0].size());
  std::vector<std::string> texts;
  for (uint32_t i = 0; i < 4; ++i) texts.push_back(complete(cluster.http_address(), i, tokens, false));
  Load load(*cluster.gateway, fault_free_tokens(), {.concurrency = kStreams});
  RouterLoad clients(cluster.http_address(), texts, tokens, 4);
  ASSERT_TRUE(
      keeper.tend_until([&] { return load.running() == kStreams && clients.running() == 4; }, kLimit));
  const std::vector<std::string> names = keeper.names();
  for (const std::string& name : names) {
    keeper.let_go(name);
    Process& process = keeper.process(name);
    process.signal(SIGTERM);
    ASSERT_TRUE(keeper.tend_until([&] { return !process.running(); }, kLimit)) << name;
    EXPECT_EQ(process.wait(0), 0) << name << ":\n" << process.log();
    keeper.expect(name);
    keeper.start(name);
    ASSERT_TRUE(keeper.tend_until([&] { return whole(keeper, cluster, 3); }, kLimit)) << name;
    const TimePoint back = steady_now();
    ASSERT_TRUE(keeper.tend_until([&] { return load.all_moved(back); }, kLimit)) << name;
  }
  load.stop();
  clients.stop();
  ASSERT_TRUE(keeper.tend_until([&] { return load.over() && clients.over(); }, kLimit));
  const LoadReport direct = load.report(), routed = clients.report();
  EXPECT_EQ(direct.wrong, 0u) << ::testing::PrintToString(direct.faults);
  EXPECT_EQ(routed.wrong, 0u) << ::testing::PrintToString(routed.faults);
  EXPECT_EQ(clients.resumed(), 0u) << "a router that is told to end lets its streams end";
  EXPECT_EQ(direct.refused, 0u);
  EXPECT_GT(direct.completed, 0u);
  EXPECT_GT(routed.completed, 0u);
  EXPECT_EQ(keeper.settle(kLimit), "");
}

}  // namespace
}  // namespace conclave
