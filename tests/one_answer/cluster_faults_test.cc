// Faults change no token: shards that die in the middle of many streams, with and without a successor.
#include <gtest/gtest.h>

#include <atomic>

#include "libs/transport/fault_transport.h"
#include "tests/one_answer/harness.h"

namespace conclave {
namespace {

using testing::Answer;
using testing::RandomModel;

// Long enough to be in the middle of when a shard is killed.
constexpr uint32_t kTokens = testing::kSanitized ? 45 : 120;

class ClusterFaults : public ::testing::Test {
 protected:
  ClusterFaults() {
    options.worker.exchange.deadline_floor = 500 * kMillisecond;
    options.scheduler.prefill_chunk_tokens = 32;
    options.worker.micro_batch_min_rows = 4;
  }
  void start() {
    auto started = LocalCluster::start(testing::local(model), options);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster = std::move(*started);
    ASSERT_TRUE(cluster->wait_ready().ok());
  }
  std::vector<Answer> undisturbed() {
    start();
    auto want = testing::answers(*cluster, requests, 1, false);
    cluster.reset();
    return want;
  }
  // Starts all requests and returns when each has some tokens and most are not done.
  void begin_streams() {
    for (const auto& r : requests) pending.push_back(cluster->submit(r));
    for (const auto& p : pending) ASSERT_TRUE(p->wait_for_tokens(3, 60 * kSecond));
    size_t running = 0;
    for (size_t i = 0; i < pending.size(); ++i)
      running += pending[i]->tokens() < requests[i].sampling.max_tokens;
    ASSERT_GE(running, pending.size() / 2) << "too late to disturb";
  }
  std::vector<Answer> finish_streams() {
    std::vector<Answer> got;
    for (const auto& p : pending) {
      const auto done = p->wait(120 * kSecond);
      EXPECT_TRUE(done.ok()) << done.status();
      if (!done.ok()) return got;
      EXPECT_EQ(done->finish, FinishReason::kLength) << done->error;
      got.push_back({*done, {}});
    }
    return got;
  }

  const RandomModel model{WeightDtype::kBf16, 17};
  LocalClusterOptions options;
  const std::vector<AcceptedRequest> requests = testing::mixed_requests(model.spec, 16, kTokens);
  std::unique_ptr<LocalCluster> cluster;
  std::vector<std::shared_ptr<PendingCompletion>> pending;
};

TEST_F(ClusterFaults, AShardDiesAndASuccessorComes) {
  const auto want = undisturbed();
  start();
  begin_streams();
  cluster->kill_shard(0);
  ASSERT_TRUE(cluster->add_shard().ok());
  testing::expect_same(want, finish_streams());
}

TEST_F(ClusterFaults, AShardDiesAndTheOthersTakeItsExperts) {
  options.shards = 3;
  const auto want = undisturbed();
  start();
  begin_streams();
  cluster->kill_shard(1);
  testing::expect_same(want, finish_streams());
  EXPECT_EQ(cluster->worker_metrics(0).exchange.peers_up, 2u);
}

TEST_F(ClusterFaults, AllShardsDieAndComeBack) {
  const auto want = undisturbed();
  start();
  begin_streams();
  cluster->kill_shard(0);
  cluster->kill_shard(1);
  ASSERT_TRUE(cluster->add_shard().ok());
  testing::expect_same(want, finish_streams());
}

TEST_F(ClusterFaults, AWorkerDiesAndItsRequestsMoveToAnother) {
  options.workers = 2;
  const auto want = undisturbed();
  start();
  begin_streams();
  cluster->kill_worker(0);
  testing::expect_same(want, finish_streams());
}

// Every message of every member may be lost, doubled, late, out of order or damaged, and connections break at
// random.
TEST_F(ClusterFaults, ANetworkThatLosesAndDoublesMessages) {
  options.worker.exchange.deadline_floor = 30 * kMillisecond;
  options.scheduler.max_peer_troubles = 1'000'000;  // suspicion is not what is tested here
  options.shards = 3;
  const auto want = undisturbed();
  std::atomic<uint64_t> seed{100};
  const auto hub = std::make_shared<LoopbackHub>();
  options.make_transport =
      [&, hub](LoopExecutor& loop,
               const TransportOptions& transport) -> StatusOr<std::unique_ptr<ExpertTransport>> {
    FaultPlan plan;
    plan.drop_in = 0.01;
    plan.duplicate_in = 0.05;
    plan.delay_in = 0.05;
    plan.reorder_in = 0.2;
    plan.corrupt_in = 0.01;
    plan.peer_down = 0.001;
    return std::make_unique<FaultTransport>(std::make_unique<LoopbackTransport>(hub, loop, transport), loop,
                                            seed++, plan);
  };
  start();
  for (const auto& r : requests) pending.push_back(cluster->submit(r));
  testing::expect_same(want, finish_streams());
  const ExchangeMetrics exchange = cluster->worker_metrics(0).exchange;
  EXPECT_GT(exchange.duplicate_items + exchange.late_combines, 0u);
  EXPECT_GT(exchange.retried_items, 0u);
  EXPECT_GT(exchange.rejected_messages, 0u) << "damaged ones";
}

TEST_F(ClusterFaults, ShardsComeAndGoAllTheTime) {
  const auto want = undisturbed();
  start();
  begin_streams();
  for (size_t i = 0; i < 6; ++i) {
    ASSERT_TRUE(cluster->add_shard().ok());
    cluster->kill_shard(i);
    pending[i]->wait_for_tokens(kTokens / 6 * (i + 1), 60 * kSecond);
  }
  testing::expect_same(want, finish_streams());
}

}  // namespace
}  // namespace conclave
