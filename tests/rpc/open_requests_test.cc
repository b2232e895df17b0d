#include "libs/rpc/open_requests.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

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
  EXPECT_THAT(resume.submit[0].delivered.at(0).tokens, ElementsAre(10, 11));
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
    size_t at = requests.connected(now).submit.at(0).delivered.at(0).tokens.size();
    while (seen->ends == 0) {
      now += kMillisecond;
      if (r.chance(0.1)) {
        requests.disconnected(now);
        at = requests.connected(now).submit.at(0).delivered.at(0).tokens.size();
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

// --- several choices

struct ChoiceObserver : RequestObserver {
  void on_accepted() override {}
  void on_refused(const Status& cause) override { refused = cause; }
  void on_tokens(const TokenEvent& event) override {
    std::vector<TokenId>& have = tokens[event.choice];
    EXPECT_FALSE(ends.contains(event.choice));
    EXPECT_EQ(event.index, have.size());
    have.insert(have.end(), event.tokens.begin(), event.tokens.end());
    if (event.finish != FinishReason::kNone) ends[event.choice] = event.finish;
    if (event.prompt_logprobs.empty()) return;
    EXPECT_EQ(event.prompt_start, prompt.size() + 1);
    for (const PromptLogprob& entry : event.prompt_logprobs) prompt.push_back(entry.logprob);
  }
  std::map<uint32_t, std::vector<TokenId>> tokens;
  std::map<uint32_t, FinishReason> ends;
  std::vector<float> prompt;
  Status refused;
};

class ManyChoicesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    AcceptedRequest r = request();
    r.choices = 3;
    open.add(r, observer, 0);
    ASSERT_NE(open.to_submit(kId, 0), nullptr);
    open.on_reply(kId, OkStatus(), 0);
  }
  Status event(uint32_t choice, uint32_t index, std::vector<TokenId> ids,
               FinishReason finish = FinishReason::kNone) {
    TokenEvent e = tokens(index, std::move(ids), finish);
    e.choice = choice;
    return open.on_tokens(e);
  }
  Status prompt(uint32_t start, const std::vector<float>& values) {
    TokenEvent e = tokens(0, {});
    e.prompt_start = start;
    for (const float value : values) e.prompt_logprobs.push_back({value, {}});
    return open.on_tokens(e);
  }
  OpenRequests open{kSecond};
  std::shared_ptr<ChoiceObserver> observer = std::make_shared<ChoiceObserver>();
};

TEST_F(ManyChoicesTest, EachIsKeptInOrderAndTheRequestEndsWithTheLast) {
  EXPECT_TRUE(event(1, 0, {5, 6}).ok());
  EXPECT_TRUE(event(0, 0, {7}).ok());
  EXPECT_TRUE(event(1, 1, {6, 8}).ok());  // a repeat of one
  EXPECT_TRUE(event(1, 3, {}, FinishReason::kStop).ok());
  EXPECT_TRUE(event(1, 3, {}, FinishReason::kStop).ok());  // a repeat
  EXPECT_EQ(event(2, 1, {9}).code(), StatusCode::kDataLoss);
  EXPECT_EQ(event(3, 0, {9}).code(), StatusCode::kDataLoss);
  EXPECT_EQ(open.size(), 1u);
  EXPECT_TRUE(event(2, 0, {4}, FinishReason::kLength).ok());
  EXPECT_TRUE(event(0, 1, {}, FinishReason::kLength).ok());
  EXPECT_EQ(open.size(), 0u);
  EXPECT_THAT(observer->tokens[0], ElementsAre(7));
  EXPECT_THAT(observer->tokens[1], ElementsAre(5, 6, 8));
  EXPECT_THAT(observer->tokens[2], ElementsAre(4));
  EXPECT_EQ(observer->ends[1], FinishReason::kStop);
}

TEST_F(ManyChoicesTest, AResubmissionSaysWhatEachHas) {
  EXPECT_TRUE(event(1, 0, {5, 6}).ok());
  EXPECT_TRUE(event(2, 0, {4}, FinishReason::kLength).ok());
  EXPECT_TRUE(prompt(1, {-1, -2}).ok());
  open.disconnected(1);
  const auto resume = open.connected(2);
  ASSERT_EQ(resume.submit.size(), 1u);
  const AcceptedRequest& again = resume.submit[0];
  ASSERT_EQ(again.delivered.size(), 3u);
  EXPECT_THAT(again.delivered[0].tokens, IsEmpty());
  EXPECT_THAT(again.delivered[1].tokens, ElementsAre(5, 6));
  EXPECT_FALSE(again.delivered[1].ended);
  EXPECT_TRUE(again.delivered[2].ended);
  EXPECT_EQ(again.prompt_logprobs_delivered, 2u);
}

TEST_F(ManyChoicesTest, PromptLogprobsAreKeptInOrder) {
  EXPECT_TRUE(prompt(1, {-1, -2}).ok());
  EXPECT_TRUE(prompt(2, {-2, -3}).ok());
  EXPECT_TRUE(prompt(1, {-1}).ok());
  EXPECT_EQ(prompt(5, {-5}).code(), StatusCode::kDataLoss);
  EXPECT_THAT(observer->prompt, ElementsAre(-1, -2, -3));
}

