// Keys, rate limits, admission and request ids as HTTP clients see them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <thread>

#include "tests/router/http_fixture.h"
#include "tests/router/key_dir.h"

namespace conclave::router {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::http_call;
using testing::KeyDir;
using testing::line_of;
using ::testing::Not;
using testing::RawClient;
using testing::RawResponse;

constexpr char kAlice[] = "authorization: Bearer ck-alice\r\n";

std::string bearer(const std::string& key) { return "authorization: Bearer " + key + "\r\n"; }

// A server that asks for keys; its access lines are kept.
class Guarded {
 public:
  struct Line {
    std::string id, tenant, route, outcome;
    int status;
    uint64_t prompt_tokens, completion_tokens;
  };

  explicit Guarded(const std::string& keys, gateway::GatewayOptions options = {},
                   std::chrono::microseconds pause = {}) {
    dir.write(keys);
    door::FrontDoorOptions door_options;
    door_options.keys_file = dir.path();
    door_options.on_end = [this](const door::AccessLine& line) {
      std::lock_guard lock(mutex_);
      lines_.push_back({std::string(line.request_id), std::string(line.tenant), std::string(line.route),
                        std::string(line.outcome), line.status, line.prompt_tokens, line.completion_tokens});
    };
    auto opened = door::FrontDoor::open(std::move(door_options));
    EXPECT_TRUE(opened.ok()) << opened.status();
    door = std::move(opened).value();
    HttpFrontOptions front;
    front.door = door.get();
    server.emplace(pause, std::move(front), options);
  }

