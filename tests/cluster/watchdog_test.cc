// Processes that stop while requests run: who holds a request up is said, health checks fail meanwhile, and
// everything goes on with the same tokens when the process does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/cluster/cluster.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

constexpr uint32_t kStreams = 4, kTokens = 400;

// Reports after half a second; nobody is declared dead for being silent.
ClusterShape patient_shape(uint32_t shards) {
  ClusterShape shape;
  shape.shards = shards;
  shape.scheduler_arguments = {
      "--set", "logging.stall_report_s=0.5",         "--set", "scheduler.dead_after_ms=600000",
      "--set", "scheduler.max_peer_troubles=100000", "--set", "scheduler.dead_after_trouble_ms=600000"};
  shape.worker_arguments.insert(shape.worker_arguments.end(), {"--set", "logging.stall_report_s=0.5"});
  return shape;
}

std::string reports(const std::string& hop) { return "conclave_stall_reports_total{hop=\"" + hop + "\"}"; }
std::string stalled(const std::string& hop) { return "conclave_stalled_requests{hop=\"" + hop + "\"}"; }

HttpAnswer health(ProcessCluster& cluster, const std::string& process, const std::string& path = "/readyz") {
  auto answer = http_get(cluster.ops(process), path);
  return answer.ok() ? *answer : HttpAnswer{};
}

TEST(WatchdogTest, AWorkerThatStopsIsNamed) {
  ProcessCluster cluster(patient_shape(2));
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, kStreams, kTokens);
  streams.wait_tokens(3);
  cluster.worker.signal(SIGSTOP);
  ASSERT_TRUE(eventually([&] { return cluster.metric("scheduler", reports("worker")) >= kStreams; }))
      << cluster.scheduler.log();
  EXPECT_EQ(cluster.metric("scheduler", stalled("worker")), kStreams);
  EXPECT_THAT(cluster.scheduler.log(), HasSubstr("a request makes no progress"));
  EXPECT_THAT(cluster.scheduler.log(), HasSubstr("\"detail\":\"worker\""));
  ASSERT_TRUE(eventually([&] { return health(cluster, "scheduler").code == 503; }));
  EXPECT_THAT(health(cluster, "scheduler").body, HasSubstr("no worker has finished a step"));
  EXPECT_EQ(health(cluster, "scheduler", "/livez").code, 200);  // a restart of it would not help
  cluster.worker.signal(SIGCONT);
  streams.check(cluster);
  EXPECT_TRUE(eventually([&] { return health(cluster, "scheduler").code == 200; }));
  EXPECT_TRUE(eventually([&] { return cluster.metric("scheduler", stalled("worker")) == 0; }));
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST(WatchdogTest, AShardThatStopsIsNamedByTheSchedulerAndTheWorker) {
  ProcessCluster cluster(patient_shape(2));
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, kStreams, kTokens);
  streams.wait_tokens(3);
  cluster.shards[1].signal(SIGSTOP);
  ASSERT_TRUE(eventually([&] { return cluster.metric("scheduler", reports("shard")) >= 1; }))
      << cluster.scheduler.log();
  EXPECT_THAT(cluster.scheduler.log(), HasSubstr("\"detail\":\"shard1\""));
  ASSERT_TRUE(eventually([&] {
    const HttpAnswer answer = health(cluster, "worker");
    return answer.code == 503 &&
           answer.body.find("the running step has made no progress") != std::string::npos;
  })) << cluster.worker.log();
  EXPECT_THAT(health(cluster, "worker").body,
              ::testing::AnyOf(HasSubstr("rows are at shard1"), HasSubstr("rows have no shard")));
  EXPECT_EQ(health(cluster, "worker", "/livez").code, 200);
  cluster.shards[1].signal(SIGCONT);
  streams.check(cluster);
  EXPECT_TRUE(eventually([&] { return health(cluster, "worker").code == 200; }));
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST(WatchdogTest, AMissingShardIsThePlacement) {
  ProcessCluster cluster(patient_shape(1));
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, kStreams, kTokens);
  streams.wait_tokens(3);
  cluster.shards[0].kill();
  ASSERT_TRUE(eventually([&] { return cluster.metric("scheduler", reports("placement")) >= kStreams; }))
      << cluster.scheduler.log();
  EXPECT_THAT(cluster.scheduler.log(), HasSubstr("no expert shard is there"));
  cluster.start_shard(0);
  streams.check(cluster);
  EXPECT_TRUE(eventually([&] { return cluster.metric("scheduler", stalled("placement")) == 0; }));
}

}  // namespace
}  // namespace conclave
