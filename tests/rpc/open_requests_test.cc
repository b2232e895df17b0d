#include "libs/rpc/open_requests.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "libs/base/random.h"

namespace conclave::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Observer : RequestObserver {
  void on_accepted() override { ++accepted; }
  void on_refused(const Status& cause) override {
    ++ends;
    refused = cause;
  }
  void on_tokens(const TokenEvent& event) override {
    EXPECT_EQ(ends, 0);
    EXPECT_EQ(event.index, tokens.size());
    tokens.insert(tokens.end(), event.tokens.begin(), event.tokens.end());
    if (event.finish != FinishReason::kNone) {
      ++ends;
      finish = event.finish;
      error = event.error;
    }
  }
  int accepted = 0;
  int ends = 0;
  Status refused;
  std::vector<TokenId> tokens;
  FinishReason finish = FinishReason::kNone;
  std::string error;
};

const RequestId kId{1, 2};

AcceptedRequest request(RequestId id = kId) {
  AcceptedRequest r;
  r.id = id;
  r.prompt = {1, 2, 3};
  r.sampling.max_tokens = 100;
  r.time_left = 100 * kSecond;
  return r;
}

TokenEvent tokens(uint32_t index, std::vector<TokenId> ids, FinishReason finish = FinishReason::kNone) {
  TokenEvent event;
  event.request = kId;
  event.index = index;
  event.tokens = std::move(ids);
  event.finish = finish;
  return event;
}

class OpenRequestsTest : public ::testing::Test {
 protected:
  // Open and accepted on a connection.
  void start() {
    open.add(request(), observer, 0);
    ASSERT_NE(open.to_submit(kId, 0), nullptr);
    open.on_reply(kId, OkStatus(), 0);
    ASSERT_EQ(observer->accepted, 1);
  }

  OpenRequests open{kSecond};
  std::shared_ptr<Observer> observer = std::make_shared<Observer>();
};

TEST_F(OpenRequestsTest, TokensComeOnceInOrder) {
  start();
  EXPECT_TRUE(open.on_tokens(tokens(0, {10, 11})).ok());
  EXPECT_TRUE(open.on_tokens(tokens(0, {10, 11})).ok());      // a repeat
  EXPECT_TRUE(open.on_tokens(tokens(1, {11, 12, 13})).ok());  // an overlap
  EXPECT_EQ(open.on_tokens(tokens(6, {99})).code(), StatusCode::kDataLoss);
  EXPECT_TRUE(open.on_tokens(tokens(4, {}, FinishReason::kStop)).ok());
  EXPECT_THAT(observer->tokens, ElementsAre(10, 11, 12, 13));
  EXPECT_EQ(observer->finish, FinishReason::kStop);
  EXPECT_EQ(open.metrics().duplicate_tokens, 3u);
  EXPECT_EQ(open.size(), 0u);
  EXPECT_TRUE(open.on_tokens(tokens(4, {14})).ok());  // after the end: nobody's
  EXPECT_EQ(observer->ends, 1);
}

TEST_F(OpenRequestsTest, LogprobsAreCutWithTheirTokens) {
  struct Keep : Observer {
    void on_tokens(const TokenEvent& event) override {
      Observer::on_tokens(event);
      last = event;
    }
    TokenEvent last;
  };
  auto keep = std::make_shared<Keep>();
  open.add(request(), keep, 0);
  open.to_submit(kId, 0);
  TokenEvent event = tokens(0, {10, 11});
  event.logprobs = {-1, -2};
  event.top_logprobs = {{{10, -1}}, {{11, -2}}};
  ASSERT_TRUE(open.on_tokens(event).ok());
  event.index = 1;
  event.tokens = {11, 12};
  event.logprobs = {-2, -3};
  event.top_logprobs = {{{11, -2}}, {{12, -3}}};
  ASSERT_TRUE(open.on_tokens(event).ok());
  EXPECT_THAT(keep->last.tokens, ElementsAre(12));
  EXPECT_THAT(keep->last.logprobs, ElementsAre(-3));
  ASSERT_EQ(keep->last.top_logprobs.size(), 1u);
  EXPECT_EQ(keep->last.top_logprobs[0][0].token, 12u);
  EXPECT_EQ(keep->accepted, 1);  // implied by the first tokens
}

