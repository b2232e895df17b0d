// The token that goes through the fleet before the router calls itself ready.
#include "router_service/warm_up.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/router/fake_scheduler.h"
#include "tests/router/fake_text.h"

namespace conclave::router {
namespace {

using ::testing::HasSubstr;

struct WarmUpTest : ::testing::Test {
  testing::FakeScheduler scheduler;
  WarmUp warm{scheduler, testing::fake_model(), testing::kFakeVocab};
  TimePoint now = steady_now();
};

TEST_F(WarmUpTest, NothingIsSentBeforeTheFleetIsWhole) {
  scheduler.set_fleet({false, "no expert shard is there", 0, "", ""});
  warm.poll(now);
  EXPECT_EQ(scheduler.submitted(), 0u);
  EXPECT_NE(warm.not_warm(), "");
}

TEST_F(WarmUpTest, OneTokenOfOneSmallPromptMakesItWarm) {
  warm.poll(now);
  warm.poll(now);
  ASSERT_EQ(scheduler.submitted(), 1u);
  const AcceptedRequest request = scheduler.wait_submitted();
  EXPECT_EQ(request.prompt.size(), 64u);
  EXPECT_EQ(request.sampling.max_tokens, 1u);
  EXPECT_GE(request.sampling.vocab_limit, 1u);
  std::set<TokenId> different(request.prompt.begin(), request.prompt.end());
  EXPECT_EQ(different.size(), 64u);
  for (const TokenId token : request.prompt) EXPECT_LT(token, testing::kFakeVocab);
  EXPECT_THAT(warm.not_warm(), HasSubstr("warm-up"));
  scheduler.accept(request.id);
  EXPECT_NE(warm.not_warm(), "") << "accepted is not generated";
  scheduler.emit(request.id, 0, {'a'}, FinishReason::kLength);
  EXPECT_EQ(warm.not_warm(), "");
  EXPECT_GT(warm.last_duration(), 0);
  warm.poll(now + 3600 * kSecond);
  EXPECT_EQ(scheduler.submitted(), 1u);
}

TEST_F(WarmUpTest, ThePromptGoesThroughEachExpertTwice) {
  warm.poll(now);
  EXPECT_TRUE(scheduler.wait_submitted().sampling.every_expert);
  ModelSpec model = testing::fake_model();
  model.num_experts = 300;
  model.experts_per_token = 4;
  WarmUp many(scheduler, model, testing::kFakeVocab);
  many.poll(now);
  EXPECT_EQ(scheduler.wait_submitted(1).prompt.size(), 150u);
}

FleetInfo fleet_with(uint64_t shard_set) {
  FleetInfo fleet{true, "", 0, "", ""};
  fleet.shard_set = shard_set;
  return fleet;
}

TEST_F(WarmUpTest, AShardThatJoinsDuringTheFirstAttemptMustBeInOne) {
  scheduler.set_fleet(fleet_with(1));
  warm.poll(now);
  scheduler.set_fleet(fleet_with(2));
  warm.poll(now);
  scheduler.emit(scheduler.wait_submitted(0).id, 0, {'a'}, FinishReason::kLength);
  EXPECT_NE(warm.not_warm(), "") << "the second shard has answered nothing yet";
  warm.poll(now + 1);
  ASSERT_EQ(scheduler.submitted(), 1u) << "not before the clock says so";
  warm.poll(steady_now());
  ASSERT_EQ(scheduler.submitted(), 2u);
  EXPECT_NE(warm.not_warm(), "");
  scheduler.emit(scheduler.wait_submitted(1).id, 0, {'a'}, FinishReason::kLength);
  EXPECT_EQ(warm.not_warm(), "");
}

TEST_F(WarmUpTest, AShardThatJoinsAWarmFleetIsWarmedToo) {
  scheduler.set_fleet(fleet_with(1));
  warm.poll(now);
  scheduler.emit(scheduler.wait_submitted(0).id, 0, {'a'}, FinishReason::kLength);
  EXPECT_EQ(warm.not_warm(), "");
  scheduler.set_fleet(fleet_with(2));
  warm.poll(steady_now());
  ASSERT_EQ(scheduler.submitted(), 2u);
  EXPECT_EQ(warm.not_warm(), "") << "it served without that shard before";
  scheduler.emit(scheduler.wait_submitted(1).id, 0, {}, FinishReason::kError, "the shard died");
  EXPECT_EQ(warm.not_warm(), "");
  warm.poll(steady_now() + 2 * kSecond);
  ASSERT_EQ(scheduler.submitted(), 3u) << "tried again";
  scheduler.emit(scheduler.wait_submitted(2).id, 0, {'a'}, FinishReason::kLength);
  warm.poll(steady_now() + 3600 * kSecond);
  EXPECT_EQ(scheduler.submitted(), 3u);
}

TEST_F(WarmUpTest, AFailureIsShownAndTriedAgain) {
  warm.poll(now);
  scheduler.refuse(scheduler.wait_submitted(0).id, unavailable("the queue is full"));
  EXPECT_THAT(warm.not_warm(), HasSubstr("the queue is full"));
  warm.poll(now);
  EXPECT_EQ(scheduler.submitted(), 1u) << "not at once";
  warm.poll(steady_now() + 2 * kSecond);
  ASSERT_EQ(scheduler.submitted(), 2u);
  const RequestId second = scheduler.wait_submitted(1).id;
  scheduler.emit(second, 0, {}, FinishReason::kError, "the worker lost it");
  EXPECT_THAT(warm.not_warm(), HasSubstr("the worker lost it"));
  EXPECT_EQ(warm.attempts(), 2u);
}

TEST_F(WarmUpTest, AFleetThatWasNotWholeIsColdAgain) {
  warm.poll(now);
  scheduler.emit(scheduler.wait_submitted(0).id, 0, {'a'}, FinishReason::kLength);
  EXPECT_EQ(warm.not_warm(), "");
  scheduler.set_fleet({false, "a shard died", 0, "", ""});
  warm.poll(now);
  EXPECT_NE(warm.not_warm(), "");
  scheduler.set_fleet({true, "", 0, "", ""});
  warm.poll(steady_now() + 2 * kSecond);
  EXPECT_EQ(scheduler.submitted(), 2u);
}

TEST(WarmUpEndTest, AnAttemptInProgressIsCancelledAtTheEnd) {
  testing::FakeScheduler scheduler;
  RequestId id;
  {
    WarmUp warm(scheduler, testing::fake_model(16), testing::kFakeVocab);
    warm.poll(steady_now());
    const AcceptedRequest request = scheduler.wait_submitted();
    EXPECT_EQ(request.prompt.size(), 15u) << "what the context holds";
    id = request.id;
  }
  EXPECT_EQ(scheduler.cancelled(), 1u);
  scheduler.emit(id, 0, {'a'}, FinishReason::kLength);  // too late, and harmless
}

}  // namespace
}  // namespace conclave::router
