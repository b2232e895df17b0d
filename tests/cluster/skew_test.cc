// A model whose busiest experts get ten times the mean: balancing evens the shards out under load, and no
// token changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "attention_service/core/dispatch_plan.h"
#include "tests/cluster/fault_flags.h"
#include "tests/cluster/keeper.h"
#include "tests/cluster/load.h"

namespace conclave {
namespace {

constexpr uint32_t kShards = 4;
constexpr uint32_t kExperts = 64;
constexpr uint32_t kStreams = 16;
constexpr uint32_t kRequests = 32;
constexpr uint32_t kTokens = 24;
constexpr double kAim = 1.15;      // busiest shard over the mean
constexpr double kBusiest = 10.0;  // busiest expert over the mean
constexpr Nanos kLimit = 60 * kSecond;
constexpr Nanos kWindow = 3 * kSecond;  // of the rows that shards compute

std::string skewed_model() {
  MakeOptions options;
  options.out = ClusterEnvironment::directory() + "/skewed";
  options.geometry = "tiny-m2";
  options.gate_bias_std = 0.5f;
  options.set = {{"num_local_experts", std::to_string(kExperts)}, {"num_experts_per_tok", "4"}};
  const auto made = make_checkpoint(options);
  EXPECT_TRUE(made.ok()) << made.status();
  return options.out;
}

struct SkewTest : ::testing::Test {
  SkewTest()
      : cluster([] {
          ClusterShape shape;
          shape.model = skewed_model();
          shape.shards = kShards;
          // Only when it is asked for, and with no second homes by which a worker could even things out
          // itself.
          shape.scheduler_arguments = {"--set", "scheduler.rebalance_interval_s=0",
                                       "--set", "scheduler.load_half_life_s=2",
                                       "--set", "scheduler.min_replicas=1"};
          return shape;
        }()),
        keeper(cluster) {}

  std::string command(std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--scheduler", cluster.scheduler_address()});
    Process process =
        Process::start("conclave", arguments,
                       ClusterEnvironment::directory() + "/skew" + std::to_string(++commands) + ".log");
    EXPECT_EQ(process.wait(kLimit).value_or(-1), 0) << process.log();
    return process.log();
  }
  double busiest_layer() { return cluster.metric("scheduler", "conclave_scheduler_busiest_layer_ratio"); }
  // What the shards really did within a while, an expert that is computed for some rows counting as these and
  // kExpertVisitCost more, as workers count when they choose homes: the busiest shard over the mean.
  double measured() {
    const auto work = [&] {
      std::vector<double> out;
      for (uint32_t i = 0; i < kShards; ++i) {
        const std::string name = "shard" + std::to_string(i);
        out.push_back(cluster.metric(name, "conclave_expert_rows_total") +
                      kExpertVisitCost * cluster.metric(name, "conclave_expert_runs_total"));
      }
      return out;
    };
    const std::vector<double> before = work();
    keeper.tend_for(kWindow);
    std::vector<double> done = work();
    double sum = 0;
    for (uint32_t i = 0; i < kShards; ++i) sum += done[i] -= before[i];
    return *std::max_element(done.begin(), done.end()) / (sum / kShards);
  }
  // Of the load reports: the busiest expert of any layer over the mean of its layer.
  double busiest_expert() {
    double most = 0;
    for (uint32_t layer = 0; layer < 4; ++layer) {
      const std::string json = command({"experts", "--layer", std::to_string(layer), "--json"});
      const std::string key = "\"rows_per_s\":";
      double sum = 0, top = 0;
      for (size_t at = json.find(key); at != std::string::npos; at = json.find(key, at + 1)) {
        const double rows = std::stod(json.substr(at + key.size()));
        sum += rows;
        top = std::max(top, rows);
      }
      if (sum > 0) most = std::max(most, top / (sum / kExperts));
    }
    return most;
  }

  ProcessCluster cluster;
  Keeper keeper;
  int commands = 0;
};

TEST_F(SkewTest, BalancingEvensOutTheShardsAndChangesNoToken) {
  const auto expected = undisturbed(kRequests, kTokens, cluster.shape().model);
  ASSERT_TRUE(cluster.wait_ready());
  Load load(*cluster.gateway, expected, {.concurrency = kStreams});
  ASSERT_TRUE(keeper.tend_until([&] { return load.running() == kStreams && busiest_layer() > 0; }, kLimit));
  keeper.tend_for(kWindow);
  const double skew = busiest_expert();
  EXPECT_GE(skew, kBusiest);
  const double assigned_before = busiest_layer(), measured_before = measured();
  EXPECT_GT(assigned_before, kAim) << "nothing to balance";
  command({"rebalance"});
  // What is moved first was chosen by the load of the first seconds: asked again until it is even.
  EXPECT_TRUE(keeper.tend_until(
      [&] {
        if (cluster.metric("scheduler", "conclave_scheduler_preparing_placements") != 0) return false;
        if (busiest_layer() <= kAim) return true;
        Process::start("conclave", {"rebalance", "--scheduler", cluster.scheduler_address()},
                       ClusterEnvironment::directory() + "/again.log")
            .wait(kLimit);
        return false;
      },
      kLimit));
  keeper.tend_for(kWindow);
  const double assigned_after = busiest_layer(), measured_after = measured();
  EXPECT_LE(assigned_after, kAim);
  EXPECT_LE(measured_after, kAim);
  load.stop();
  ASSERT_TRUE(keeper.tend_until([&] { return load.over(); }, kLimit));
  const LoadReport report = load.report();
  EXPECT_EQ(report.wrong, 0u) << ::testing::PrintToString(report.faults);
  EXPECT_EQ(report.refused, 0u);
  EXPECT_EQ(keeper.settle(kLimit), "");
  std::ostringstream row;
  row << std::fixed << std::setprecision(2) << "| " << skew << " | " << assigned_before << " | "
      << assigned_after << " | " << measured_before << " | " << measured_after << " | " << report.completed
      << " |";
  table_line(
      "| busiest expert / mean | worst layer's busiest shard / mean before | after | work done, busiest "
      "shard / mean, before | after | requests |");
  table_line("|---|---|---|---|---|---|");
  table_line(row.str());
}

}  // namespace
}  // namespace conclave