TEST_F(OpenRequestsTest, ARestartedSchedulerGetsRequestAndDeliveredTokens) {
  start();
  ASSERT_TRUE(open.on_tokens(tokens(0, {10, 11})).ok());
  open.disconnected(10 * kSecond);
  open.expire(50 * kSecond, unavailable("gone"));  // an accepted request waits past submit_wait
  ASSERT_EQ(observer->ends, 0);
  const OpenRequests::Resume resume = open.connected(60 * kSecond);
  ASSERT_EQ(resume.submit.size(), 1u);
  EXPECT_THAT(resume.submit[0].delivered, ElementsAre(10, 11));
  EXPECT_TRUE(resume.submit[0].resubmitted);
  EXPECT_EQ(resume.submit[0].time_left, 40 * kSecond);
  open.on_reply(kId, OkStatus(), 0);
  EXPECT_EQ(observer->accepted, 1);  // told once
  EXPECT_EQ(open.metrics().resubmissions, 1u);
  ASSERT_TRUE(open.on_tokens(tokens(2, {12}, FinishReason::kLength)).ok());
  EXPECT_THAT(observer->tokens, ElementsAre(10, 11, 12));
}

TEST_F(OpenRequestsTest, ResumesInOrderOfArrival) {
  for (uint64_t i = 1; i <= 20; ++i) open.add(request({i, 77}), observer, 0);
  const OpenRequests::Resume resume = open.connected(0);
  ASSERT_EQ(resume.submit.size(), 20u);
  for (uint64_t i = 0; i < 20; ++i) EXPECT_EQ(resume.submit[i].id.hi, i + 1);
}

TEST_F(OpenRequestsTest, ANewRequestWaitsABoundedTimeForAScheduler) {
  open.add(request(), observer, 0);
  EXPECT_EQ(open.next_expiry(), kSecond);
  open.expire(kSecond - 1, unavailable("no scheduler"));
  EXPECT_EQ(observer->ends, 0);
  open.expire(kSecond, unavailable("no scheduler"));
  EXPECT_EQ(observer->refused.code(), StatusCode::kUnavailable);
  EXPECT_EQ(open.next_expiry(), kNever);
  EXPECT_THAT(open.connected(6 * kSecond).cancel, IsEmpty());  // nobody ever heard of it
}

TEST_F(OpenRequestsTest, LosingTheConnectionBeforeTheAcknowledgementWaitsAgain) {
  open.add(request(), observer, 0);
  open.to_submit(kId, 0);
  open.disconnected(10);
  open.expire(10 + kSecond, unavailable("no scheduler"));
  EXPECT_EQ(observer->refused.code(), StatusCode::kUnavailable);
  // It may have been accepted there: whoever comes back is told to forget it.
  EXPECT_THAT(open.connected(2 * kSecond).cancel, ElementsAre(kId));
}

TEST_F(OpenRequestsTest, AnAcceptedRequestEndsAtItsDeadlineWithoutAScheduler) {
  start();
  open.disconnected(kSecond);
  open.expire(100 * kSecond + OpenRequests::kDeadlineGrace, unavailable("x"));
  EXPECT_EQ(observer->finish, FinishReason::kDeadline);
  EXPECT_EQ(observer->ends, 1);
}

TEST_F(OpenRequestsTest, CancelWhileConnectedWaitsForTheScheduler) {
  start();
  EXPECT_TRUE(open.cancel(kId, true));
  EXPECT_FALSE(open.cancel(kId, true));  // told already
  EXPECT_EQ(observer->ends, 0);
  ASSERT_TRUE(open.on_tokens(tokens(0, {}, FinishReason::kCancelled)).ok());
  EXPECT_EQ(observer->finish, FinishReason::kCancelled);
}

TEST_F(OpenRequestsTest, CancelWithoutASchedulerEndsHereAndIsToldLater) {
  start();
  open.disconnected(1);
  EXPECT_FALSE(open.cancel(kId, false));
  EXPECT_EQ(observer->finish, FinishReason::kCancelled);
  const OpenRequests::Resume resume = open.connected(2);
  EXPECT_THAT(resume.cancel, ElementsAre(kId));
  EXPECT_THAT(resume.submit, IsEmpty());
}

