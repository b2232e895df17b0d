// One followed request through a whole little cluster: every hop is in its timeline, and the times add up.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>

#include "conclave/v1/inference.grpc.pb.h"
#include "tests/router/raw_http.h"
#include "tests/router/tiny_router.h"

namespace conclave::router {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;
using testing::http_call;
using ::testing::StartsWith;
using testing::TinyRouter;

constexpr char kTrace[] = "4bf92f3577b34da6a3ce929d0e0e4736";

std::string traceparent(const char* flags) {
  return "00-" + std::string(kTrace) + "-00f067aa0ba902b7-" + flags;
}

uint16_t port_of(const std::string& address) {
  return static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
}

class ServerTimeline : public ::testing::Test {
 protected:
  ServerTimeline() {
    RouterConfig config;
    config.access_log = false;
    config.trace_share = 0;
    auto started = TinyRouter::start(config);
    EXPECT_TRUE(started.ok()) << started.status();
    router = std::move(started).value();
    http = router->server->http_port();
    admin = port_of(router->server->admin_address());
  }
  double number(const json::value& v, const char* field) { return v.at(field).to_number<double>(); }

  std::unique_ptr<TinyRouter> router;
  uint16_t http = 0, admin = 0;
};

TEST_F(ServerTimeline, EveryHopOfAFollowedRequest) {
  const auto answer = http_call(
      http, "POST", "/v1/completions",
      R"({"prompt":"a prompt of some words","max_tokens":6,"temperature":0,"ignore_eos":true,"stream":true})",
      "x-request-id: followed-1\r\ntraceparent: " + traceparent("01") + "\r\n");
  ASSERT_EQ(answer.status, 200);
  const std::string back = answer.headers.at("traceparent");
  EXPECT_THAT(back, StartsWith(std::string("00-") + kTrace + "-"));
  EXPECT_EQ(back.substr(53), "01");
  EXPECT_NE(back.substr(36, 16), "00f067aa0ba902b7") << "our own span";

  for (const std::string& name : {std::string("followed-1"), std::string(kTrace)}) {
    const auto r = http_call(admin, "GET", "/debug/requests/" + name);
    ASSERT_EQ(r.status, 200) << r.body;
    const json::value v = json::parse(r.body);
    EXPECT_EQ(v.at("trace_id"), kTrace);
    EXPECT_EQ(v.at("outcome"), "length");
    EXPECT_EQ(number(v, "completion_tokens"), 6);
    EXPECT_THAT(r.body, ::testing::Not(HasSubstr("some words"))) << "never text";
    const json::array& tokens = v.at("router").at("tokens").as_array();
    ASSERT_EQ(tokens.size(), 6u);
    for (const json::value& token : tokens) EXPECT_TRUE(token.as_object().contains("taken_ms"));
    const json::value& scheduler = v.at("scheduler");
    const json::array& steps = scheduler.at("steps").as_array();
    ASSERT_GE(steps.size(), 6u);
    double positions = 0, before = 0;
    for (const json::value& step : steps) {
      positions += number(step, "count");
      EXPECT_GE(number(step, "planned_ms"), 0);
      EXPECT_GE(number(step, "reported_ms"), before);
      before = number(step, "reported_ms");
      const double wall = number(step, "wall_ms");
      EXPECT_GT(wall, 0);
      // Rounded to microseconds, each of them.
      EXPECT_LE(number(step, "planned_ms") + number(step, "queued_ms") + wall,
                number(step, "reported_ms") + 0.01);
      EXPECT_LE(number(step, "compute_ms") + number(step, "expert_wait_ms"), wall + 0.01);
      EXPECT_LE(number(step, "attention_ms") + number(step, "dispatch_ms") + number(step, "combine_ms") +
                    number(step, "sampling_ms"),
                number(step, "compute_ms") + 0.01);
      double rows = 0;
      for (const json::value& shard : step.at("shards").as_array()) {
        rows += number(shard, "rows");
        EXPECT_LE(number(shard, "outstanding_ms"), wall + 0.01);
        EXPECT_LE(number(shard, "slowest_ms"), number(shard, "outstanding_ms") + 0.01);
      }
      const auto& spec = router->cluster->spec();
      EXPECT_EQ(rows, number(step, "rows") * spec.experts_per_token * spec.num_layers);
    }
    EXPECT_EQ(positions, number(v, "prompt_tokens") + 5) << "the last token's position is never computed";
    EXPECT_LE(before, number(v, "total_ms") + number(scheduler, "offset_error_ms") + 0.01);
  }
  const auto chrome = http_call(admin, "GET", "/debug/requests/followed-1?format=chrome");
  ASSERT_EQ(chrome.status, 200);
  EXPECT_GT(json::parse(chrome.body).at("traceEvents").as_array().size(), 30u);
  const auto list = http_call(admin, "GET", "/debug/requests");
  EXPECT_EQ(json::parse(list.body).at("requests").as_array().size(), 1u);
  EXPECT_THAT(router->metrics.expose(), HasSubstr("conclave_router_followed_requests_total 1"));
}

TEST_F(ServerTimeline, OthersAreNotFollowed) {
  const char* body = R"({"prompt":"words","max_tokens":2,"temperature":0,"ignore_eos":true})";
  // Not sampled, not valid, or twice: then it counts as absent.
  for (const std::string& header :
       {std::string(), "traceparent: " + traceparent("00") + "\r\n",
        "traceparent: " + traceparent("0x") + "\r\n",
        "traceparent: " + traceparent("01") + "\r\ntraceparent: " + traceparent("01") + "\r\n"}) {
    const auto answer = http_call(http, "POST", "/v1/completions", body, header);
    ASSERT_EQ(answer.status, 200);
    EXPECT_EQ(answer.headers.at("traceparent").size(), 55u);
    EXPECT_EQ(answer.headers.at("traceparent").substr(53), "00");
    const bool kept = answer.headers.at("traceparent").find(kTrace) != std::string::npos;
    EXPECT_EQ(kept, header.find("-00\r\n") != std::string::npos) << header;
  }
  const auto list = http_call(admin, "GET", "/debug/requests");
  EXPECT_EQ(json::parse(list.body).at("requests").as_array().size(), 0u);
  EXPECT_EQ(http_call(admin, "GET", "/debug/requests/unknown").status, 404);
  EXPECT_EQ(http_call(admin, "GET", "/debug/requests/00000000000000010000000000000002").status, 404);
}

TEST_F(ServerTimeline, GrpcCallsCarryItInTheirMetadata) {
  const auto stub = v1::Inference::NewStub(
      grpc::CreateChannel(router->server->grpc_address(), grpc::InsecureChannelCredentials()));
  const auto call = [&](const std::vector<std::string>& parents) {
    grpc::ClientContext context;
    for (const std::string& parent : parents) context.AddMetadata("traceparent", parent);
    context.AddMetadata("x-request-id", "by-grpc");
    v1::GenerateRequest request;
    request.set_text("some words");
    request.set_max_tokens(3);
    v1::GenerateResponse response;
    const grpc::Status status = stub->Generate(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    const auto& metadata = context.GetServerInitialMetadata();
    const auto at = metadata.find("traceparent");
    return at == metadata.end() ? std::string() : std::string(at->second.data(), at->second.size());
  };
  EXPECT_THAT(call({}), StartsWith("00-"));
  EXPECT_EQ(call({traceparent("01"), traceparent("01")}).find(kTrace), std::string::npos);
  EXPECT_EQ(http_call(admin, "GET", "/debug/requests/by-grpc").status, 404);
  const std::string back = call({traceparent("01")});
  EXPECT_THAT(back, StartsWith(std::string("00-") + kTrace));
  const auto r = http_call(admin, "GET", "/debug/requests/by-grpc");
  ASSERT_EQ(r.status, 200);
  EXPECT_EQ(json::parse(r.body).at("route"), "Generate");
  EXPECT_GT(json::parse(r.body).at("scheduler").at("steps").as_array().size(), 0u);
}

}  // namespace
}  // namespace conclave::router
