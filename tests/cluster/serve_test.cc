// Real processes, real gRPC, real UCX: answers, memory, idle CPU, and what happens when one of them dies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <map>
#include <thread>

#include "tests/cluster/cluster.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

// Tokens of streams that something happens to: a step takes a millisecond or less, and they must not be over
// before it does.
constexpr uint32_t kLong = 384;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

TEST(ServeTest, AnswersEqualTheClusterInOneProcess) {
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 8, 24);
  streams.check(cluster);
  EXPECT_EQ(cluster.unexpected_ends(), "");

  // Every service is ready and says so, and counts under public names.
  for (const char* process : {"scheduler", "worker", "shard0", "shard1"}) {
    const std::string ops = cluster.ops(process);
    for (const char* path : {"/livez", "/readyz", "/startupz"}) {
      auto answer = http_get(ops, path);
      ASSERT_TRUE(answer.ok()) << answer.status();
      EXPECT_EQ(answer->code, 200) << process << path << ": " << answer->body;
    }
    auto metrics = http_get(ops, "/metrics");
    ASSERT_TRUE(metrics.ok()) << metrics.status();
    EXPECT_THAT(metrics->body, HasSubstr("conclave_")) << process;
  }
  EXPECT_THAT(http_get(cluster.ops("scheduler"), "/metrics")->body,
              HasSubstr("conclave_scheduler_ended_requests_total{how=\"length\"} 8"));

  // A clean end within moments.
  for (Process* process : {&cluster.worker, &cluster.shards[0], &cluster.shards[1], &cluster.scheduler}) {
    process->signal(SIGTERM);
    EXPECT_EQ(process->wait(10 * kSecond), 0) << process->log();
  }
}

TEST(ServeTest, AKilledShardIsReplacedAndEveryStreamCompletes) {
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 16, kLong);
  streams.wait_tokens(8);
  cluster.shards[0].kill();
  ASSERT_LT(streams.longest(), kLong) << "the streams were over before the kill";
  cluster.start_shard(0);
  streams.check(cluster);
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST(ServeTest, AKilledWorkerIsReplacedAndEveryStreamCompletes) {
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 16, kLong);
  streams.wait_tokens(8);
  cluster.worker.kill();
  ASSERT_LT(streams.longest(), kLong);
  cluster.start_worker();
  streams.check(cluster);
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST(ServeTest, AKilledSchedulerIsReplacedAndEveryStreamCompletes) {
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 16, kLong);
  streams.wait_tokens(8);
  cluster.scheduler.kill();
  ASSERT_LT(streams.longest(), kLong);
  cluster.start_scheduler();
  streams.check(cluster);
  EXPECT_GE(cluster.gateway->metrics().resubmissions, 16u);
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST(ServeTest, AStoppedShardIsReplacedAndComesBackUnderANewIncarnation) {
  ProcessCluster cluster(
      2, {"--set", "scheduler.dead_after_ms=1000", "--set", "scheduler.dead_after_trouble_ms=700"});
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 8, 64);
  streams.wait_tokens(4);
  cluster.shards[1].signal(SIGSTOP);
  ASSERT_TRUE(eventually([&] {
    auto metrics = http_get(cluster.ops("scheduler"), "/metrics");
    return metrics.ok() && metrics->body.find("conclave_scheduler_lost_members_total 1") != std::string::npos;
  }));
  cluster.shards[1].signal(SIGCONT);
  streams.check(cluster);
  EXPECT_TRUE(eventually([&] {
    auto metrics = http_get(cluster.ops("shard1"), "/metrics");
    return metrics.ok() && metrics->body.find("conclave_member_incarnations_total 2") != std::string::npos;
  })) << cluster.shards[1].log();
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST(ServeTest, IdleProcessesUseNoCpu) {
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  Streams(cluster, 4, 8).check(cluster);
  std::map<std::string, Process*> processes = {{"scheduler", &cluster.scheduler},
                                               {"worker", &cluster.worker},
                                               {"shard0", &cluster.shards[0]},
                                               {"shard1", &cluster.shards[1]}};
  std::map<std::string, double> before;
  for (auto& [name, process] : processes) before[name] = process->cpu_seconds();
  const TimePoint begin = steady_now();
  std::this_thread::sleep_for(std::chrono::seconds(5));  // what is measured is time itself
  const double seconds = static_cast<double>(steady_now() - begin) * 1e-9;
  for (auto& [name, process] : processes) {
    const double share = (process->cpu_seconds() - before[name]) / seconds;
    EXPECT_LT(share, 0.02) << name;
    RecordProperty(name + "_idle_cpu_percent", std::to_string(share * 100));
  }
}

TEST(ServeTest, TwoHundredRequestsDoNotGrowMemory) {
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  const uint32_t kRequests = 200, kConcurrency = 16, kTokens = 16, kKinds = 20;
  const auto expected = undisturbed(kKinds, kTokens);
  std::map<std::string, Process*> processes = {{"scheduler", &cluster.scheduler},
                                               {"worker", &cluster.worker},
                                               {"shard0", &cluster.shards[0]},
                                               {"shard1", &cluster.shards[1]}};
  std::map<std::string, uint64_t> at_50;
  std::deque<std::pair<uint32_t, std::shared_ptr<PendingCompletion>>> open;
  uint32_t next = 0, done = 0;
  while (done < kRequests) {
    while (next < kRequests && open.size() < kConcurrency) {
      open.emplace_back(next, cluster.submit(numbered_request(next % kKinds, kTokens)));
      ++next;
    }
    auto [number, pending] = open.front();
    open.pop_front();
    auto answer = pending->wait(kStreamLimit);
    ASSERT_TRUE(answer.ok()) << number << ": " << answer.status();
    EXPECT_EQ(answer->tokens, expected[number % kKinds]) << number;
    if (++done == 50) {
      for (auto& [name, process] : processes) at_50[name] = process->anonymous_bytes();
    }
  }
  for (auto& [name, process] : processes) {
    const int64_t growth =
        static_cast<int64_t>(process->anonymous_bytes()) - static_cast<int64_t>(at_50[name]);
    EXPECT_LT(growth, 8 << 20) << name;
    RecordProperty(name + "_growth_kib", std::to_string(growth / 1024));
  }
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

}  // namespace
}  // namespace conclave
