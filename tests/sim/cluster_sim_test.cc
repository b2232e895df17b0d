#include "tests/sim/cluster_sim.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <string>

namespace conclave::scheduler {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kSeeds = 3;
#else
constexpr uint64_t kSeeds = 30;
#endif

// Greedy and sampled ones, short and long, some with a stop token.
AcceptedRequest request(uint64_t n) {
  SplitMix64 random(n * 77 + 5);
  AcceptedRequest r;
  r.id = RequestId{2, n};
  const uint64_t prompt = 1 + random.below(40);
  if (n % 2 == 0)  // begins as others do
    for (TokenId i = 0; i < 32; ++i) r.prompt.push_back(i);
  for (uint64_t i = 0; i < prompt; ++i) r.prompt.push_back(static_cast<TokenId>(random.below(64)));
  r.sampling.temperature = n % 2 == 0 ? 0.0f : 1.0f;
  r.sampling.seed = random.next();
  r.sampling.max_tokens = static_cast<uint32_t>(8 + random.below(24));
  if (n % 3 == 0) r.sampling.stop_token_ids = {static_cast<TokenId>(random.below(64))};
  if (n % 4 == 1) r.choices = 2 + static_cast<uint32_t>(n % 3);
  if (n % 5 == 1) r.sampling.repetition_penalty = 1.2f;
  if (n % 5 == 2) r.sampling.frequency_penalty = 0.5f;
  if (n % 5 == 3) r.sampling.presence_penalty = -0.5f;
  if (n % 5 == 4) r.sampling.logit_bias = {{7, 1.5f}, {9, -INFINITY}};
  r.sampling.logprobs = n % 2 == 1;
  r.sampling.prompt_logprobs = n % 3 == 1;
  return r;
}

// Each computed once, whatever asks for it.
const Stream& expected(uint64_t n) {
  static std::map<uint64_t, Stream> known;
  const auto it = known.find(n);
  return it != known.end() ? it->second : known.emplace(n, undisturbed(request(n))).first->second;
}

void expect_undisturbed(const std::vector<Stream*>& streams) {
  for (const Stream* stream : streams) {
    const Stream& want = expected(stream->request.id.lo);
    SCOPED_TRACE("request " + std::to_string(stream->request.id.lo));
    EXPECT_EQ(stream->prompt_logprobs, want.prompt_logprobs);
    ASSERT_EQ(stream->choices.size(), want.choices.size());
    for (size_t c = 0; c < want.choices.size(); ++c) {
      EXPECT_EQ(stream->choices[c].tokens, want.choices[c].tokens) << "choice " << c;
      EXPECT_EQ(stream->choices[c].logprobs, want.choices[c].logprobs) << "choice " << c;
      EXPECT_EQ(stream->choices[c].finish, want.choices[c].finish) << "choice " << c;
    }
  }
}

std::vector<Stream*> submit_sixteen(ClusterSim& cluster) {
  std::vector<Stream*> streams;
  for (uint64_t n = 0; n < 16; ++n) streams.push_back(&cluster.submit(request(n)));
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
    EXPECT_EQ(expected(n).prompt_logprobs.size(), n % 3 == 1 ? request(n).prompt.size() - 1 : 0);
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
  EXPECT_EQ(cluster.scheduler().metrics().members_lost, 1u);
  cluster.run_for(20 * kSecond);  // it goes on, learns that it was declared dead, and joins anew
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

// Everything at once: kills, stops, a lossy network and a faulty data plane, by the seed.
struct Outcome {
  uint64_t trace = 0;
  uint64_t restarts = 0;
  uint64_t retried = 0;
  uint64_t injected = 0;
  uint64_t replayed = 0;
  uint64_t lost = 0;
  uint64_t resubmitted = 0;
};

Outcome run_chaos(uint64_t seed) {
  SplitMix64 random(seed);
  ClusterConfig config;
  config.seed = seed;
  config.workers = 1 + static_cast<uint32_t>(random.below(2));
  config.shards = 1 + static_cast<uint32_t>(random.below(3));
  config.kv_blocks = 8 + static_cast<uint32_t>(random.below(40));
  config.network_loss = random.chance(0.5) ? 0.02 : 0;
  config.scheduler.step_token_budget = 4 + static_cast<uint32_t>(random.below(60));
  config.scheduler.max_batch_sequences = 1 + static_cast<uint32_t>(random.below(4));
  config.scheduler.prefill_chunk_tokens = 1 + static_cast<uint32_t>(random.below(32));
  config.scheduler.steps_in_flight = 1 + static_cast<uint32_t>(random.below(3));
  if (random.chance(0.7)) {
    FaultPlan& plan = config.worker_faults;
    plan.drop_out = plan.drop_in = 0.01;
    plan.duplicate_out = plan.duplicate_in = 0.03;
    plan.delay_out = plan.delay_in = 0.05;
    plan.reorder_in = 0.05;
    plan.corrupt_in = 0.01;
    plan.peer_down = 0.002;
    plan.stall = 0.005;
  }
  ClusterSim cluster(config);
  EXPECT_TRUE(cluster.run_ready()) << cluster.violation();
  if (!cluster.scheduler().fleet().ready) return {};
  const std::vector<Stream*> streams = submit_sixteen(cluster);
  std::vector<std::string> names;
  for (uint32_t i = 0; i < config.workers; ++i) names.push_back("attention-" + std::to_string(i));
  for (uint32_t i = 0; i < config.shards; ++i) names.push_back("expert-" + std::to_string(i));
  for (int i = 0; i < 4 && cluster.open_streams() > 0; ++i) {
    cluster.run_for(static_cast<Nanos>(random.below(150) + 5) * kMillisecond);
    const std::string& name = names[random.below(names.size())];
    if (random.chance(0.15)) {
      cluster.kill_scheduler();
    } else if (random.chance(0.6)) {
      cluster.kill(name, random.chance(0.2));
    } else {
      cluster.pause(name, static_cast<Nanos>(random.below(8000) + 20) * kMillisecond);
    }
  }
  EXPECT_TRUE(cluster.run_streams(120 * kSecond))
      << cluster.violation() << " seed " << seed << ", " << cluster.open_streams() << " streams are open";
  expect_undisturbed(streams);
  return {cluster.world().trace_hash(), cluster.restarts(), cluster.retried_items(),
          cluster.injected_faults(),    cluster.replayed(), cluster.members_lost(),
          cluster.resubmitted()};
}

// A failing seed runs alone with CONCLAVE_SIM_SEED=<seed>.
TEST(ClusterSim, UnderAllFaultsTogetherEveryAnswerIsTheUndisturbedOne) {
  const char* only = std::getenv("CONCLAVE_SIM_SEED");
  const uint64_t first = only != nullptr ? std::strtoull(only, nullptr, 10) : 1;
  const uint64_t last = only != nullptr ? first : kSeeds;
  Outcome sum;
  for (uint64_t seed = first; seed <= last; ++seed) {
    const Outcome one = run_chaos(seed);
    ASSERT_FALSE(HasFailure()) << "run again with CONCLAVE_SIM_SEED=" << seed;
    sum.restarts += one.restarts;
    sum.retried += one.retried;
    sum.injected += one.injected;
    sum.replayed += one.replayed;
    sum.lost += one.lost;
    sum.resubmitted += one.resubmitted;
  }
  std::printf(
      "restarts=%llu retried items=%llu injected faults=%llu replays=%llu members lost=%llu "
      "resubmitted=%llu\n",
      static_cast<unsigned long long>(sum.restarts), static_cast<unsigned long long>(sum.retried),
      static_cast<unsigned long long>(sum.injected), static_cast<unsigned long long>(sum.replayed),
      static_cast<unsigned long long>(sum.lost), static_cast<unsigned long long>(sum.resubmitted));
  if (only != nullptr) return;
  EXPECT_GT(sum.restarts, 0u);
  EXPECT_GT(sum.retried, 0u);
  EXPECT_GT(sum.injected, 0u);
  EXPECT_GT(sum.replayed, 0u);
  EXPECT_GT(sum.lost, 0u);
  EXPECT_GT(sum.resubmitted, 0u);
}

TEST(ClusterSim, ASeedIsOneRun) {
  const uint64_t once = run_chaos(3).trace;
  EXPECT_EQ(run_chaos(3).trace, once);
  EXPECT_NE(run_chaos(4).trace, once);
}

}  // namespace
}  // namespace conclave::scheduler
