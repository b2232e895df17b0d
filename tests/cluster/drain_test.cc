// Draining: by `conclave drain`, by SIGTERM, with nobody to take over, out of patience. Nothing is lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/cluster/cluster.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

constexpr char kMoved[] = "conclave_scheduler_moved_sequences_total";
constexpr uint32_t kTokens = 480;

ClusterShape demo_shape(uint32_t workers) {
  ClusterShape shape;
  shape.workers = workers;
  shape.model = demo_model();
  return shape;
}

// What a command printed, and its exit code.
struct Command {
  explicit Command(std::vector<std::string> arguments) {
    static int count = 0;
    Process process =
        Process::start("conclave", arguments,
                       ClusterEnvironment::directory() + "/command" + std::to_string(++count) + ".log");
    code = process.wait(60 * kSecond).value_or(-1);
    text = process.log();
  }
  int code = 0;
  std::string text;
};

TEST(DrainTest, AWorkerDrainedByCommandUnderSixteenStreamsLosesNothing) {
  ProcessCluster cluster(demo_shape(2));
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 16, kTokens);
  streams.wait_tokens(8);
  const Command drain({"drain", "worker", "--wait", "--scheduler", cluster.scheduler_address()});
  EXPECT_EQ(drain.code, 0) << drain.text;
  EXPECT_EQ(drain.text, "worker is drained\n");
  EXPECT_GT(cluster.metric("scheduler", kMoved), 0) << "the streams were over before the drain";
  streams.check(cluster);

  // It stays, idle, and says so.
  const auto ready = http_get(cluster.ops("worker"), "/readyz");
  ASSERT_TRUE(ready.ok()) << ready.status();
  EXPECT_EQ(ready->code, 503);
  EXPECT_THAT(ready->body, HasSubstr("drained"));
  EXPECT_THAT(cluster.worker.log(), HasSubstr("drained: nothing is left here"));
  EXPECT_EQ(http_get(cluster.ops("worker1"), "/readyz")->code, 200);
  const Command status({"status", "--scheduler", cluster.scheduler_address()});
  EXPECT_THAT(status.text, ::testing::ContainsRegex("worker +[0-9]+ +drained"));
  const double rows = cluster.metric("worker", "conclave_attention_rows_total");
  EXPECT_GT(rows, 0);
  auto later = cluster.submit(numbered_request(3, 16))->wait(kStreamLimit);
  ASSERT_TRUE(later.ok()) << later.status();
  EXPECT_EQ(cluster.metric("worker", "conclave_attention_rows_total"), rows);
  EXPECT_EQ(cluster.unexpected_ends(), "");
  cluster.worker.signal(SIGTERM);
  EXPECT_EQ(cluster.worker.wait(10 * kSecond), 0) << cluster.worker.log();
}

TEST(DrainTest, AWorkerThatIsToldToEndUnderSixteenStreamsHandsThemOver) {
  ProcessCluster cluster(demo_shape(2));
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 16, kTokens);
  streams.wait_tokens(8);
  cluster.worker.signal(SIGTERM);
  EXPECT_EQ(cluster.worker.wait(30 * kSecond), 0) << cluster.worker.log();
  EXPECT_THAT(cluster.worker.log(), HasSubstr("drained: nothing is left here"));
  EXPECT_GT(cluster.metric("scheduler", kMoved), 0) << "the streams were over before the end";
  EXPECT_EQ(cluster.metric("scheduler", "conclave_scheduler_replayed_sequences_total"), 0);
  streams.check(cluster);
  EXPECT_TRUE(cluster.other_workers[0].running());
}