TEST_F(OpenRequestsTest, ACancelTheSchedulerNeverAnsweredEndsWithTheConnection) {
  start();
  EXPECT_TRUE(open.cancel(kId, true));
  open.disconnected(1);
  EXPECT_EQ(observer->finish, FinishReason::kCancelled);
  EXPECT_THAT(open.connected(2).cancel, ElementsAre(kId));
}

TEST_F(OpenRequestsTest, RefusalsReachTheObserver) {
  open.add(request(), observer, 0);
  open.to_submit(kId, 0);
  open.on_reply(kId, resource_exhausted("full"), 0);
  EXPECT_EQ(observer->refused.code(), StatusCode::kResourceExhausted);
  auto second = std::make_shared<Observer>();
  start();  // the id is free again
  open.add(request(), second, 0);
  EXPECT_EQ(second->refused.code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(open.size(), 1u);
}

TEST_F(OpenRequestsTest, ASchedulerWithoutAFleetYetIsAskedAgain) {
  open.add(request(), observer, 0);
  open.to_submit(kId, 0);
  open.on_reply(kId, unavailable("no worker yet"), 10);
  EXPECT_EQ(observer->ends, 0);
  ASSERT_EQ(open.retry(20).size(), 1u);
  EXPECT_THAT(open.retry(20), IsEmpty());  // it is on its way
  open.on_reply(kId, OkStatus(), 30);
  EXPECT_EQ(observer->accepted, 1);

  auto second = std::make_shared<Observer>();
  open.add(request({5, 5}), second, 0);
  open.to_submit({5, 5}, 0);
  open.on_reply({5, 5}, unavailable("no worker yet"), 10);
  open.expire(kSecond, unavailable("no scheduler"));
  EXPECT_EQ(message_of(second->refused), "no worker yet");
}

TEST_F(OpenRequestsTest, ARefusedResubmissionEndsWithTheCause) {
  start();
  open.disconnected(1);
  open.connected(2);
  open.on_reply(kId, invalid_argument("too long"), 3);
  EXPECT_EQ(observer->finish, FinishReason::kError);
  EXPECT_THAT(observer->error, HasSubstr("too long"));
}

TEST_F(OpenRequestsTest, EndAllEndsEachOnce) {
  start();
  auto waiting = std::make_shared<Observer>();
  open.add(request({9, 9}), waiting, 0);
  open.end_all();
  EXPECT_EQ(observer->finish, FinishReason::kCancelled);
  EXPECT_EQ(waiting->refused.code(), StatusCode::kUnavailable);
  EXPECT_EQ(open.size(), 0u);
}

// A scheduler that loses connections, repeats and overlaps at random: every token once, one end.
TEST_F(OpenRequestsTest, RandomSchedulersDeliverEveryTokenOnce) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SplitMix64 r(seed);
    OpenRequests requests{kSecond};
    auto seen = std::make_shared<Observer>();
    std::vector<TokenId> answer(1 + r.below(40));
    for (size_t i = 0; i < answer.size(); ++i) answer[i] = static_cast<TokenId>(i * 7 + seed);
    requests.add(request(), seen, 0);
    TimePoint now = 0;
    size_t at = requests.connected(now).submit.at(0).delivered.size();
    while (seen->ends == 0) {
      now += kMillisecond;
      if (r.chance(0.1)) {
        requests.disconnected(now);
        at = requests.connected(now).submit.at(0).delivered.size();
        ASSERT_EQ(at, seen->tokens.size());
        if (r.chance(0.5)) requests.on_reply(kId, OkStatus(), now);
      }
      const size_t from = r.chance(0.3) ? r.below(at + 1) : at;
      const size_t to = std::min(answer.size(), at + r.below(4));
      TokenEvent event = tokens(static_cast<uint32_t>(from),
                                {answer.begin() + static_cast<std::ptrdiff_t>(from),
                                 answer.begin() + static_cast<std::ptrdiff_t>(std::max(from, to))},
                                to == answer.size() ? FinishReason::kLength : FinishReason::kNone);
      ASSERT_TRUE(requests.on_tokens(event).ok());
      at = std::max(at, to);
    }
    EXPECT_EQ(seen->tokens, answer);
    EXPECT_EQ(seen->accepted, 1);
    EXPECT_EQ(seen->ends, 1);
  }
}

}  // namespace
}  // namespace conclave::rpc
