// Streams that break and go on elsewhere: what a client has, and what it gets behind its last event, are
// together the stream that one router would have sent, byte for byte.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "router_service/gateway/router_context.h"
#include "router_service/http/openai_resume.h"
#include "tests/router/key_dir.h"
#include "tests/router/openai_fixture.h"
#include "tests/router/replay_scheduler.h"

namespace conclave::router {
namespace {

using testing::byte_tokens;
using ::testing::HasSubstr;
using testing::http_call;
using testing::RawClient;
using testing::ReplayScheduler;

constexpr char kResumable[] = "x-conclave-resumable: 1\r\n";

// A router over a scheduler that others have too.
struct Router {
  explicit Router(ReplayScheduler& scheduler, gateway::GatewayOptions options = {},
                  door::FrontDoor* door = nullptr)
      : gateway(std::move(options), testing::fake_model(65536), scheduler, text) {
    HttpFrontOptions front_options;
    front_options.door = door;
    auto started = HttpFront::start(std::move(front_options), gateway);
    EXPECT_TRUE(started.ok()) << started.status();
    front = std::move(started).value();
    port = front->port();
  }
  ~Router() {
    gateway.begin_drain();
    gateway.abort_all(unavailable("the test is over"));
    front.reset();
  }
  bool wait_idle() { return gateway.wait_idle(10 * kSecond); }