TEST(DrainTest, AShardThatIsToldToEndUnderLoadLosesNothing) {
  // Where other work has the cores the streams may be over first, which shows nothing about load.
  bool under_load = false;
  for (int attempt = 0; attempt < 5 && !under_load; ++attempt) {
    ProcessCluster cluster(demo_shape(1));
    ASSERT_TRUE(cluster.wait_ready());
    Streams streams(cluster, 8, kTokens);
    streams.wait_tokens(8);
    cluster.shards[1].signal(SIGTERM);
    EXPECT_EQ(cluster.shards[1].wait(20 * kSecond), 0) << cluster.shards[1].log();
    under_load = streams.longest() < kTokens;
    streams.check(cluster);
  }
  EXPECT_TRUE(under_load) << "the streams were over before the end";
}

TEST(DrainTest, AShardDrainedByCommandUnderLoadHandsOverWhatItHoldsAndStays) {
  ProcessCluster cluster(demo_shape(1));
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 8, kTokens);
  streams.wait_tokens(8);
  const Command drain({"drain", "shard1", "--wait", "--scheduler", cluster.scheduler_address()});
  EXPECT_EQ(drain.code, 0) << drain.text;
  EXPECT_EQ(drain.text, "shard1 is drained\n");
  EXPECT_LT(streams.longest(), kTokens) << "the streams were over before the drain";
  const double rows = cluster.metric("shard1", "conclave_expert_rows_total");
  streams.check(cluster);
  EXPECT_EQ(cluster.metric("shard1", "conclave_expert_rows_total"), rows) << "nobody asks it any more";
  EXPECT_GT(rows, 0);
  ASSERT_TRUE(eventually([&] { return cluster.metric("shard1", "conclave_expert_held_experts") == 0; }));
  EXPECT_EQ(cluster.metric("worker", "conclave_attention_lost_shards_total"), 0);
  EXPECT_THAT(cluster.scheduler.log(), HasSubstr("\"draining\""));
  EXPECT_THAT(cluster.scheduler.log(), HasSubstr("\"drained\""));
  const Command shards({"shards", "--scheduler", cluster.scheduler_address()});
  EXPECT_THAT(shards.text, ::testing::ContainsRegex("shard1 +[0-9]+ +drained +0.0 "));
  EXPECT_EQ(cluster.unexpected_ends(), "");
  cluster.shards[1].signal(SIGTERM);
  EXPECT_EQ(cluster.shards[1].wait(10 * kSecond), 0) << cluster.shards[1].log();
  EXPECT_EQ(cluster.gateway->fleet().ready, true);
}

// "Until it is restarted": the scheduler's restart is not that.
TEST(DrainTest, WhoIsDrainedStaysSoWhenTheSchedulerIsStartedAnew) {
  ProcessCluster cluster(demo_shape(2));
  ASSERT_TRUE(cluster.wait_ready());
  for (const char* name : {"worker", "shard1"}) {
    const Command drain({"drain", name, "--wait", "--scheduler", cluster.scheduler_address()});
    ASSERT_EQ(drain.code, 0) << drain.text;
  }
  cluster.scheduler.kill();
  cluster.start_scheduler();
  ASSERT_TRUE(eventually([&] {
    return cluster.metric("scheduler", "conclave_scheduler_workers") == 2 &&
           cluster.metric("scheduler", "conclave_scheduler_shards") == 2 && cluster.gateway->fleet().ready;
  })) << cluster.scheduler.log();
  const double rows = cluster.metric("worker", "conclave_attention_rows_total");
  Streams(cluster, 6, 16).check(cluster);
  EXPECT_EQ(cluster.metric("worker", "conclave_attention_rows_total"), rows);
  EXPECT_EQ(cluster.metric("shard1", "conclave_expert_held_experts"), 0);
  const Command status({"status", "--scheduler", cluster.scheduler_address()});
  for (const char* name : {"worker", "shard1"})
    EXPECT_THAT(status.text, ::testing::ContainsRegex(std::string(name) + " +[0-9]+ +drained"));
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

// With nobody to take over it goes at once, and what runs waits for the next one.
TEST(DrainTest, TheOnlyShardIsLetGoAtOnce) {
  ProcessCluster cluster(1);
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 4, 400);
  streams.wait_tokens(4);
  cluster.shards[0].signal(SIGTERM);
  EXPECT_EQ(cluster.shards[0].wait(10 * kSecond), 0) << cluster.shards[0].log();
  EXPECT_THAT(cluster.shards[0].log(), HasSubstr("drained: nothing is left here"));
  EXPECT_THAT(cluster.scheduler.log(), HasSubstr("no shard is left that could take over"));
  cluster.start_shard(0);
  streams.check(cluster);
}

