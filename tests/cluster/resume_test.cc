// Two routers, real processes: streams whose router is killed, or whose connection breaks, go on where the
// client left off, and what it has in the end is the undisturbed stream.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>

#include "libs/base/id_text.h"
#include "tests/cluster/cluster.h"
#include "tests/cluster/completions.h"
#include "tests/router/raw_http.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;
using testing::http_call;
using testing::RawClient;
using testing::RawResponse;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

uint16_t port_of(const std::string& address) {
  return static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
}

// A router of the test's own beside the cluster's.
struct Router {
  Router(ProcessCluster& cluster, const std::string& name, const std::string& model)
      : ready(ClusterEnvironment::directory() + "/" + name + ".ready") {
    std::filesystem::remove(ready);
    process = Process::start("conclave-router",
                             {"--model", model, "--scheduler", cluster.scheduler_address(), "--http-listen",
                              "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0",
                              "--ops-listen", "127.0.0.1:0", "--ready-file", ready},
                             ClusterEnvironment::directory() + "/" + name + ".log");
    std::map<std::string, std::string> addresses;
    EXPECT_TRUE(eventually([&] { return !(addresses = read_ready_file(ready)).empty(); })) << process.log();
    if (addresses.empty()) return;
    http = port_of(addresses["http"]);
    ops = addresses["ops"];
    EXPECT_TRUE(eventually([&] {
      auto answer = http_get(ops, "/readyz");
      return answer.ok() && answer->code == 200;
    })) << process.log();
  }
  Process process;
  const std::string ready;
  uint16_t http = 0;
  std::string ops;
};

struct Kind {
  std::string path;
  std::string body;
};

// One of each API, long enough to be alive when its router dies.
std::vector<Kind> kinds() {
  const std::string chat = "/v1/chat/completions";
  const std::string completions = "/v1/completions";
  const std::string tools =
      R"("tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":)"
      R"({"city":{"type":"string"}}}}}])";
  const std::string count = R"("messages":[{"role":"user","content":"Count from 3 to 90."}])";
  return {
      {chat, "{" + count + R"(,"stream":true,"temperature":0,"max_tokens":300})"},
      {chat,
       "{" + count +
           R"(,"stream":true,"seed":5,"n":3,"max_tokens":150,"stream_options":{"include_usage":true}})"},
      {chat,
       R"({"messages":[{"role":"user","content":"What is the weather in Oslo?"}],"stream":true,"seed":3,)"
       R"("ignore_eos":true,"max_tokens":300,)" +
           tools + "}"},
      {chat,
       "{" + count + R"(,"stream":true,"temperature":0,"logprobs":true,"top_logprobs":2,"max_tokens":250})"},
      {chat, "{" + count + R"(,"stream":true,"temperature":0,"reasoning_format":"append","max_tokens":250})"},
      {completions, R"({"prompt":"3 4 5","stream":true,"temperature":0,"ignore_eos":true,"max_tokens":300})"},
      {completions,
       R"({"prompt":"3 4 5","stream":true,"seed":9,"n":2,"echo":true,"logprobs":2,"ignore_eos":true,)"
       R"("max_tokens":150})"},
      {completions,
       R"({"prompt":"88 89","stream":true,"seed":1,"stop":["1 1"],"return_token_ids":true,)"
       R"("stream_options":{"include_usage":true,"continuous_usage_stats":true},"ignore_eos":true,)"
       R"("max_tokens":300})"},
  };
}

// Without what differs between two requests of one body. What was cached is the cluster's business.
std::string comparable(const std::string& body) {
  static const std::regex kOwn(
      "cmpl-[0-9a-f]{32}|\"created\":[0-9]+|call_[0-9a-f]{24}|,\"prompt_tokens_details\":\\{[^}]*\\}");
  return std::regex_replace(body, kOwn, "*");
}

RawResponse resume(uint16_t port, const std::string& id, uint64_t after) {
  RawClient client(port);
  client.send_request("GET", "/v1/streams/" + id, "", "last-event-id: " + std::to_string(after) + "\r\n");
  return client.read_response(static_cast<int>(kStreamLimit / kMillisecond));
}

struct ResumeTest : ::testing::Test {
  static ClusterShape shape(std::vector<std::string> scheduler_arguments = {}) {
    ClusterShape out;
    out.model = demo_model();
    out.scheduler_arguments = std::move(scheduler_arguments);
    return out;
  }
  // Streams of every kind at one router, each with some events.
  struct Open {
    Kind kind;
    std::unique_ptr<RawClient> client;
    std::string id;
  };
  static std::vector<Open> open_all(uint16_t port) {
    std::vector<Open> out;
    for (const Kind& kind : kinds()) {
      out.push_back({kind, std::make_unique<RawClient>(port), ""});
      EXPECT_TRUE(out.back().client->send_request("POST", kind.path, kind.body, kResumable));
    }
    for (Open& open : out) {
      EXPECT_TRUE(open.client->wait_for("id: 8\n", static_cast<int>(kStreamLimit / kMillisecond)))
          << open.client->received();
      open.id = stream_id(open.client->received());
      EXPECT_EQ(open.id.size(), 32u);
    }
    return out;
  }
  static std::string undisturbed_stream(uint16_t port, const Kind& kind) {
    RawClient client(port);
    EXPECT_TRUE(client.send_request("POST", kind.path, kind.body, kResumable));
    return client.read_response(static_cast<int>(kStreamLimit / kMillisecond)).body;
  }
};