  testing::FakeText text;
  gateway::Gateway gateway;
  std::unique_ptr<HttpFront> front;
  uint16_t port = 0;
};

struct Event {
  uint64_t id = 0;
  std::string data;
};
// Events with ids that count up from `from`.
std::vector<Event> numbered(const std::string& body, uint64_t from = 1) {
  std::vector<Event> out;
  size_t at = 0;
  while (at < body.size()) {
    const size_t end = body.find("\n\n", at);
    EXPECT_NE(end, std::string::npos);
    if (end == std::string::npos) break;
    const std::string block = body.substr(at, end - at);
    at = end + 2;
    const size_t line = block.find('\n');
    EXPECT_EQ(block.compare(0, 4, "id: "), 0) << block;
    EXPECT_NE(line, std::string::npos);
    if (line == std::string::npos) break;
    out.push_back({std::stoull(block.substr(4, line - 4)), block.substr(line + 1)});
    EXPECT_EQ(out.back().id, from++);
  }
  return out;
}

testing::RawResponse resume(const Router& router, const std::string& id, uint64_t after,
                            const std::string& headers = "") {
  return http_call(router.port, "GET", "/v1/streams/" + id, "",
                   "last-event-id: " + std::to_string(after) + "\r\n" + headers);
}

// Without what differs between two requests of one body.
std::string comparable(const std::string& body) {
  static const std::regex kOwn("cmpl-[0-9a-f]{32}|\"created\":[0-9]+|call_[0-9a-f]{24}");
  return std::regex_replace(body, kOwn, "*");
}

struct Kind {
  std::string name;
  std::string path;
  std::string body;
  std::vector<std::string> scripts;  // by choice
  bool starts_in_reasoning = false;
};

constexpr char kCalls[] =
    "I should look.\n</think>\n\nLet me see.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n"
    "<parameter name=\"city\">K\xc3\xb6ln</parameter>\n<parameter name=\"days\">3</parameter>\n</invoke>\n"
    "<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>";
constexpr char kTools[] =
    R"("tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":)"
    R"({"city":{"type":"string"},"days":{"type":"integer"}}}}},)"
    R"({"type":"function","function":{"name":"now","parameters":{"type":"object","properties":{}}}}])";

std::vector<Kind> kinds() {
  const std::string chat = "/v1/chat/completions";
  const std::string completions = "/v1/completions";
  const std::string usage = R"("stream_options":{"include_usage":true,"continuous_usage_stats":true})";
  std::vector<Kind> out;
  out.push_back({"reasoning",
                 chat,
                 chat_body(R"("stream":true,"stream_options":{"include_usage":true})"),
                 {"hm, let me\nthink</think>\n\nso it is"},
                 true});
  out.push_back({"tools", chat, chat_body(std::string(R"("stream":true,)") + kTools), {kCalls}, true});
  out.push_back({"chat_logprobs",
                 chat,
                 chat_body(R"("stream":true,"n":2,"logprobs":true,"top_logprobs":2,"return_token_ids":true)"),
                 {"one answer", "and another one"},
                 false});
  out.push_back({"chat_stop",
                 chat,
                 chat_body(R"("stream":true,"n":2,"stop":["END"],)" + usage),
                 {"some text END and more", "no end of it"},
                 false});
  out.push_back({"completion",
                 completions,
                 R"({"prompt":"h\u00e9llo","max_tokens":100,"stream":true})",
                 {"w\xc3\xb6rld and so on"},
                 false});
  out.push_back({"completion_length",
                 completions,
                 R"({"prompt":[72,105],"max_tokens":7,"n":3,"stream":true,)" + usage + "}",
                 {"aaaaaaaaaa", "bb", "ccccccccccccc"},
                 false});
  out.push_back({"echo_logprobs",
                 completions,
                 R"({"prompt":"Hi <x>","max_tokens":9,"echo":true,"logprobs":2,"stream":true,"n":2})",
                 {"what now", "and then"},
                 false});
  out.push_back(
      {"stop_included",
       completions,
       R"({"prompt":"a","max_tokens":50,"stream":true,"stop":["xyz"],"include_stop_str_in_output":true})",
       {"up to xyz and no more"},
       false});
  return out;
}

ReplayScheduler::Script script_of(const Kind& kind) {
  return [kind](const AcceptedRequest&, uint32_t choice) {
    return byte_tokens(kind.scripts[choice % kind.scripts.size()]);
  };
}

class Resume : public ::testing::TestWithParam<Kind> {};

TEST_P(Resume, TheRestOfABrokenStreamComesFromAnotherRouter) {
  const Kind kind = GetParam();
  ReplayScheduler scheduler(script_of(kind));
  Router first(scheduler), second(scheduler);
  first.text.starts_in_reasoning = kind.starts_in_reasoning;  // the second one learns it from the first

  auto r = http_call(first.port, "POST", kind.path, kind.body, kResumable);
  ASSERT_EQ(r.status, 200) << r.body;
  const std::string id = r.headers["x-conclave-stream-id"];
  ASSERT_EQ(id.size(), 32u);
  const std::string whole = r.body;
  const std::vector<Event> all = numbered(whole);
  ASSERT_GT(all.size(), 4u);
  EXPECT_EQ(all.back().data, "data: [DONE]");

  // As often as one likes, from every place.
  for (uint64_t after = 0; after <= all.size(); ++after) {
    const auto rest = resume(after % 2 == 0 ? second : first, id, after);
    ASSERT_EQ(rest.status, 200) << rest.body;
    EXPECT_EQ(rest.headers.at("x-conclave-stream-id"), id);
    size_t skip = 0;
    for (uint64_t i = 0; i < after; ++i) skip = whole.find("\n\n", skip) + 2;
    ASSERT_EQ(rest.body, whole.substr(skip)) << after;
  }

  // The plain stream says the same, where its pieces are tokens too.
  r = http_call(first.port, "POST", kind.path, kind.body);
  EXPECT_EQ(r.headers.count("x-conclave-stream-id"), 0u);
  EXPECT_THAT(r.body, ::testing::StartsWith("data: "));
  const auto plain = accumulate(events(r.body));
  std::string unnumbered;
  for (const Event& event : all) unnumbered += event.data + "\n\n";
  for (const auto& [index, choice] : accumulate(events(unnumbered))) {
    EXPECT_EQ(choice.content, plain.at(index).content);
    EXPECT_EQ(choice.reasoning, plain.at(index).reasoning);
    EXPECT_EQ(choice.finish, plain.at(index).finish);
    EXPECT_EQ(choice.calls.size(), plain.at(index).calls.size());
    EXPECT_EQ(choice.logprobs, plain.at(index).logprobs);
  }
}

TEST_P(Resume, AClientThatBreaksOffGoesOnWithTheSameStreamWhileItIsBeingGenerated) {
  const Kind kind = GetParam();
  ReplayScheduler scheduler(script_of(kind));
  Router first(scheduler), second(scheduler);
  for (Router* router : {&first, &second}) router->text.starts_in_reasoning = kind.starts_in_reasoning;
  const auto fault_free = http_call(first.port, "POST", kind.path, kind.body, kResumable);
  const std::vector<Event> expected = numbered(fault_free.body);

  for (size_t gate : {1, 3, 5}) {
    for (const bool one_by_one : {false, true}) {
      scheduler.set_one_by_one(one_by_one);  // the order in which choices generate says nothing
      scheduler.open_to(gate);
      RawClient client(first.port);
      ASSERT_TRUE(client.send_request("POST", kind.path, kind.body, kResumable));
      ASSERT_TRUE(client.wait_for("id: 1\n"));
      ASSERT_TRUE(client.wait_for("\n\n"));
      const std::string& head = client.received();
      const size_t at = head.find("x-conclave-stream-id: ");
      ASSERT_NE(at, std::string::npos) << head;
      const std::string id = head.substr(at + 22, 32);
      client.close();
      ASSERT_TRUE(first.wait_idle());
      Router& next = gate == 3 ? first : second;
      // The rest is still to come when it connects again.
      RawClient again(next.port);
      ASSERT_TRUE(again.send_request("GET", "/v1/streams/" + id, "", "last-event-id: 1\r\n"));
      ASSERT_TRUE(again.wait_for("x-conclave-stream-id"));
      scheduler.open_to(~size_t{0});
      const auto rest = again.read_response();
      ASSERT_EQ(rest.status, 200);
      std::string got = comparable(rest.body), want;
      for (const Event& event : expected)
        if (event.id > 1) want += "id: " + std::to_string(event.id) + "\n" + event.data + "\n\n";
      EXPECT_EQ(got, comparable(want)) << gate << one_by_one;
    }
  }
  EXPECT_EQ(scheduler.cancels(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Resume, ::testing::ValuesIn(kinds()),
                         [](const auto& kind) { return kind.param.name; });

Kind counting() {
  return {"",
          "/v1/completions",
          R"({"prompt":"1","max_tokens":90,"stream":true})",
          {"1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"},
          false};
}

TEST(ResumeStream, AStreamThatIsReadElsewhereIsTakenOver) {
  const Kind kind = counting();
  ReplayScheduler scheduler(script_of(kind));
  Router first(scheduler), second(scheduler);
  scheduler.open_to(5);
  auto client = std::make_unique<RawClient>(first.port);
  ASSERT_TRUE(client->send_request("POST", kind.path, kind.body, kResumable));
  ASSERT_TRUE(client->wait_for("id: 5\n"));
  const std::string id = gateway::id_text(scheduler.last());
  for (Router* next : {&second, &second, &first}) {  // elsewhere, there again, and back
    auto other = std::make_unique<RawClient>(next->port);
    ASSERT_TRUE(other->send_request("GET", "/v1/streams/" + id));
    ASSERT_TRUE(other->wait_for("id: 5\n"));
    // Who had it hears of it.
    const auto before = client->read_response();
    EXPECT_THAT(before.body, HasSubstr("taken the stream over"));
    EXPECT_THAT(before.body, ::testing::EndsWith("data: [DONE]\n\n"));
    client = std::move(other);
  }
  scheduler.open_to(~size_t{0});
  EXPECT_EQ(numbered(client->read_response().body).back().data, "data: [DONE]");
  EXPECT_EQ(scheduler.cancels(), 0u);
}

TEST(ResumeStream, WhoLeavesBeforeItBeganOrDidNotAskForItIsForgotten) {
  const Kind kind = counting();
  ReplayScheduler scheduler(script_of(kind));
  Router router(scheduler);
  scheduler.open_to(5);
  RawClient client(router.port);
  ASSERT_TRUE(client.send_request("POST", kind.path, kind.body));
  ASSERT_TRUE(client.wait_for("data: "));
  const std::string id = gateway::id_text(scheduler.last());
  EXPECT_EQ(resume(router, id, 0).status, 404);
  client.close();
  ASSERT_TRUE(router.wait_idle());
  EXPECT_EQ(scheduler.cancels(), 1u);
  EXPECT_EQ(resume(router, id, 0).status, 404);
}

TEST(ResumeStream, OnlyItsTenantMayResumeIt) {
  testing::KeyDir keys;
  keys.write(door::format_key_line(testing::line_of("key-of-alice", "alice")) + "\n" +
             door::format_key_line(testing::line_of("key-of-bob", "bob")) + "\n");
  door::FrontDoorOptions options;
  options.keys_file = keys.path();
  auto door = door::FrontDoor::open(std::move(options));
  ASSERT_TRUE(door.ok()) << door.status();
  const Kind kind = counting();
  ReplayScheduler scheduler(script_of(kind));
  Router router(scheduler, {}, door->get());
  const std::string alice = "authorization: Bearer key-of-alice\r\n";
  const std::string bob = "authorization: Bearer key-of-bob\r\n";
  auto r = http_call(router.port, "POST", kind.path, kind.body, kResumable + alice);
  ASSERT_EQ(r.status, 200) << r.body;
  const std::string id = r.headers["x-conclave-stream-id"];
  EXPECT_EQ(resume(router, id, 0).status, 401);
  const auto refused = resume(router, id, 0, bob);
  EXPECT_EQ(refused.status, 404);
  EXPECT_EQ(refused.body, resume(router, "0123456789abcdef0123456789abcdef", 0, bob).body);
  EXPECT_EQ(resume(router, id, 0, alice).body, r.body);
  // The same while it runs.
  scheduler.open_to(3);
  RawClient client(router.port);
  ASSERT_TRUE(client.send_request("POST", kind.path, kind.body, kResumable + alice));
  ASSERT_TRUE(client.wait_for("id: 3\n"));
  EXPECT_EQ(resume(router, gateway::id_text(scheduler.last()), 0, bob).body, refused.body);
}

TEST(ResumeStream, BadRequestsAreAnswered) {
  const Kind kind = counting();
  ReplayScheduler scheduler(script_of(kind));
  Router router(scheduler);
  auto r = http_call(router.port, "POST", kind.path, kind.body, kResumable);
  const std::string id = r.headers["x-conclave-stream-id"];
  const size_t count = numbered(r.body).size();
  EXPECT_EQ(resume(router, "no-such-thing", 0).status, 404);
  EXPECT_EQ(resume(router, "0123456789abcdef0123456789abcdef", 0).status, 404);
  // No request's id: a scheduler that is asked for it closes the session of the whole router.
  EXPECT_FALSE(gateway::parse_id(std::string(32, '0')).has_value());
  EXPECT_EQ(resume(router, std::string(32, '0'), 0).status, 404);
  EXPECT_EQ(resume(router, "cmpl-" + std::string(32, '0'), 0).status, 404);
  EXPECT_EQ(http_call(router.port, "GET", "/v1/streams/").status, 404);
  const auto word = http_call(router.port, "GET", "/v1/streams/" + id, "", "last-event-id: third\r\n");
  EXPECT_EQ(word.status, 400);
  EXPECT_EQ(param_of(word), "last-event-id");
  const auto post = http_call(router.port, "POST", "/v1/streams/" + id);
  EXPECT_EQ(post.status, 405);
  EXPECT_EQ(post.headers.at("allow"), "GET, OPTIONS");
  const auto header = http_call(router.port, "POST", kind.path, kind.body, "x-conclave-resumable: maybe\r\n");
  EXPECT_EQ(header.status, 400);
  EXPECT_EQ(param_of(header), "x-conclave-resumable");
  // Ids as answers have them are taken; one past the end is nobody's.
  EXPECT_EQ(resume(router, "cmpl-" + id, 0).body, r.body);
  EXPECT_EQ(resume(router, id, count).body, "");
  EXPECT_THAT(resume(router, id, count + 7).body, HasSubstr("last-event-id"));
}

// The scheduler went away a moment ago, and the next one has not said yet what it keeps: that one decides.
TEST(ResumeStream, OneBegunBeforeTheSchedulersBoundIsKnownIsLikeAnyOther) {
  const Kind kind = counting();
  ReplayScheduler scheduler(script_of(kind));
  gateway::GatewayOptions options;
  options.unready_grace = 10 * 60 * kSecond;
  Router router(scheduler, options);
  FleetInfo fleet = scheduler.fleet();
  fleet.ready = false;
  fleet.unready_since = steady_now();
  const auto granted = [&](std::optional<uint32_t> bound) {
    fleet.max_router_context_bytes = bound;
    scheduler.set_fleet(fleet);
    const auto r = http_call(router.port, "POST", kind.path, kind.body, kResumable);
    EXPECT_EQ(r.status, 200) << r.body;
    EXPECT_EQ(r.headers.count("x-conclave-stream-id") + r.headers.count("x-conclave-not-resumable"), 1u);
    return r.headers.count("x-conclave-stream-id") == 1;
  };
  EXPECT_TRUE(granted(std::nullopt));
  EXPECT_EQ(router.gateway.limits().count(gateway::Limit::kRouterContext), 0u);
  EXPECT_FALSE(granted(0)) << "known, and none";
  EXPECT_EQ(router.gateway.limits().count(gateway::Limit::kRouterContext), 1u);
  scheduler.keep_none();
  EXPECT_FALSE(granted(std::nullopt)) << "the scheduler said no";
}

TEST(ResumeStream, WhatCannotBeResumedSaysSo) {
  const Kind kind = counting();
  ReplayScheduler scheduler(script_of(kind));
  Router router(scheduler);
  auto r = http_call(router.port, "POST", kind.path, R"({"prompt":"1","max_tokens":9})", kResumable);
  EXPECT_EQ(r.status, 200);
  EXPECT_THAT(r.headers["x-conclave-not-resumable"], HasSubstr("stream"));
  r = http_call(router.port, "POST", kind.path, R"({"prompt":["1","2"],"max_tokens":9,"stream":true})",
                kResumable);
  EXPECT_EQ(r.headers.count("x-conclave-not-resumable"), 1u);
  EXPECT_THAT(r.body, ::testing::StartsWith("data: "));
  // Too much to keep, here and at the scheduler.
  r = http_call(router.port, "POST", kind.path,
                R"({"prompt":"1","max_tokens":9,"stream":true,"stop":[")" + std::string(900, 'x') +
                    R"("],"x":")" + std::string(4000, 'y') + R"("})",
                kResumable);
  EXPECT_EQ(r.status, 200) << r.body;
  EXPECT_THAT(r.headers["x-conclave-not-resumable"], HasSubstr("room"));
  EXPECT_EQ(r.headers.count("x-conclave-stream-id"), 0u);
  EXPECT_THAT(r.body, ::testing::StartsWith("data: "));
  EXPECT_EQ(router.gateway.limits().count(gateway::Limit::kRouterContext), 1u);
  scheduler.keep_none();
  r = http_call(router.port, "POST", kind.path, kind.body, kResumable);
  EXPECT_EQ(r.headers.count("x-conclave-not-resumable"), 1u);
  EXPECT_THAT(r.body, ::testing::StartsWith("data: "));
  EXPECT_THAT(r.body, ::testing::EndsWith("data: [DONE]\n\n"));
}