// What nobody can take over runs to its end where it is.
TEST(DrainTest, TheOnlyWorkerEndsOnceItsStreamsHave) {
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 4, kTokens);
  streams.wait_tokens(4);
  cluster.worker.signal(SIGTERM);
  streams.check(cluster);
  EXPECT_EQ(cluster.worker.wait(10 * kSecond), 0) << cluster.worker.log();
  EXPECT_EQ(cluster.metric("scheduler", "conclave_scheduler_replayed_sequences_total"), 0);
}

// Patience ends: at a second signal, and after the drain time. What is cut off so is computed elsewhere.
TEST(DrainTest, ASecondSignalOrTheDrainTimeEndTheWait) {
  for (const bool second : {true, false}) {
    ClusterShape shape;
    shape.worker_arguments.insert(
        shape.worker_arguments.end(),
        {"--set", std::string("attention.drain_time_s=") + (second ? "60" : "0.2")});
    ProcessCluster cluster(shape);
    ASSERT_TRUE(cluster.wait_ready());
    Streams streams(cluster, 4, 800);
    streams.wait_tokens(4);
    cluster.worker.signal(SIGTERM);
    if (second) {
      ASSERT_TRUE(eventually([&] { return cluster.worker.log().find("\"stopping\"") != std::string::npos; }));
      EXPECT_FALSE(cluster.worker.wait(100 * kMillisecond).has_value());
      cluster.worker.signal(SIGTERM);
    }
    EXPECT_EQ(cluster.worker.wait(10 * kSecond), 0) << cluster.worker.log();
    EXPECT_LT(streams.longest(), 800u) << "the streams were over before the end";
    EXPECT_THAT(cluster.worker.log(), HasSubstr(second ? "leaving at once" : "leaving before"));
    cluster.start_worker();
    streams.check(cluster);
    EXPECT_EQ(cluster.unexpected_ends(), "");
  }
}

TEST(DrainTest, TheCommandSaysWhatIsWrong) {
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  const std::string scheduler = cluster.scheduler_address();
  const Command unknown({"drain", "nobody", "--scheduler", scheduler});
  EXPECT_EQ(unknown.code, 1);
  EXPECT_THAT(unknown.text, HasSubstr("no member is called nobody; there are: "));
  EXPECT_THAT(unknown.text, HasSubstr("shard1"));
  const Command router({"drain", "test", "--scheduler", scheduler});
  EXPECT_EQ(router.code, 1);
  EXPECT_THAT(router.text, HasSubstr("test is a router"));
  const Command nowhere({"drain", "worker", "--scheduler", "127.0.0.1:1"});
  EXPECT_EQ(nowhere.code, 1);
  EXPECT_THAT(nowhere.text, HasSubstr("no scheduler answers at 127.0.0.1:1"));
  // What is wrong with the command itself is 2.
  EXPECT_EQ(Command({"drain", "--scheduler", scheduler}).code, 2);
  EXPECT_EQ(Command({"drain", "worker", "--scheduler", "127.0.0.1:99999"}).code, 2);
  EXPECT_EQ(Command({"status", "--watch", "--count", "-1", "--scheduler", scheduler}).code, 2);
  EXPECT_EQ(Command({"no-such-command"}).code, 2);
  EXPECT_EQ(Command({"--help"}).code, 0);
  EXPECT_EQ(http_get(cluster.ops("worker"), "/readyz")->code, 200);
}

}  // namespace
}  // namespace conclave