  // Lines come when everybody has let go of a request, which may be after its answer.
  std::vector<Line> wait_lines(size_t count) {
    for (int i = 0; i < 2000; ++i) {
      {
        std::lock_guard lock(mutex_);
        if (lines_.size() >= count) return lines_;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ADD_FAILURE() << "there were not " << count << " access lines";
    std::lock_guard lock(mutex_);
    return lines_;
  }
  uint16_t port() const { return server->port; }

  KeyDir dir;
  std::unique_ptr<door::FrontDoor> door;

 private:
  std::mutex mutex_;
  std::vector<Line> lines_;

 public:
  std::optional<Server> server;  // last: its requests hold visits
};

std::string code_in(const RawResponse& response) {
  const json::value code = parse(response.body).at("error").at("code");
  return code.is_string() ? std::string(code.as_string()) : "";
}

TEST(HttpDoorTest, EveryRouteButHealthAsksForAKey) {
  Guarded guarded(format_key_line(line_of("ck-alice", "alice")));
  EXPECT_EQ(http_call(guarded.port(), "GET", "/health").status, 200);
  const std::pair<const char*, const char*> routes[] = {{"POST", "/v1/completions"},
                                                        {"POST", "/v1/chat/completions"},
                                                        {"GET", "/v1/models"},
                                                        {"GET", "/v1/models/fake-m2"},
                                                        {"OPTIONS", "/v1/completions"},
                                                        {"POST", "/healthz"},
                                                        {"GET", "/"}};
  for (const auto& [method, path] : routes) {
    for (const std::string& header :
         {std::string(), bearer("ck-mallory"), std::string("authorization: ck-alice\r\n"),
          std::string("authorization:\r\n")}) {
      const RawResponse r = http_call(guarded.port(), method, path, "", header);
      ASSERT_EQ(r.status, 401) << method << " " << path << " " << header;
      const json::object error = parse(r.body).at("error").as_object();
      EXPECT_EQ(error.at("type"), "authentication_error");
      EXPECT_EQ(error.at("code"), "invalid_api_key");
      EXPECT_TRUE(error.at("param").is_null());
      EXPECT_EQ(r.headers.at("www-authenticate"), "Bearer");
      EXPECT_FALSE(r.headers.at("x-request-id").empty());
      EXPECT_THAT(r.body, Not(HasSubstr("mallory")));
    }
  }
  EXPECT_EQ(http_call(guarded.port(), "GET", "/v1/models", "", kAlice).status, 200);
  EXPECT_EQ(http_call(guarded.port(), "GET", "/nothing", "", kAlice).status, 404);
  EXPECT_EQ(http_call(guarded.port(), "POST", "/v1/completions", R"({"prompt":"a"})", kAlice).status, 200);
}

TEST(HttpDoorTest, ABodyWithoutAKeyIsNotRead) {
  Guarded guarded(format_key_line(line_of("ck-alice", "alice")));
  RawClient client(guarded.port());
  // The answer comes before the body, which never does.
  client.send(
      "POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 10000000\r\n\r\n");
  EXPECT_EQ(client.read_response().status, 401);
  EXPECT_TRUE(client.wait_closed());
}

TEST(HttpDoorTest, KeysChangeWithoutARestart) {
  Guarded guarded(format_key_line(line_of("ck-alice", "alice")));
  RawClient kept(guarded.port());  // a connection is no key: each request shows its own
  kept.send_request("GET", "/v1/models", "", kAlice);
  EXPECT_EQ(kept.read_response().status, 200);
  guarded.dir.write(format_key_line(line_of("ck-bob", "bob")));
  ASSERT_TRUE(guarded.door->reload_changed_keys().ok());
  kept.send_request("GET", "/v1/models", "", kAlice);
  EXPECT_EQ(kept.read_response().status, 401);
  EXPECT_EQ(http_call(guarded.port(), "GET", "/v1/models", "", bearer("ck-bob")).status, 200);
}

TEST(HttpDoorTest, RateLimitsAnswer429AndSayWhenToComeBack) {
  Guarded guarded(format_key_line(line_of("ck-alice", "alice", {2, 0, false})) + "\n" +
                  format_key_line(line_of("ck-bob", "bob", {0, 1000, false})));
  const std::string body = R"({"prompt":"hello"})";
  RawResponse r = http_call(guarded.port(), "POST", "/v1/completions", body, kAlice);
  EXPECT_EQ(r.status, 200);
  EXPECT_EQ(r.headers.at("x-ratelimit-limit-requests"), "2");
  EXPECT_EQ(r.headers.at("x-ratelimit-remaining-requests"), "1");
  r = http_call(guarded.port(), "POST", "/v1/completions", R"({"prompt":"hello","stream":true})", kAlice);
  EXPECT_EQ(r.status, 200);
  EXPECT_EQ(r.headers.at("x-ratelimit-remaining-requests"), "0");
  r = http_call(guarded.port(), "POST", "/v1/completions", body, kAlice);
  EXPECT_EQ(r.status, 429);
  EXPECT_EQ(code_in(r), "rate_limit_exceeded");
  EXPECT_EQ(parse(r.body).at("error").at("type"), "rate_limit_error");
  const int seconds = std::stoi(r.headers.at("retry-after"));
  EXPECT_TRUE(seconds >= 1 && seconds <= 30) << seconds;
  EXPECT_EQ(guarded.server->scheduler.submitted(), 2u);
  // Others don't notice, and what costs nothing stays allowed.
  EXPECT_EQ(http_call(guarded.port(), "GET", "/v1/models", "", kAlice).status, 200);
  r = http_call(guarded.port(), "POST", "/v1/completions", body, bearer("ck-bob"));
  EXPECT_EQ(r.status, 200);
  EXPECT_EQ(r.headers.count("x-ratelimit-limit-requests"), 0u);
  EXPECT_EQ(r.headers.at("x-ratelimit-limit-tokens"), "1000");
  // A body that is thought to hold more tokens than are left.
  const std::string large = "{\"prompt\":\"" + std::string(3990, 'x') + "\",\"max_tokens\":1}";
  EXPECT_EQ(http_call(guarded.port(), "POST", "/v1/completions", large, bearer("ck-bob")).status, 429);
  EXPECT_EQ(guarded.door->counts().rate_limited, 2u);
}

TEST(HttpDoorTest, ARequestIdIsTakenOrMadeAndLogged) {
  Guarded guarded(format_key_line(line_of("ck-alice", "alice")));
  RawResponse r = http_call(guarded.port(), "POST", "/v1/completions", R"({"prompt":"hello","max_tokens":3})",
                            std::string(kAlice) + "x-request-id: mine-1\r\n");
  EXPECT_EQ(r.headers.at("x-request-id"), "mine-1");
  auto lines = guarded.wait_lines(1);
  EXPECT_EQ(lines[0].id, "mine-1");
  EXPECT_EQ(lines[0].tenant, "alice");
  EXPECT_EQ(lines[0].route, "/v1/completions");
  EXPECT_EQ(lines[0].status, 200);
  EXPECT_EQ(lines[0].outcome, "length");
  EXPECT_EQ(lines[0].prompt_tokens, 5u);
  EXPECT_EQ(lines[0].completion_tokens, 3u);

  r = http_call(guarded.port(), "POST", "/v1/completions", "{",
                std::string(kAlice) + "x-request-id: " + std::string(129, 'a') + "\r\n");
  EXPECT_EQ(r.status, 400);
  EXPECT_EQ(r.headers.at("x-request-id").size(), 32u);
  lines = guarded.wait_lines(2);
  EXPECT_EQ(lines[1].id, r.headers.at("x-request-id"));
  EXPECT_EQ(lines[1].status, 400);

  r = http_call(guarded.port(), "GET", "/v1/models", "", "x-request-id: stranger\r\n");
  EXPECT_EQ(r.headers.at("x-request-id"), "stranger");
  lines = guarded.wait_lines(3);
  EXPECT_EQ(lines[2].status, 401);
  EXPECT_EQ(lines[2].tenant, "");
  EXPECT_EQ(guarded.server->scheduler.submitted(), 1u);
}

TEST(HttpDoorTest, AClientThatLeavesIsALineToo) {
  Guarded guarded(format_key_line(line_of("ck-alice", "alice")), {}, std::chrono::milliseconds(20));
  {
    RawClient client(guarded.port());
    client.send_request("POST", "/v1/completions",
                        "{\"prompt\":\"" + std::string(500, 'x') + "\",\"max_tokens\":500}", kAlice);
    guarded.server->scheduler.wait_submitted();
  }
  const auto lines = guarded.wait_lines(1);
  EXPECT_EQ(lines[0].status, 499);
  EXPECT_EQ(lines[0].outcome, "CANCELLED");
}

TEST(HttpDoorTest, OpenRequestsAreListedWithoutTheirText) {
  Guarded guarded(format_key_line(line_of("ck-alice", "alice")), {}, std::chrono::milliseconds(20));
  RawClient client(guarded.port());
  client.send_request("POST", "/v1/completions",
                      "{\"prompt\":\"" + std::string(200, 'x') + "\",\"max_tokens\":200,\"stream\":true}",
                      std::string(kAlice) + "x-request-id: long-one\r\n");
  ASSERT_TRUE(client.wait_for("data: "));
  const auto open = guarded.server->gateway.open_requests(10);
  ASSERT_EQ(open.size(), 1u);
  EXPECT_EQ(open[0].request_id, "long-one");
  EXPECT_EQ(open[0].tenant, "alice");
  EXPECT_EQ(open[0].route, "/v1/completions");
  EXPECT_TRUE(open[0].accepted);
  EXPECT_EQ(open[0].usage.prompt_tokens, 200u);
  EXPECT_GT(open[0].age, 0);
  EXPECT_TRUE(guarded.server->gateway.open_requests(0).empty());
}

TEST(HttpDoorTest, TheSchedulerLearnsWhoAsks) {
  Guarded guarded(format_key_line(line_of("ck-alice", "alice")), {}, std::chrono::seconds(1));
  RawClient client(guarded.port());
  client.send_request("POST", "/v1/completions", R"({"prompt":"hello","max_tokens":5})", kAlice);
  EXPECT_EQ(guarded.server->scheduler.wait_submitted().tenant, "alice");
}

TEST(HttpDoorTest, XRequestTimeoutIsTheRequestsDeadline) {
  Server server(std::chrono::seconds(1));
  RawClient client(server.port);
  client.send_request("POST", "/v1/completions", R"({"prompt":"hello","max_tokens":5})",
                      "x-request-timeout: 12.5\r\n");
  const Nanos left = server.scheduler.wait_submitted().time_left;
  EXPECT_LE(left, 12500 * kMillisecond);
  EXPECT_GT(left, 5 * kSecond);
  for (const char* bad : {"0", "-1", "nan", "inf", "1e9", "5s"}) {
    const RawResponse r = http_call(server.port, "POST", "/v1/completions", R"({"prompt":"a"})",
                                    "x-request-timeout: " + std::string(bad) + "\r\n");
    EXPECT_EQ(r.status, 400) << bad;
    EXPECT_EQ(param_of(r), "x-request-timeout");
  }
}

TEST(HttpPingTest, ASilentStreamGetsComments) {
  testing::FakeText text;
  testing::FakeScheduler scheduler;
  gateway::Gateway gateway({}, testing::fake_model(), scheduler, text);
  HttpFrontOptions options;
  options.limits.sse_ping_interval = 30 * kMillisecond;
  auto front = HttpFront::start(options, gateway);
  ASSERT_TRUE(front.ok());
  RawClient client((*front)->port()), whole((*front)->port());
  client.send_request("POST", "/v1/completions", R"({"prompt":"a","stream":true})");
  const RequestId id = scheduler.wait_submitted(0).id;
  scheduler.accept(id);
  ASSERT_TRUE(client.wait_for(": keep-alive\n\n"));
  scheduler.emit(id, 0, {'a'});
  ASSERT_TRUE(client.wait_for("\"a\""));
  // An answer that is no stream is never pinged.
  whole.send_request("POST", "/v1/completions", R"({"prompt":"a"})");
  const RequestId other = scheduler.wait_submitted(1).id;
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // time itself is what is tested
  scheduler.emit(other, 0, {'b'}, FinishReason::kLength);
  const RawResponse r = whole.read_response();
  EXPECT_TRUE(r.complete);
  EXPECT_THAT(r.body, Not(HasSubstr("keep-alive")));
  scheduler.emit(id, 1, {'c'}, FinishReason::kLength);
  const RawResponse streamed = client.read_response();
  EXPECT_TRUE(streamed.complete);
  EXPECT_THAT(streamed.body, HasSubstr("data: [DONE]"));
  const uint64_t pings = (*front)->counts().sse_pings;
  EXPECT_GE(pings, 3u);
  gateway.begin_drain();
  gateway.abort_all(unavailable("the test is over"));
}

// --- admission ---

// A scheduler that never gives a first token.
struct Stuck : testing::FakeScheduler {};

TEST(AdmissionTest, TheQueueIsBoundedInRequestsAndTokens) {
  for (const bool by_tokens : {false, true}) {
    gateway::GatewayOptions options;
    if (by_tokens)
      options.limits.max_queued_tokens = 450;
    else
      options.limits.max_queued_requests = 2;
    testing::FakeText text;
    Stuck scheduler;
    gateway::Gateway gateway(options, testing::fake_model(), scheduler, text);
    auto front = HttpFront::start({}, gateway);
    ASSERT_TRUE(front.ok());
    const std::string body =
        "{\"prompt\":\"" + std::string(200, 'x') + "\",\"max_tokens\":2,\"stream\":true}";
    RawClient a((*front)->port()), b((*front)->port());
    a.send_request("POST", "/v1/completions", body);
    const RequestId first = scheduler.wait_submitted(0).id;
    b.send_request("POST", "/v1/completions", body);
    scheduler.wait_submitted(1);
    EXPECT_EQ(gateway.counts().queued_requests, 2u);
    EXPECT_EQ(gateway.counts().queued_tokens, 400u) << "as tokenized, not as estimated";
    const RawResponse r = http_call((*front)->port(), "POST", "/v1/completions", body);
    EXPECT_EQ(r.status, 503) << r.body;
    EXPECT_THAT(r.body, HasSubstr(by_tokens ? "max_queued_tokens" : "max_queued_requests"));
    EXPECT_FALSE(r.headers.at("retry-after").empty());
    EXPECT_EQ(scheduler.submitted(), 2u);
    EXPECT_EQ(
        gateway.limits().count(by_tokens ? gateway::Limit::kQueuedTokens : gateway::Limit::kQueuedRequests),
        1u);
    // The first token of one makes room for another; who waits is never shed.
    scheduler.accept(first);
    EXPECT_EQ(gateway.counts().queued_requests, 2u) << "accepted, and still waiting";
    scheduler.emit(first, 0, {'a'});
    ASSERT_TRUE(a.wait_for("data: "));
    EXPECT_EQ(gateway.counts().queued_requests, 1u);
    RawClient c((*front)->port());
    c.send_request("POST", "/v1/completions", body);
    EXPECT_EQ(scheduler.wait_submitted(2).prompt.size(), 200u);
    gateway.begin_drain();
    gateway.abort_all(unavailable("the test is over"));
    for (int i = 0; i < 2000 && gateway.counts().queued_requests > 0; ++i)  // a text thread may be letting go
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(gateway.counts().queued_requests, 0u);
    EXPECT_EQ(gateway.counts().queued_tokens, 0u);
  }
}

TEST(AdmissionTest, ALargePromptIsRefusedBeforeItIsTokenized) {
  // A codec that must not be asked.
  struct NoText : testing::FakeText {
    StatusOr<std::vector<TokenId>> encode(std::string_view, bool) const override {
      ADD_FAILURE() << "it was tokenized";
      return std::vector<TokenId>{1};
    }
  };
  NoText text;
  Stuck scheduler;
  gateway::GatewayOptions options;
  options.limits.max_queued_tokens = 1000;
  gateway::Gateway gateway(options, testing::fake_model(1 << 20), scheduler, text);
  gateway::GenerateRequest small;
  small.prompt = gateway::TokenPrompt{std::vector<int64_t>(10, 1)};
  ASSERT_TRUE(gateway.generate(small, [] {}).ok());
  gateway::GenerateRequest large;
  large.prompt = gateway::TextPrompt{std::string(100000, 'x')};
  EXPECT_EQ(gateway.generate(large, [] {}).status().code(), StatusCode::kResourceExhausted);
}

TEST(AdmissionTest, AnEmptyQueueTakesOneOfAnySize) {
  testing::FakeText text;
  Stuck scheduler;
  gateway::GatewayOptions options;
  options.limits.max_queued_tokens = 10;
  gateway::Gateway gateway(options, testing::fake_model(), scheduler, text);
  gateway::GenerateRequest request;
  request.prompt = gateway::TokenPrompt{std::vector<int64_t>(100, 1)};
  ASSERT_TRUE(gateway.generate(request, [] {}).ok());
  EXPECT_FALSE(gateway.generate(request, [] {}).ok());
}

TEST(AdmissionTest, WhatOneRequestHoldsIsBounded) {
  HttpFrontOptions front;
  front.openai.max_messages = 3;
  front.openai.max_tools = 1;
  front.openai.max_prompts = 2;
  front.openai.max_answers = 3;
  gateway::GatewayOptions options;
  options.limits = front.openai;
  options.limits.max_choices = 2;
  options.limits.max_top_logprobs = 4;
  options.limits.max_stop_strings = 1;
  Server server({}, front, options);
  const auto many = [](int count, const std::string& one) {
    std::string list;
    for (int i = 0; i < count; ++i) list += (i ? "," : "") + one;
    return list;
  };
  const std::string message = R"({"role":"user","content":"a"})";
  const std::string chat = "/v1/chat/completions", plain = "/v1/completions";
  struct Case {
    std::string path, body, field;
    gateway::Limit limit;
  };
  const std::string tool = R"({"type":"function","function":{"name":"f","parameters":{"type":"object"}}})";
  const Case cases[] = {
      {chat, "{\"messages\":[" + many(4, message) + "]}", "messages", gateway::Limit::kMessages},
      {chat, "{\"messages\":[" + message + "],\"tools\":[" + many(2, tool) + "]}", "tools",
       gateway::Limit::kTools},
      {plain, R"({"prompt":["a","b","c"]})", "prompt", gateway::Limit::kPrompts},
      {plain, R"({"prompt":["a","b"],"n":2})", "n", gateway::Limit::kAnswers},
      {plain, R"({"prompt":"a","n":3})", "n", gateway::Limit::kChoices},
      {plain, R"({"prompt":"a","logprobs":5})", "logprobs", gateway::Limit::kTopLogprobs},
      {plain, R"({"prompt":"a","stop":["x","y"]})", "stop", gateway::Limit::kStops},
  };
  for (const Case& one : cases) {
    const RawResponse r = http_call(server.port, "POST", one.path, one.body);
    EXPECT_EQ(r.status, 400) << one.body;
    EXPECT_EQ(param_of(r), one.field) << r.body;
    EXPECT_EQ(server.gateway.limits().count(one.limit), 1u) << one.body;
  }
  EXPECT_EQ(server.scheduler.submitted(), 0u);
  EXPECT_EQ(http_call(server.port, "POST", chat, "{\"messages\":[" + many(3, message) + "],\"max_tokens\":1}")
                .status,
            200);
}

TEST(AdmissionTest, ControlTokensNeedATrustedCaller) {
  Guarded guarded(format_key_line(line_of("ck-alice", "alice")) + "\n" +
                  format_key_line(line_of("ck-bob", "bob", {0, 0, true})));
  const std::string body =
      R"({"messages":[{"role":"user","content":"a"}],"max_tokens":1,"allow_special_tokens":true})";
  const RawResponse r = http_call(guarded.port(), "POST", "/v1/chat/completions", body, kAlice);
  EXPECT_EQ(r.status, 403) << r.body;
  EXPECT_EQ(param_of(r), "allow_special_tokens");
  EXPECT_EQ(http_call(guarded.port(), "POST", "/v1/chat/completions", body, bearer("ck-bob")).status, 200);
}

TEST(AdmissionTest, ARawPromptIsTextUnlessATrustedCallerSaysOtherwise) {
  Guarded guarded(format_key_line(line_of("ck-alice", "alice")) + "\n" +
                  format_key_line(line_of("ck-bob", "bob", {0, 0, true})));
  const auto ask = [&](const std::string& more, const char* key) {
    return http_call(guarded.port(), "POST", "/v1/completions",
                     R"({"prompt":"a<eos>b","max_tokens":1,"return_token_ids":true)" + more + "}",
                     bearer(key));
  };
  const char* const as_text = "\"prompt_token_ids\":[97,60,101,111,115,62,98]";
  for (const char* key : {"ck-alice", "ck-bob"}) {
    for (const char* more : {"", R"(,"allow_special_tokens":false)"})
      EXPECT_THAT(ask(more, key).body, HasSubstr(as_text));
  }
  const RawResponse r = ask(R"(,"allow_special_tokens":true)", "ck-alice");
  EXPECT_EQ(r.status, 403) << r.body;
  EXPECT_EQ(param_of(r), "allow_special_tokens");
  EXPECT_THAT(ask(R"(,"allow_special_tokens":true)", "ck-bob").body,
              HasSubstr("\"prompt_token_ids\":[97,256,98]"));

  // /tokenize shows what either would be.
  const auto tokens = [&](const std::string& more) {
    return http_call(guarded.port(), "POST", "/tokenize", R"({"prompt":"a<eos>b")" + more + "}",
                     bearer("ck-alice"))
        .body;
  };
  EXPECT_THAT(tokens(""), HasSubstr("\"count\":7"));
  EXPECT_THAT(tokens(R"(,"allow_special_tokens":true)"), HasSubstr("\"tokens\":[97,256,98]"));
}

TEST(AdmissionTest, EveryLimitHasAName) {
  std::set<std::string_view> names;
  for (size_t i = 0; i < static_cast<size_t>(gateway::Limit::kCount); ++i) {
    const std::string_view name = gateway::limit_name(static_cast<gateway::Limit>(i));
    EXPECT_FALSE(name.empty()) << i;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
}

}  // namespace
}  // namespace conclave::router