TEST(ResumeStream, AFailureIsPartOfTheStream) {
  const Kind kind = counting();
  ReplayScheduler scheduler(script_of(kind));
  Router first(scheduler), second(scheduler);
  scheduler.open_to(5);
  RawClient client(first.port);
  ASSERT_TRUE(client.send_request("POST", kind.path, kind.body, kResumable));
  ASSERT_TRUE(client.wait_for("id: 5\n"));
  scheduler.fail(scheduler.last(), "the worker fell over");
  const auto r = client.read_response();
  EXPECT_THAT(r.body, HasSubstr("fell over"));
  EXPECT_EQ(resume(second, gateway::id_text(scheduler.last()), 0).body, r.body);
}

TEST(ResumeStream, ARouterThatStopsHandsItsStreamsOver) {
  const Kind kind = counting();
  ReplayScheduler scheduler(script_of(kind));
  auto first = std::make_unique<Router>(scheduler);
  Router second(scheduler);
  scheduler.open_to(5);
  RawClient client(first->port);
  ASSERT_TRUE(client.send_request("POST", kind.path, kind.body, kResumable));
  ASSERT_TRUE(client.wait_for("id: 5\n"));
  const std::string id = gateway::id_text(scheduler.last());
  first->gateway.begin_drain();
  first->gateway.abort_all(unavailable("the router is shutting down"));
  const auto broken = client.read_response();
  EXPECT_THAT(broken.body, HasSubstr("shutting down"));
  const size_t numbered_end = broken.body.find("data: {\"error\"");
  const std::vector<Event> had = numbered(broken.body.substr(0, numbered_end));
  first.reset();
  scheduler.open_to(~size_t{0});
  const auto rest = resume(second, id, had.size());
  EXPECT_EQ(broken.body.substr(0, numbered_end) + rest.body, resume(second, id, 0).body);
  EXPECT_EQ(scheduler.cancels(), 0u);
}

