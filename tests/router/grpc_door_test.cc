// Keys, rate limits and request ids as gRPC clients see them.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "conclave/v1/inference.grpc.pb.h"
#include "router_service/grpc/grpc_front.h"
#include "tests/router/fake_scheduler.h"
#include "tests/router/fake_text.h"
#include "tests/router/key_dir.h"

namespace conclave::router {
namespace {

using ::testing::HasSubstr;
using testing::KeyDir;
using testing::line_of;

class GrpcDoorTest : public ::testing::Test {
 protected:
  GrpcDoorTest() : scheduler([](const AcceptedRequest& r) { return r.prompt; }) {
    keys.write(format_key_line(line_of("ck-alice", "alice")) + "\n" +
               format_key_line(line_of("ck-bob", "bob", {1, 0, false})));
    door::FrontDoorOptions options;
    options.keys_file = keys.path();
    options.on_end = [this](const door::AccessLine& line) {
      std::lock_guard lock(mutex);
      lines.push_back(std::string(line.request_id) + " " + std::string(line.tenant) + " " +
                      std::string(line.route) + " " + std::to_string(line.status) + " " +
                      std::string(line.outcome));
    };
    auto opened = door::FrontDoor::open(std::move(options));
    EXPECT_TRUE(opened.ok()) << opened.status();
    door = std::move(opened).value();
    GrpcFrontOptions front_options;
    front_options.door = door.get();
    auto started = GrpcFront::start(front_options, *gateway);
    EXPECT_TRUE(started.ok()) << started.status();
    front = std::move(started).value();
    stub = v1::Inference::NewStub(grpc::CreateChannel(front->address(), grpc::InsecureChannelCredentials()));
  }
  ~GrpcDoorTest() override {
    gateway->begin_drain();
    gateway->abort_all(unavailable("the test is over"));
    front.reset();
    gateway.reset();
  }

  // "": no key. Streams when asked to.
  grpc::Status call(const std::string& authorization, const std::string& id = "", bool stream = false) {
    grpc::ClientContext context;
    if (!authorization.empty()) context.AddMetadata("authorization", authorization);
    if (!id.empty()) context.AddMetadata("x-request-id", id);
    v1::GenerateRequest request;
    request.set_text("hello");
    grpc::Status status;
    if (stream) {
      auto reader = stub->GenerateStream(&context, request);
      v1::GenerateChunk chunk;
      while (reader->Read(&chunk)) {
      }
      status = reader->Finish();
    } else {
      v1::GenerateResponse response;
      status = stub->Generate(&context, request, &response);
    }
    const auto find = [](const auto& metadata, const char* name) {
      const auto at = metadata.find(name);
      return at == metadata.end() ? std::string() : std::string(at->second.data(), at->second.size());
    };
    request_id = find(context.GetServerInitialMetadata(), "x-request-id");
    if (request_id.empty()) request_id = find(context.GetServerTrailingMetadata(), "x-request-id");
    retry_after = find(context.GetServerTrailingMetadata(), "retry-after");
    remaining = find(context.GetServerTrailingMetadata(), "x-ratelimit-remaining-requests");
    code = find(context.GetServerTrailingMetadata(), "conclave-code");
    return status;
  }

  KeyDir keys;
  std::mutex mutex;
  std::vector<std::string> lines;  // guarded by mutex
  testing::FakeText text;
  testing::FakeScheduler scheduler;
  std::unique_ptr<door::FrontDoor> door;
  std::unique_ptr<gateway::Gateway> gateway =
      std::make_unique<gateway::Gateway>(gateway::GatewayOptions{}, testing::fake_model(), scheduler, text);
  std::unique_ptr<GrpcFront> front;
  std::unique_ptr<v1::Inference::Stub> stub;
  std::string request_id, retry_after, remaining, code;  // of the last call
};

TEST_F(GrpcDoorTest, CallsNeedAKey) {
  for (const bool stream : {false, true}) {
    for (const char* wrong : {"", "Bearer ck-mallory", "ck-alice"}) {
      const grpc::Status status = call(wrong, "", stream);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << wrong;
      EXPECT_EQ(code, "invalid_api_key");
    }
    EXPECT_TRUE(call("Bearer ck-alice", "", stream).ok());
  }
  EXPECT_EQ(scheduler.submitted(), 2u);
}

TEST_F(GrpcDoorTest, RateLimits) {
  EXPECT_TRUE(call("Bearer ck-bob").ok());
  EXPECT_EQ(remaining, "0");
  const grpc::Status status = call("Bearer ck-bob");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(code, "rate_limit_exceeded");
  EXPECT_FALSE(retry_after.empty());
  EXPECT_TRUE(call("Bearer ck-alice").ok());
}

TEST_F(GrpcDoorTest, RequestIdsComeBackAndEveryCallIsALine) {
  EXPECT_TRUE(call("Bearer ck-alice", "mine-1").ok());
  EXPECT_EQ(request_id, "mine-1");
  EXPECT_TRUE(call("Bearer ck-alice", std::string(200, 'a'), true).ok());
  EXPECT_EQ(request_id.size(), 32u);
  call("", "stranger");
  EXPECT_EQ(request_id, "stranger");
  for (int i = 0; i < 2000; ++i) {
    std::lock_guard lock(mutex);
    if (lines.size() >= 3) break;
  }
  front->shutdown(kSecond);
  std::lock_guard lock(mutex);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_THAT(lines, ::testing::Contains("mine-1 alice Generate 0 stop"));
  EXPECT_THAT(lines, ::testing::Contains(HasSubstr(" alice GenerateStream 0 stop")));
  EXPECT_THAT(lines, ::testing::Contains("stranger  Generate 16 "));
}

}  // namespace
}  // namespace conclave::router