TEST_F(ManyChoicesTest, OneIsCancelledAlone) {
  EXPECT_TRUE(open.cancel_choice(kId, 1, true));
  EXPECT_FALSE(open.cancel_choice(kId, 1, true));  // told
  EXPECT_FALSE(open.cancel_choice(kId, 7, true));
  EXPECT_TRUE(observer->ends.empty());
  EXPECT_TRUE(event(1, 0, {}, FinishReason::kCancelled).ok());
  EXPECT_FALSE(open.cancel_choice(kId, 1, true));
  EXPECT_EQ(open.size(), 1u);
  EXPECT_TRUE(open.cancel(kId, true));
  EXPECT_FALSE(open.cancel_choice(kId, 2, true));  // the whole request is
}

TEST_F(ManyChoicesTest, OneCancelledWithoutAConnectionEndsHere) {
  EXPECT_TRUE(open.cancel_choice(kId, 0, true));  // told, and the connection breaks before the end comes
  open.disconnected(1);
  EXPECT_EQ(observer->ends[0], FinishReason::kCancelled);
  EXPECT_FALSE(open.cancel_choice(kId, 1, false));
  EXPECT_EQ(observer->ends[1], FinishReason::kCancelled);
  const auto resume = open.connected(2);
  EXPECT_THAT(resume.cancel, IsEmpty());
  EXPECT_TRUE(resume.submit.at(0).delivered.at(0).ended);
  EXPECT_TRUE(resume.submit.at(0).delivered.at(1).ended);
  open.disconnected(3);
  EXPECT_FALSE(open.cancel_choice(kId, 2, false));  // the last one: the request is over
  EXPECT_EQ(observer->ends[2], FinishReason::kCancelled);
  EXPECT_EQ(open.size(), 0u);
  EXPECT_THAT(open.connected(4).cancel, ElementsAre(kId));
}

TEST_F(ManyChoicesTest, AnEndFromHereEndsAllThatHaveNotEnded) {
  EXPECT_TRUE(event(1, 0, {5, 6}, FinishReason::kStop).ok());
  open.expire(1000 * kSecond, unavailable("gone"));
  EXPECT_EQ(observer->ends[0], FinishReason::kDeadline);
  EXPECT_EQ(observer->ends[1], FinishReason::kStop);
  EXPECT_EQ(observer->ends[2], FinishReason::kDeadline);
  EXPECT_EQ(open.size(), 0u);
}

TEST(OpenRequests, AdoptedOnesBeginWithTheirFirstToken) {
  OpenRequests open(10 * kSecond);
  auto seen = std::make_shared<Observer>();
  AdoptedRequest adopted;
  adopted.request = request();
  adopted.request.router_context = "c";
  adopted.request.delivered = {{{9, 9}, false}};  // of no meaning here
  open.adopt(adopted, seen, 0);
  EXPECT_EQ(open.size(), 1u);
  ASSERT_TRUE(open.on_tokens(tokens(0, {5, 6, 7})).ok());
  EXPECT_THAT(seen->tokens, ElementsAre(5, 6, 7));
  EXPECT_EQ(seen->accepted, 0);
  // A scheduler that restarts gets it as one that was accepted, context and all.
  open.disconnected(kSecond);
  const OpenRequests::Resume again = open.connected(2 * kSecond);
  ASSERT_EQ(again.submit.size(), 1u);
  EXPECT_TRUE(again.submit[0].resubmitted);
  EXPECT_EQ(again.submit[0].router_context, "c");
  EXPECT_THAT(again.submit[0].delivered[0].tokens, ElementsAre(5, 6, 7));
  ASSERT_TRUE(open.on_tokens(tokens(3, {8}, FinishReason::kLength)).ok());
  EXPECT_EQ(seen->ends, 1);
  EXPECT_EQ(open.size(), 0u);
  EXPECT_EQ(open.next_expiry(), kNever);
}

TEST(OpenRequests, OnlyWhoHasARequestReleasesIt) {
  OpenRequests open(10 * kSecond);
  auto seen = std::make_shared<Observer>();
  const Observer stranger;
  open.add(request(), seen, 0);
  open.to_submit(kId, 0);
  open.on_reply(kId, OkStatus(), 0, true);
  EXPECT_FALSE(open.release(kId, &stranger, true));
  EXPECT_EQ(open.size(), 1u);
  EXPECT_TRUE(open.release(kId, seen.get(), true));
  EXPECT_EQ(open.size(), 0u);
  EXPECT_EQ(seen->ends, 0);
  EXPECT_FALSE(open.release(kId, seen.get(), true));  // not a second time
  ASSERT_TRUE(open.on_tokens(tokens(0, {1})).ok());   // what was on its way is nobody's
  // Without a connection nobody is to be told: the scheduler lets go of what the lost one had.
  open.add(request(), seen, 0);
  open.to_submit(kId, 0);
  open.on_reply(kId, OkStatus(), 0, true);
  open.disconnected(kSecond);
  EXPECT_FALSE(open.release(kId, seen.get(), false));
  EXPECT_EQ(open.size(), 0u);
  EXPECT_THAT(open.connected(2 * kSecond).cancel, IsEmpty());
  EXPECT_EQ(open.next_expiry(), kNever);
}

}  // namespace
}  // namespace conclave::rpc