TEST(ResumeStream, AStopStringEndsTheGenerationAndStaysResumable) {
  Kind kind = counting();
  kind.body = R"({"prompt":"1","max_tokens":90,"stream":true,"stop":["5"]})";
  ReplayScheduler scheduler(script_of(kind));
  Router first(scheduler), second(scheduler);
  scheduler.open_to(9);
  RawClient client(first.port);
  ASSERT_TRUE(client.send_request("POST", kind.path, kind.body, kResumable));
  const auto r = client.read_response();
  EXPECT_THAT(r.body, HasSubstr(R"("finish_reason":"stop")"));
  EXPECT_EQ(scheduler.releases().finished, 1u);
  EXPECT_EQ(scheduler.cancels(), 0u);
  EXPECT_EQ(resume(second, gateway::id_text(scheduler.last()), 0).body, r.body);
}

TEST(ResumeStream, ALongBacklogComesInPartsToAReaderThatTakesIt) {
  Kind kind = counting();
  kind.body = R"({"prompt":"1","max_tokens":20000,"stream":true})";
  kind.scripts = {std::string(20000, 'z')};
  ReplayScheduler scheduler(script_of(kind));
  gateway::GatewayOptions options;
  options.stream.max_pending_tokens = 64;
  Router first(scheduler, options), second(scheduler, options);
  scheduler.open_to(1);
  RawClient client(first.port);
  ASSERT_TRUE(client.send_request("POST", kind.path, kind.body, kResumable));
  ASSERT_TRUE(client.wait_for("id: 1\n"));
  client.close();
  ASSERT_TRUE(first.wait_idle());
  scheduler.open_to(~size_t{0});
  const std::string id = gateway::id_text(scheduler.last());
  const auto all = numbered(resume(second, id, 0).body);
  EXPECT_EQ(all.size(), 20002u);
  EXPECT_EQ(all.back().data, "data: [DONE]");
  EXPECT_EQ(numbered(resume(second, id, 19990).body, 19991).size(), 12u);
}

