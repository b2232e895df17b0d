// Over real processes: everything a request may ask of sampling, and how soon what was cancelled is free.
#include <gtest/gtest.h>

#include <cmath>

#include "conclave/v1/cluster.grpc.pb.h"
#include "tests/cluster/cluster.h"
#include "tests/support/same_completion.h"

namespace conclave {
namespace {

constexpr Nanos kLimit = 120 * kSecond;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

// The `i`-th of a family that asks for many things in many combinations.
AcceptedRequest rich_request(uint32_t i, uint32_t max_tokens) {
  AcceptedRequest r = numbered_request(i, max_tokens);
  SamplingParams& s = r.sampling;
  if (i % 3 == 0) r.choices = 3;
  if (i % 4 == 1) s.repetition_penalty = 1.3f;
  if (i % 4 == 2) s.presence_penalty = 0.7f;
  if (i % 4 == 3) s.frequency_penalty = 0.4f;
  if (i % 5 == 2) s.logit_bias = {{11, 3.0f}, {12, -INFINITY}};
  s.logprobs = i % 2 == 0;
  s.top_logprobs = i % 4;
  s.prompt_logprobs = i % 3 == 1;
  s.prompt_top_logprobs = i % 6 == 1 ? 4 : 0;
  return r;
}

std::vector<Completion> undisturbed_rich(uint32_t count, uint32_t tokens) {
  auto cluster = LocalCluster::load(ClusterEnvironment::model(), LocalClusterOptions());
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  if (!cluster.ok()) return {};
  EXPECT_TRUE((*cluster)->wait_ready().ok());
  std::vector<Completion> out;
  for (uint32_t i = 0; i < count; ++i) {
    auto answer = (*cluster)->complete(rich_request(i, tokens));
    EXPECT_TRUE(answer.ok()) << answer.status();
    out.push_back(answer.ok() ? *answer : Completion());
  }
  return out;
}

TEST(SamplingTest, EveryParameterGivesTheSameBytesOverProcessesThatDie) {
  constexpr uint32_t kRequests = 12, kTokens = 64;
  const std::vector<Completion> want = undisturbed_rich(kRequests, kTokens);
  ASSERT_EQ(want.size(), kRequests);
  EXPECT_NE(want[3].tokens, want[3].more.at(0).tokens);  // an odd one samples: its choices differ
  EXPECT_EQ(want[0].logprobs.size(), want[0].tokens.size());
  EXPECT_GT(want[1].prompt_logprobs.size() + want[4].prompt_logprobs.size(), 0u);

  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  std::vector<std::shared_ptr<PendingCompletion>> pending;
  for (uint32_t i = 0; i < kRequests; ++i) pending.push_back(cluster.submit(rich_request(i, kTokens)));
  for (auto& stream : pending) ASSERT_TRUE(stream->wait_for_tokens(6, kLimit));
  cluster.shards[0].kill();
  cluster.start_shard(0);
  for (auto& stream : pending) ASSERT_TRUE(stream->wait_for_tokens(12, kLimit));
  cluster.worker.kill();
  cluster.start_worker();
  for (auto& stream : pending) ASSERT_TRUE(stream->wait_for_tokens(18, kLimit));
  cluster.scheduler.kill();
  cluster.start_scheduler();
  for (uint32_t i = 0; i < kRequests; ++i) {
    SCOPED_TRACE("request " + std::to_string(i));
    const auto got = pending[i]->wait(kLimit);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->finish, FinishReason::kLength) << got->error;
    testing::expect_same(want[i], *got);
  }
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST(SamplingTest, StopTokensEndAnAnswerMinTokensAndIgnoreEosHold) {
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  const auto complete = [&](AcceptedRequest r) {
    const auto done = cluster.submit(std::move(r))->wait(kLimit);
    EXPECT_TRUE(done.ok()) << done.status();
    return done.ok() ? *done : Completion();
  };
  uint64_t id = 1;
  const auto request = [&] {
    AcceptedRequest r = numbered_request(1, 24);
    r.id = {77, id++};
    return r;
  };
  const Completion free_run = complete(request());
  ASSERT_EQ(free_run.tokens.size(), 24u);
  const TokenId stop = free_run.tokens[5];
  const auto first = static_cast<size_t>(std::find(free_run.tokens.begin(), free_run.tokens.end(), stop) -
                                         free_run.tokens.begin());

  AcceptedRequest r = request();
  r.sampling.stop_token_ids = {stop};
  const Completion stopped = complete(r);
  EXPECT_EQ(stopped.finish, FinishReason::kStop);
  EXPECT_EQ(stopped.tokens.size(), first + 1);
  EXPECT_EQ(stopped.tokens.back(), stop);

  // numbered requests ignore the checkpoint's end of sequence; their own ids still count, and min_tokens
  // forbids them for as long.
  r = request();
  r.sampling.stop_token_ids = {stop};
  r.sampling.min_tokens = 12;
  const Completion longer = complete(r);
  EXPECT_GE(longer.tokens.size(), 12u);
  for (size_t i = 0; i < 12; ++i) EXPECT_NE(longer.tokens[i], stop);
  EXPECT_TRUE(std::equal(longer.tokens.begin(), longer.tokens.begin() + static_cast<ptrdiff_t>(first),
                         free_run.tokens.begin()));
}

TEST(SamplingTest, PagesOfWhatWasCancelledAreFreeWithinAStep) {
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  auto stub = conclave::v1::Cluster::NewStub(
      grpc::CreateChannel(cluster.scheduler_address(), grpc::InsecureChannelCredentials()));
  const auto used = [&] {
    grpc::ClientContext context;
    conclave::v1::StatusReply reply;
    EXPECT_TRUE(stub->Status(&context, {}, &reply).ok());
    uint32_t blocks = 0;
    for (const auto& member : reply.members()) blocks += member.kv_blocks_used();
    return blocks;
  };
  for (const uint32_t choices : {1u, 3u}) {
    AcceptedRequest r = numbered_request(3, 400);
    r.id = {88, choices};
    r.choices = choices;
    const auto pending = cluster.submit(r);
    ASSERT_TRUE(pending->wait_for_tokens(10, kLimit));
    EXPECT_GE(used(), choices);
    const TimePoint begin = steady_now();
    cluster.gateway->cancel(r.id);
    ASSERT_TRUE(eventually([&] { return used() == 0; }));
    const Nanos took = steady_now() - begin;
    // A step of this model takes a few milliseconds; the rest is a busy machine's.
    EXPECT_LT(took, 1 * kSecond);
    RecordProperty("choices_" + std::to_string(choices) + "_freed_after_ms",
                   std::to_string(took / kMillisecond));
    const auto done = pending->wait(kLimit);
    ASSERT_TRUE(done.ok()) << done.status();
    EXPECT_EQ(done->finish, FinishReason::kCancelled);
    EXPECT_LT(done->tokens.size(), 400u);
  }
}

}  // namespace
}  // namespace conclave
