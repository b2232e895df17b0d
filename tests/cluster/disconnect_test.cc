// Clients that leave, or do not read, over HTTP and gRPC: what they held in the cluster is free at once, and
// the others notice nothing.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "conclave/v1/inference.grpc.pb.h"
#include "tests/cluster/cluster.h"
#include "tests/cluster/completions.h"
#include "tests/router/raw_http.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;
using testing::RawClient;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

constexpr int kAttempts = 8;  // others use this machine too: the best of a few shows what the code does
constexpr Nanos kBound = 100 * kMillisecond;

struct DisconnectTest : ::testing::Test {
  void SetUp() override {
    cluster.start_router();
    ASSERT_TRUE(cluster.wait_ready());
    ASSERT_TRUE(cluster.wait_router_ready());
    scheduler_ops = cluster.ops("scheduler");
  }
  double gauge(const std::string& name) const {
    auto metrics = http_get(scheduler_ops, "/metrics");
    if (!metrics.ok()) return -1;
    const size_t at = metrics->body.find("\n" + name + " ");
    return at == std::string::npos ? -1 : std::atof(metrics->body.c_str() + at + name.size() + 2);
  }
  // Nothing runs, and no page is promised or given.
  bool all_free() const {
    return gauge("conclave_scheduler_running_requests") == 0 &&
           gauge("conclave_scheduler_kv_blocks{state=\"reserved\"}") == 0 &&
           gauge("conclave_scheduler_kv_blocks{state=\"used\"}") == 0;
  }
  uint16_t http_port() const {
    const std::string address = cluster.http_address();
    return static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  }

  // `begin` starts a long stream and returns once tokens come, with the time between two; `leave` ends it.
  // The shortest time from leaving until all is free, beyond one step.
  Nanos best_time(const std::function<Nanos()>& begin, const std::function<void()>& leave) {
    Nanos best = kNever;
    for (int i = 0; i < kAttempts && best > kBound; ++i) {
      const Nanos step = begin();
      EXPECT_GT(gauge("conclave_scheduler_kv_blocks{state=\"used\"}"), 0);
      const TimePoint left = steady_now();
      leave();
      EXPECT_TRUE(eventually([&] { return all_free(); }, 10 * kSecond));
      best = std::min(best, steady_now() - left - step);
    }
    return best;
  }

  ProcessCluster cluster;
  std::string scheduler_ops;
};

std::string long_body(uint32_t tokens) {
  return R"({"prompt":"hello","temperature":0,"ignore_eos":true,"stream":true,"max_tokens":)" +
         std::to_string(tokens) + "}";
}

TEST_F(DisconnectTest, AClosedHttpConnectionFreesItsPages) {
  std::unique_ptr<RawClient> client;
  const Nanos best = best_time(
      [&] {
        client = std::make_unique<RawClient>(http_port());
        client->send_request("POST", "/v1/completions", long_body(1500));
        EXPECT_TRUE(client->wait_for("data: "));
        const TimePoint from = steady_now();
        const size_t before = client->received().size();
        while (client->received().size() < before + 600 && steady_now() - from < 10 * kSecond)
          client->receive_some(100);
        return (steady_now() - from) / 3;
      },
      [&] { client->close(); });
  EXPECT_LT(best, kBound);
  RecordProperty("http_ms", std::to_string(best / kMillisecond));
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST_F(DisconnectTest, ACancelledGrpcCallFreesItsPages) {
  auto stub =
      v1::Inference::NewStub(grpc::CreateChannel(cluster.grpc_address(), grpc::InsecureChannelCredentials()));
  std::unique_ptr<grpc::ClientContext> context;
  std::unique_ptr<grpc::ClientReader<v1::GenerateChunk>> reader;
  const Nanos best = best_time(
      [&] {
        context = std::make_unique<grpc::ClientContext>();
        v1::GenerateRequest request;
        request.set_text("hello");
        request.set_max_tokens(1500);
        request.set_ignore_eos(true);
        reader = stub->GenerateStream(context.get(), request);
        v1::GenerateChunk chunk;
        EXPECT_TRUE(reader->Read(&chunk));
        const TimePoint from = steady_now();
        for (int i = 0; i < 3; ++i) EXPECT_TRUE(reader->Read(&chunk));
        return (steady_now() - from) / 3;
      },
      [&] { context->TryCancel(); });
  EXPECT_LT(best, kBound);
  RecordProperty("grpc_ms", std::to_string(best / kMillisecond));
  v1::GenerateChunk rest;
  while (reader->Read(&rest)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(DisconnectTest, DeadlinesAreHonouredEndToEnd) {
  const auto begun = steady_now();
  const auto answer = testing::http_call(http_port(), "POST", "/v1/completions",
                                         R"({"prompt":"hello","max_tokens":1900,"ignore_eos":true})",
                                         "x-request-timeout: 0.3\r\n");
  EXPECT_EQ(answer.status, 504) << answer.body;
  EXPECT_LT(steady_now() - begun, 10 * kSecond);
  EXPECT_TRUE(eventually([&] { return all_free(); }, 10 * kSecond));

  auto stub =
      v1::Inference::NewStub(grpc::CreateChannel(cluster.grpc_address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  v1::GenerateRequest request;
  request.set_text("hello");
  request.set_max_tokens(1900);
  request.set_ignore_eos(true);
  v1::GenerateResponse response;
  EXPECT_EQ(stub->Generate(&context, request, &response).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(eventually([&] { return all_free(); }, 10 * kSecond));
}

TEST_F(DisconnectTest, AClientThatDoesNotReadIsCutOffAndTheOthersNoticeNothing) {
  cluster.router.kill();
  cluster.start_router({"--set", "router.max_stream_events=64"});
  ASSERT_TRUE(eventually([&] {
    auto answer = http_get(cluster.ops("router"), "/readyz");
    return answer.ok() && answer->code == 200;
  })) << cluster.router.log();
  const uint32_t kTokens = 48;
  const std::string expected = complete(cluster.http_address(), 1, kTokens, true);
  ASSERT_THAT(expected, ::testing::Not(HasSubstr("failed: ")));
  // A small receive buffer: what the kernel holds for it is soon full.
  RawClient lazy(http_port(), 4096);
  lazy.send_request("POST", "/v1/completions",
                    R"({"prompt":"hello","temperature":0,"ignore_eos":true,"stream":true,"max_tokens":1900,)"
                    R"("return_token_ids":true,"logprobs":5})");
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop.load()) EXPECT_EQ(complete(cluster.http_address(), 1, kTokens, true), expected);
  });
  // Cut off, or done before it was too late for that: its pages are free either way, and only one is right
  // here.
  const bool cut = eventually(
      [&] {
        auto metrics = http_get(cluster.ops("router"), "/metrics");
        return metrics.ok() &&
               metrics->body.find("conclave_router_reached_limits_total{limit=\"max_stream_events\"} 1") !=
                   std::string::npos;
      },
      60 * kSecond);
  stop.store(true);
  other.join();
  EXPECT_TRUE(cut);
  // When it reads at last it finds out why.
  const auto answer = lazy.read_response(20000);
  EXPECT_NE(answer.body.find("reads too slowly"), std::string::npos) << answer.body.size() << " bytes";
  EXPECT_TRUE(eventually([&] { return all_free(); }, 10 * kSecond));
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

}  // namespace
}  // namespace conclave