TEST_F(ResumeTest, StreamsOfAKilledRouterGoOnAtAnother) {
  ProcessCluster cluster(shape());
  ASSERT_TRUE(cluster.wait_ready());
  Router first(cluster, "first", demo_model());
  Router second(cluster, "second", demo_model());
  std::vector<Open> open = open_all(first.http);
  first.process.kill();
  std::vector<std::string> got;
  for (Open& one : open) {
    one.client->wait_closed();
    got.push_back(whole_events(one.client->received()));
    EXPECT_GE(last_id(got.back()), 8u);
  }
  for (size_t i = 0; i < open.size(); ++i) {
    const RawResponse rest = resume(second.http, open[i].id, last_id(got[i]));
    ASSERT_EQ(rest.status, 200) << rest.body;
    got[i] += rest.body;
    EXPECT_THAT(got[i], ::testing::EndsWith("data: [DONE]\n\n"));
    // The whole of it again is the same bytes.
    EXPECT_EQ(resume(second.http, open[i].id, 0).body, got[i]) << open[i].kind.body;
  }
  for (size_t i = 0; i < open.size(); ++i) {
    EXPECT_EQ(comparable(got[i]), comparable(undisturbed_stream(second.http, open[i].kind)))
        << open[i].kind.body;
  }
  EXPECT_GE(cluster.metric("scheduler", "conclave_scheduler_adopted_requests_total"), 16);
  EXPECT_EQ(cluster.metric("scheduler", "conclave_scheduler_running_requests"), 0);
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST_F(ResumeTest, ABrokenConnectionGoesOnAtTheSameRouter) {
  ProcessCluster cluster(shape());
  ASSERT_TRUE(cluster.wait_ready());
  Router router(cluster, "only", demo_model());
  std::vector<Open> open = open_all(router.http);
  for (Open& one : open) {
    const std::string before = whole_events(one.client->received());
    one.client->close();
    const RawResponse rest = resume(router.http, one.id, last_id(before));
    ASSERT_EQ(rest.status, 200) << rest.body;
    EXPECT_EQ(resume(router.http, one.id, 0).body, before + rest.body) << one.kind.body;
  }
  // A client that never asked for it is forgotten when it leaves.
  RawClient plain(router.http);
  ASSERT_TRUE(plain.send_request("POST", open[5].kind.path, open[5].kind.body));
  ASSERT_TRUE(plain.wait_for("data: "));
  plain.close();
  EXPECT_TRUE(
      eventually([&] { return cluster.metric("scheduler", "conclave_scheduler_running_requests") == 0; }));
}

TEST_F(ResumeTest, AfterTheGraceTimeAClearAnswer) {
  ProcessCluster cluster(shape({"--set", "scheduler.gateway_grace_ms=300"}));
  ASSERT_TRUE(cluster.wait_ready());
  Router router(cluster, "router", demo_model());
  RawClient client(router.http);
  const Kind kind = kinds()[5];
  ASSERT_TRUE(client.send_request("POST", kind.path, kind.body, kResumable));
  ASSERT_TRUE(client.wait_for("id: 8\n"));
  const std::string id = stream_id(client.received());
  client.close();
  ASSERT_TRUE(eventually([&] {
    return cluster.metric("scheduler", "conclave_scheduler_running_requests") == 0 &&
           cluster.metric("scheduler", "conclave_scheduler_detached_requests") == 0 &&
           cluster.metric("scheduler", "conclave_scheduler_resumable_requests") == 0;
  }));
  const RawResponse gone = resume(router.http, id, 3);
  EXPECT_EQ(gone.status, 404);
  EXPECT_THAT(gone.body, HasSubstr("gateway_grace_ms"));
  EXPECT_EQ(cluster.metric("scheduler", "conclave_scheduler_router_context_bytes"), 0);
}

TEST_F(ResumeTest, ASchedulerThatRestartsKeepsStreamsResumable) {
  ProcessCluster cluster(shape());
  ASSERT_TRUE(cluster.wait_ready());
  Router first(cluster, "first", demo_model());
  Router second(cluster, "second", demo_model());
  RawClient client(first.http);
  const Kind kind = kinds()[5];
  ASSERT_TRUE(client.send_request("POST", kind.path, kind.body, kResumable));
  ASSERT_TRUE(client.wait_for("id: 8\n"));
  cluster.scheduler.kill();
  cluster.start_scheduler();
  // The router has submitted it again, and its tokens come.
  const uint64_t had = last_id(whole_events(client.received()));
  ASSERT_TRUE(client.wait_for("id: " + std::to_string(had + 3) + "\n"));
  const std::string id = stream_id(client.received());
  first.process.kill();
  client.wait_closed();
  const std::string before = whole_events(client.received());
  // The other router may still be on its way back to the scheduler: 503, and clients ask again.
  RawResponse rest;
  ASSERT_TRUE(eventually([&] {
    rest = resume(second.http, id, last_id(before));
    return rest.status != 503;
  }));
  ASSERT_EQ(rest.status, 200) << rest.body;
  EXPECT_EQ(comparable(before + rest.body), comparable(undisturbed_stream(second.http, kind)));
}

}  // namespace
}  // namespace conclave