TEST(ResumeStream, ContextsOfOthersAreRefused) {
  const gateway::AdmissionLimits limits;
  const std::string good = write_stream_context(true, chat_body(R"("stream":true)"), {"m", "f", 5});
  EXPECT_THAT(good, ::testing::Not(HasSubstr("\"hi\"")));  // no message is in it
  ASSERT_TRUE(read_stream_context(good, limits).ok());
  for (const std::string& bad :
       {std::string(), std::string("{}"), std::string("\x01\x02"), good.substr(1),
        std::string(R"({"v":2,"api":"chat","model":"","fingerprint":"","created":1,"body":{}})"),
        std::string(R"({"v":1,"api":"chat","model":"","fingerprint":"","created":1,"body":3})")}) {
    EXPECT_EQ(read_stream_context(bad, limits).status().code(), StatusCode::kFailedPrecondition) << bad;
  }
  const std::string framed = gateway::write_router_context({true, "echoed", "adapter"});
  const auto read = gateway::read_router_context(framed);
  ASSERT_TRUE(read.has_value());
  EXPECT_TRUE(read->starts_in_reasoning);
  EXPECT_EQ(read->echoed, "echoed");
  EXPECT_EQ(read->adapter, "adapter");
  for (size_t length = 0; length < 12; ++length)
    EXPECT_FALSE(gateway::read_router_context(std::string_view(framed).substr(0, length)).has_value());
  EXPECT_FALSE(gateway::read_router_context("\x02" + framed.substr(1)).has_value());
}

}  // namespace
}  // namespace conclave::router
