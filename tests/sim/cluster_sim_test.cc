#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "tests/sim/cluster_chaos.h"

namespace conclave::scheduler {
namespace {

void expect_undisturbed(const std::vector<Stream*>& streams) {
  for (const Stream* stream : streams) EXPECT_EQ(difference(*stream), "");
}

std::vector<Stream*> submit_sixteen(ClusterSim& cluster) {
  std::vector<Stream*> streams;
  for (uint64_t n = 0; n < 16; ++n) streams.push_back(&cluster.submit(sim_request(n)));
  return streams;
}

void run_until_streaming(ClusterSim& cluster) {
  ASSERT_TRUE(cluster.world().run_until(
      [&] { return cluster.tokens_delivered() >= 40 || !cluster.violation().empty(); },
      cluster.world().now() + 60 * kSecond));
}

void expect_all_free(ClusterSim& cluster) {
  cluster.run_for(5 * kSecond);
  const SchedulerMetrics metrics = cluster.scheduler().metrics();
  EXPECT_EQ(metrics.kv_blocks_used, 0u);
  EXPECT_EQ(metrics.kv_blocks_reserved, 0u);
  EXPECT_EQ(metrics.requests_running + metrics.requests_waiting, 0u);
  EXPECT_EQ(cluster.violation(), "");
}

TEST(ClusterSim, TheAnswersComparedAreWorthComparing) {
  std::set<TokenId> tokens;
  for (uint64_t n = 0; n < 16; ++n) {
    const auto& choices = expected(n).choices;
    tokens.insert(choices[0].tokens.begin(), choices[0].tokens.end());
    if (choices.size() > 1) {
      EXPECT_NE(choices[0].tokens, choices[1].tokens);
    }
    EXPECT_EQ(expected(n).prompt_logprobs.size(), n % 3 == 1 ? sim_request(n).prompt.size() - 1 : 0);
    for (const Stream::Choice& choice : choices) {
      EXPECT_TRUE(choice.finish == FinishReason::kLength || choice.finish == FinishReason::kStop);
      EXPECT_EQ(choice.logprobs.size(), n % 2 == 1 ? choice.tokens.size() : 0);
    }
  }
  EXPECT_GT(tokens.size(), 20u);
  EXPECT_NE(expected(1).choices[0].tokens, expected(3).choices[0].tokens);
}

TEST(ClusterSim, AnyNumberOfShardsAndWorkersGivesTheTokensOfALoneRun) {
  for (const auto& [workers, shards] : {std::pair(1u, 1u), std::pair(1u, 2u), std::pair(2u, 5u)}) {
    ClusterConfig config;
    config.workers = workers;
    config.shards = shards;
    ClusterSim cluster(config);
    ASSERT_TRUE(cluster.run_ready()) << cluster.violation();
    const auto streams = submit_sixteen(cluster);
    ASSERT_TRUE(cluster.run_streams(60 * kSecond)) << cluster.violation();
    expect_undisturbed(streams);
    expect_all_free(cluster);
  }
}

TEST(ClusterSim, AKilledShardCostsNoStreamAToken) {
  for (const uint32_t shards : {1u, 2u, 3u}) {  // alone, and with survivors that take over
    ClusterConfig config;
    config.shards = shards;
    config.seed = shards;
    ClusterSim cluster(config);
    ASSERT_TRUE(cluster.run_ready()) << cluster.violation();
    const auto streams = submit_sixteen(cluster);
    run_until_streaming(cluster);
    EXPECT_GT(cluster.open_streams(), 8u);
    cluster.kill("expert-0");
    ASSERT_TRUE(cluster.run_streams(60 * kSecond)) << cluster.violation();
    expect_undisturbed(streams);
    expect_all_free(cluster);
    EXPECT_TRUE(cluster.up("expert-0"));  // it is back, under a new incarnation
    EXPECT_EQ(cluster.restarts(), 1u);
  }
}

TEST(ClusterSim, AShardThatStopsSilentlyIsFoundAndReplaced) {
  ClusterConfig config;
  config.seed = 5;
  ClusterSim cluster(config);
  ASSERT_TRUE(cluster.run_ready()) << cluster.violation();
  const auto streams = submit_sixteen(cluster);
  run_until_streaming(cluster);
  cluster.pause("expert-1", 20 * kSecond);
  ASSERT_TRUE(cluster.run_streams(15 * kSecond)) << cluster.violation();  // before it goes on
  expect_undisturbed(streams);
  cluster.run_for(15 * kSecond);
  EXPECT_EQ(cluster.scheduler().metrics().members_lost, 1u);
  cluster.run_for(10 * kSecond);  // it goes on, learns that it was declared dead, and joins anew
  EXPECT_TRUE(cluster.up("expert-1"));
  expect_all_free(cluster);
}

TEST(ClusterSim, AKilledWorkersStreamsGoOnElsewhereOrWhenItIsBack) {
  for (const uint32_t workers : {1u, 2u}) {
    ClusterConfig config;
    config.workers = workers;
    config.seed = 20 + workers;
    ClusterSim cluster(config);
    ASSERT_TRUE(cluster.run_ready()) << cluster.violation();
    const auto streams = submit_sixteen(cluster);
    run_until_streaming(cluster);
    cluster.kill("attention-0");
    ASSERT_TRUE(cluster.run_streams(60 * kSecond)) << cluster.violation();
    expect_undisturbed(streams);
    EXPECT_GT(cluster.scheduler().metrics().sequences_replayed, 0u);
    expect_all_free(cluster);
  }
}

TEST(ClusterSim, CancelledStreamsEndAndFreeTheirPages) {
  ClusterSim cluster(ClusterConfig{});
  ASSERT_TRUE(cluster.run_ready()) << cluster.violation();
  auto streams = submit_sixteen(cluster);
  run_until_streaming(cluster);
  std::vector<Stream*> kept;
  for (Stream* stream : streams) {
    if (stream->request.id.lo % 2 == 0) {
      cluster.cancel(*stream);
    } else {
      kept.push_back(stream);
    }
  }
  ASSERT_TRUE(cluster.run_streams(60 * kSecond)) << cluster.violation();
  expect_undisturbed(kept);
  expect_all_free(cluster);
}

TEST(ClusterSim, ACancelledChoiceEndsAloneAndItsPagesComeBack) {
  ClusterSim cluster(ClusterConfig{});
  ASSERT_TRUE(cluster.run_ready()) << cluster.violation();
  const auto streams = submit_sixteen(cluster);
  run_until_streaming(cluster);
  std::vector<Stream*> whole;
  size_t cancelled = 0;
  for (Stream* stream : streams) {
    const bool cancel = stream->choices.size() > 1 && stream->choices[1].finish == FinishReason::kNone;
    if (cancel) cluster.cancel_choice(*stream, 1);
    cancelled += cancel;
    if (!cancel) whole.push_back(stream);
  }
  EXPECT_GT(cancelled, 1u);
  ASSERT_TRUE(cluster.run_streams(60 * kSecond)) << cluster.violation();
  expect_undisturbed(whole);
  for (const Stream* stream : streams) {
    if (stream->choices.size() == 1 || !stream->choices[1].cancelled) continue;
    const Stream& want = expected(stream->request.id.lo);
    EXPECT_EQ(stream->choices[0].tokens, want.choices[0].tokens);
    EXPECT_EQ(stream->choices[0].finish, want.choices[0].finish);
    const auto& part = stream->choices[1].tokens;
    ASSERT_LE(part.size(), want.choices[1].tokens.size());
    EXPECT_TRUE(std::equal(part.begin(), part.end(), want.choices[1].tokens.begin()));
  }
  expect_all_free(cluster);
}

TEST(ClusterSim, AKilledSchedulersSuccessorGoesOnWithEveryStream) {
  for (const uint64_t seed : {41, 42, 43}) {
    ClusterConfig config;
    config.seed = seed;
    config.workers = 2;
    ClusterSim cluster(config);
    ASSERT_TRUE(cluster.run_ready()) << cluster.violation();
    const auto streams = submit_sixteen(cluster);
    run_until_streaming(cluster);
    const size_t open = cluster.open_streams();
    cluster.kill_scheduler();
    ASSERT_TRUE(cluster.run_streams(60 * kSecond)) << cluster.violation();
    expect_undisturbed(streams);
    EXPECT_EQ(cluster.resubmitted(), open);
    EXPECT_EQ(cluster.scheduler().metrics().members_refused, 0u);  // their incarnations are new to this one
    expect_all_free(cluster);
  }
}

}  // namespace
}  // namespace conclave::scheduler
