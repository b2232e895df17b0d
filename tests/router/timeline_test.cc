// The router's part of a timeline.
#include "router_service/gateway/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "libs/base/id_text.h"
#include "tests/router/gateway_fixture.h"

namespace conclave::gateway {
namespace {

using Kind = RouterMarkKind;
using ::testing::ElementsAre;

std::vector<Kind> kinds(const RouterTimelineView& view) {
  std::vector<Kind> out;
  for (const RouterMark& mark : view.marks) out.push_back(mark.kind);
  return out;
}

GenerateRequest followed(std::string text, const std::string& name = "mine") {
  GenerateRequest request = text_request(std::move(text));
  request.origin.request_id = name;
  request.origin.route = "/v1/completions";
  request.origin.tenant = "alice";
  request.origin.trace = {1, 2, 3, true};
  return request;
}

TEST_F(GatewayTest, ATimelineHasEveryPhaseAndTokenOfAFollowedRequest) {
  Client client(gateway);
  const AcceptedRequest accepted = begin(client, followed("hello"));
  EXPECT_TRUE(accepted.trace.followed) << "the scheduler is told";
  EXPECT_EQ(accepted.trace.trace_hi, 1u);
  EXPECT_EQ(accepted.trace.span, 3u);
  scheduler.emit(accepted.id, 0, {'a'});
  ASSERT_TRUE(client.take_until([&] { return client.text.size() == 1; }));
  scheduler.emit(accepted.id, 1, {'b', 'c'});
  scheduler.emit(accepted.id, 3, {'d'}, FinishReason::kLength);
  ASSERT_TRUE(client.finish());

  for (const std::string& name :
       {std::string("mine"), id_text(accepted.id), "cmpl-" + id_text(accepted.id), id_text({1, 2})}) {
    ASSERT_NE(gateway.timelines().find(name), nullptr) << name;
  }
  EXPECT_EQ(gateway.timelines().find("another"), nullptr);
  const RouterTimelineView view = gateway.timelines().find("mine")->view();
  EXPECT_THAT(kinds(view), ElementsAre(Kind::kReceived, Kind::kText, Kind::kTokenized, Kind::kSubmitted,
                                       Kind::kAccepted, Kind::kEnded));
  for (size_t i = 1; i < view.marks.size(); ++i) EXPECT_GE(view.marks[i].at, view.marks[i - 1].at);
  EXPECT_EQ(view.marks[2].detail, "5 tokens");
  EXPECT_EQ(view.marks.back().detail, "length");
  EXPECT_TRUE(view.ended);
  EXPECT_EQ(view.tenant, "alice");
  EXPECT_EQ(view.usage.prompt_tokens, 5u);
  EXPECT_EQ(view.usage.completion_tokens, 4u);
  ASSERT_EQ(view.tokens.size(), 3u);
  EXPECT_EQ(view.tokens[1].index, 1u);
  EXPECT_EQ(view.tokens[1].count, 2u);
  for (const TokenArrival& arrival : view.tokens) EXPECT_GE(arrival.taken, arrival.at);
  EXPECT_GE(view.age, view.marks.back().at);
  EXPECT_EQ(gateway.timelines().list(10).size(), 1u);
}

TEST_F(GatewayTest, OthersHaveNoTimelineAndAFailureIsAnEnd) {
  Client plain(gateway), broken(gateway);
  const AcceptedRequest accepted = begin(plain, text_request("hello"));
  EXPECT_FALSE(accepted.trace.followed);
  scheduler.emit(accepted.id, 0, {'a'}, FinishReason::kStop);
  ASSERT_TRUE(plain.finish());
  EXPECT_EQ(gateway.timelines().counts().opened, 0u);

  const AcceptedRequest second = begin(broken, followed("hi"), 1);
  scheduler.emit(second.id, 0, {}, FinishReason::kError, "a worker is sad");
  ASSERT_TRUE(broken.finish());
  EXPECT_EQ(gateway.timelines().find("mine")->view().marks.back().detail, "INTERNAL");
  EXPECT_TRUE(gateway.timelines().find("mine")->view().tokens.empty());
}

TEST_F(GatewayTest, AnOpenOneCanBeLookedAt) {
  Client client(gateway);
  const AcceptedRequest accepted = begin(client, followed("hello"));
  scheduler.emit(accepted.id, 0, {'a'});
  const RouterTimelineView view = gateway.timelines().find("mine")->view();
  EXPECT_FALSE(view.ended);
  ASSERT_EQ(view.tokens.size(), 1u);
  EXPECT_LT(view.tokens[0].taken, 0) << "the client has not read it";
  client.generation->cancel();
  EXPECT_EQ(gateway.timelines().find("mine")->view().marks.back().detail, "CANCELLED");
}

TEST_F(GatewayTest, GapsBetweenTokensAreTold) {
  std::vector<Nanos> gaps;
  std::mutex gaps_mutex;
  GatewayOptions options;
  options.stream.on_token_gap = [&](Nanos gap) {
    std::lock_guard lock(gaps_mutex);
    gaps.push_back(gap);
  };
  Gateway told(options, testing::fake_model(), scheduler, text);
  Client client(told);
  GenerateRequest request = text_request("hello");
  request.n = 2;
  ASSERT_TRUE(client.start(std::move(request)).ok());
  const AcceptedRequest accepted = scheduler.wait_submitted();
  scheduler.accept(accepted.id);
  for (const uint32_t choice : {0u, 1u})
    scheduler.emit(accepted.id, 0, {'a'}, FinishReason::kNone, "", choice);
  EXPECT_TRUE(gaps.empty()) << "the first of each has none before it";
  const TimePoint before = steady_now();
  scheduler.emit(accepted.id, 1, {'b'});
  scheduler.emit(accepted.id, 2, {'c'}, FinishReason::kLength);
  scheduler.emit(accepted.id, 1, {'b'}, FinishReason::kLength, "", 1);
  ASSERT_TRUE(client.finish());
  std::lock_guard lock(gaps_mutex);
  ASSERT_EQ(gaps.size(), 3u);
  for (const Nanos gap : gaps) EXPECT_GE(gap, 0);
  EXPECT_LE(gaps[1], steady_now() - before);
}

TEST(RouterTimelineTest, Bounds) {
  Origin origin;
  RouterTimeline timeline(RequestId{1, 1}, origin, false, 0);
  TokenEvent event;
  event.tokens = {1};
  for (uint32_t i = 0; i < 1000; ++i) {
    event.index = i;
    timeline.tokens(event, i);
  }
  RouterTimelineView view = timeline.view(5000);
  ASSERT_EQ(view.tokens.size(), kMaxTokenArrivals);
  EXPECT_EQ(view.tokens.front().index, 0u);
  EXPECT_EQ(view.tokens[kMaxTokenArrivals / 2 - 1].index, kMaxTokenArrivals / 2 - 1);
  EXPECT_EQ(view.tokens[kMaxTokenArrivals / 2].index, 1000 - kMaxTokenArrivals / 2);
  EXPECT_EQ(view.tokens.back().index, 999u);
  EXPECT_EQ(view.dropped_tokens, 1000 - kMaxTokenArrivals);
  EXPECT_EQ(view.first_tokens, kMaxTokenArrivals / 2);
  timeline.taken(1500);
  for (const TokenArrival& arrival : timeline.view().tokens) EXPECT_EQ(arrival.taken, 1500);
  event.index = 1000;
  timeline.tokens(event, 1600);
  timeline.taken(1700);
  view = timeline.view();
  EXPECT_EQ(view.tokens.back().taken, 1700);
  EXPECT_EQ(view.tokens[view.tokens.size() - 2].taken, 1500) << "only what was new";
  for (int i = 0; i < 100; ++i) timeline.mark(Kind::kText, std::string(5000, 'x'), 1);
  timeline.end("stop", {}, 2000);
  timeline.end("again", {}, 3000);
  timeline.mark(Kind::kText, "late", 2500);
  event.index = 1001;
  timeline.tokens(event, 2600);
  view = timeline.view();
  EXPECT_EQ(view.marks.size(), kMaxRouterMarks);
  EXPECT_LE(view.marks[1].detail.size(), 200u);
  EXPECT_EQ(view.marks.back().detail, "stop");
  EXPECT_EQ(view.tokens.back().index, 1000u);
}

TEST(RouterTimelineTest, TheBookKeepsTheOpenOnesAndTheLast) {
  TimelineBook book(2);
  Origin origin;
  const auto open = [&](uint64_t id) {
    origin.request_id = "r" + std::to_string(id);
    return book.open(RequestId{0, id}, origin, false, 0);
  };
  const auto a = open(1), b = open(2);
  EXPECT_EQ(open(3), nullptr);
  a->end("stop", {});
  ASSERT_NE(open(3), nullptr);
  EXPECT_EQ(book.find("r1"), nullptr);
  EXPECT_NE(book.find("r2"), nullptr);
  EXPECT_EQ(book.list(10).front().request_id, "r3") << "the newest first";
  EXPECT_EQ(book.list(1).size(), 1u);
  EXPECT_EQ(book.counts().opened, 3u);
  EXPECT_EQ(book.counts().refused, 1u);
  EXPECT_EQ(book.counts().kept, 2u);
  // Clients choose their words freely, another's id among them: an id is who it is, and a word is all who have it.
  TimelineBook shared(10);
  origin.request_id = "word";
  for (const uint64_t id : {21, 22, 23}) shared.open(RequestId{0, id}, origin, false, 0);
  shared.open(RequestId{0, 23}, origin, true, 0);  // resumed
  origin.request_id = id_text(RequestId{0, 21});
  shared.open(RequestId{0, 24}, origin, false, 0);
  EXPECT_EQ(shared.find("word")->id(), (RequestId{0, 23}));
  EXPECT_EQ(shared.namesakes("word", RequestId{0, 23}, 10), (std::vector{RequestId{0, 22}, RequestId{0, 21}}));
  EXPECT_EQ(shared.namesakes("word", RequestId{0, 23}, 1).size(), 1u);
  EXPECT_EQ(shared.find(id_text(RequestId{0, 21}))->id(), (RequestId{0, 21}));
  EXPECT_EQ(shared.namesakes(id_text(RequestId{0, 21}), RequestId{0, 21}, 10), (std::vector{RequestId{0, 24}}));
  TimelineBook none(0);
  EXPECT_EQ(none.open(RequestId{0, 1}, origin, false, 0), nullptr);
}

TEST(RouterTimelineTest, LookingWhileItIsWrittenIsSafe) {
  TimelineBook book(8);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      for (const auto& view : book.list(100)) EXPECT_LE(view.tokens.size(), kMaxTokenArrivals);
      (void)book.find("x");
    }
  });
  Origin origin;
  origin.request_id = "x";
  for (uint64_t id = 1; id <= 200; ++id) {
    const auto one = book.open(RequestId{0, id}, origin, false, 0);
    TokenEvent event;
    event.tokens = {1};
    for (uint32_t i = 0; i < 50 && one; ++i) one->tokens(event, i), one->taken(i);
    if (one) one->end("stop", {});
  }
  stop = true;
  reader.join();
}

}  // namespace
}  // namespace conclave::gateway
