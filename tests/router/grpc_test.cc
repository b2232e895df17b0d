#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/router/grpc_fixture.h"

namespace conclave::router {
namespace {

using ::testing::HasSubstr;

class SlowGrpcTest : public GrpcTest {
 protected:
  SlowGrpcTest() : GrpcTest(std::chrono::milliseconds(2)) {}
};

TEST_F(GrpcTest, GeneratesFromTextAndFromTokenIds) {
  v1::GenerateRequest request;
  request.set_text("hello");
  v1::GenerateResponse response;
  ASSERT_TRUE(call(request, &response).ok());
  EXPECT_EQ(response.text(), "hello");
  EXPECT_EQ(response.finish_reason(), "stop");
  EXPECT_EQ(response.model(), "fake-m2");
  EXPECT_EQ(response.usage().prompt_tokens(), 5u);
  EXPECT_EQ(response.usage().completion_tokens(), 6u);
  EXPECT_EQ(response.token_ids_size(), 6);

  request.mutable_token_ids()->add_ids('a');
  request.mutable_token_ids()->add_ids('b');
  request.set_max_tokens(1);
  ASSERT_TRUE(call(request, &response).ok());
  EXPECT_EQ(response.text(), "a");
  EXPECT_EQ(response.finish_reason(), "length");
}

TEST_F(GrpcTest, StreamsTheSameAsItGenerates) {
  v1::GenerateRequest request;
  request.set_text("h\xc3\xa9llo, stream");
  grpc::ClientContext context;
  auto reader = stub->GenerateStream(&context, request);
  std::string all;
  std::string finish;
  int tokens = 0;
  v1::GenerateChunk chunk;
  while (reader->Read(&chunk)) {
    EXPECT_EQ(finish, "");
    all += chunk.text();
    tokens += chunk.token_ids_size();
    finish = chunk.finish_reason();
    EXPECT_EQ(chunk.has_usage(), !finish.empty());
  }
  ASSERT_TRUE(reader->Finish().ok());
  EXPECT_EQ(all, request.text());
  EXPECT_EQ(finish, "stop");
  EXPECT_EQ(tokens, static_cast<int>(request.text().size()) + 1);
  EXPECT_EQ(chunk.usage().completion_tokens(), static_cast<uint32_t>(tokens));
}

TEST_F(GrpcTest, BadInputIsInvalidArgumentWithTheField) {
  const auto refused = [&](const std::function<void(v1::GenerateRequest&)>& change) {
    v1::GenerateRequest request;
    request.set_text("hi");
    change(request);
    const grpc::Status status = call(request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(field + ": "));
    return field;
  };
  EXPECT_EQ(refused([](auto& r) { r.clear_text(); }), "input");
  EXPECT_EQ(refused([](auto& r) { r.set_text(""); }), "text");
  EXPECT_EQ(refused([](auto& r) { r.set_text(std::string(5000, 'x')); }), "text");
  EXPECT_EQ(refused([](auto& r) { r.mutable_token_ids(); }), "token_ids");
  EXPECT_EQ(refused([](auto& r) { r.mutable_token_ids()->add_ids(264); }), "token_ids");
  EXPECT_EQ(refused([](auto& r) { r.mutable_token_ids()->add_ids(0xffffffffu); }), "token_ids");
  EXPECT_EQ(refused([](auto& r) { r.set_max_tokens(-1); }), "max_tokens");
  EXPECT_EQ(refused([](auto& r) { r.set_max_tokens(0); }), "max_tokens");
  EXPECT_EQ(refused([](auto& r) { r.set_max_tokens(100000); }), "max_tokens");
  EXPECT_EQ(refused([](auto& r) { r.set_temperature(-1); }), "temperature");
  EXPECT_EQ(refused([](auto& r) { r.set_temperature(std::numeric_limits<float>::quiet_NaN()); }),
            "temperature");
  EXPECT_EQ(refused([](auto& r) { r.set_top_p(7); }), "top_p");
  EXPECT_EQ(refused([](auto& r) { r.set_top_k(0xffffffffu); }), "top_k");
  EXPECT_EQ(refused([](auto& r) { r.add_stop(""); }), "stop");
  EXPECT_EQ(scheduler.submitted(), 0u);
  v1::GenerateRequest request;
  request.set_text("hi");
  request.set_model("other");
  EXPECT_EQ(call(request).error_code(), grpc::StatusCode::NOT_FOUND);
  // Streams are refused alike.
  request.set_model("");
  request.set_max_tokens(-1);
  grpc::ClientContext context;
  auto reader = stub->GenerateStream(&context, request);
  v1::GenerateChunk chunk;
  EXPECT_FALSE(reader->Read(&chunk));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request.clear_max_tokens();
  EXPECT_TRUE(call(request).ok());
}

TEST_F(GrpcTest, NotReadyIsUnavailableWithTheReason) {
  scheduler.set_fleet({false, "no worker has joined", 0, "", ""});
  v1::GenerateRequest request;
  request.set_text("hi");
  const grpc::Status status = call(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("no worker has joined"));
}

TEST_F(SlowGrpcTest, ACancelledCallCancelsItsRequest) {
  v1::GenerateRequest request;
  request.set_text(std::string(2000, 'x'));
  {
    grpc::ClientContext context;
    auto reader = stub->GenerateStream(&context, request);
    v1::GenerateChunk chunk;
    ASSERT_TRUE(reader->Read(&chunk));
    context.TryCancel();
    while (reader->Read(&chunk)) {
    }
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_TRUE(scheduler.wait_cancelled(1));
  grpc::ClientContext context;
  std::thread waiting([&] {
    v1::GenerateResponse response;
    EXPECT_EQ(stub->Generate(&context, request, &response).error_code(), grpc::StatusCode::CANCELLED);
  });
  scheduler.wait_submitted(1);
  context.TryCancel();
  waiting.join();
  EXPECT_TRUE(scheduler.wait_cancelled(2));
  EXPECT_TRUE(gateway.wait_idle(5 * kSecond));
}

TEST_F(SlowGrpcTest, TheClientsDeadlineTravels) {
  v1::GenerateRequest request;
  request.set_text(std::string(2000, 'x'));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  v1::GenerateResponse response;
  std::thread waiting([&] {
    EXPECT_EQ(stub->Generate(&context, request, &response).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  });
  const AcceptedRequest accepted = scheduler.wait_submitted();
  EXPECT_GT(accepted.time_left, 0);
  EXPECT_LE(accepted.time_left, 400 * kMillisecond);  // gRPC rounds up
  waiting.join();
  EXPECT_TRUE(scheduler.wait_cancelled(1));
}

TEST_F(SlowGrpcTest, FailuresInTheMiddleEndTheStreamWithTheirStatus) {
  v1::GenerateRequest request;
  request.set_text(std::string(2000, 'x'));
  grpc::ClientContext context;
  auto reader = stub->GenerateStream(&context, request);
  v1::GenerateChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  gateway.abort_all(unavailable("the scheduler is gone"));
  while (reader->Read(&chunk)) {
  }
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(status.error_message(), "the scheduler is gone");
}

TEST_F(GrpcTest, ManyStreamsAtOnce) {
  constexpr int kThreads = 8;
  constexpr int kCalls = 25;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kCalls; ++i) {
        v1::GenerateRequest request;
        request.set_text("thread " + std::to_string(t) + " call " + std::to_string(i));
        grpc::ClientContext context;
        auto reader = stub->GenerateStream(&context, request);
        std::string all;
        v1::GenerateChunk chunk;
        while (reader->Read(&chunk)) all += chunk.text();
        EXPECT_TRUE(reader->Finish().ok());
        EXPECT_EQ(all, request.text());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(GrpcTest, ShutdownCancelsWhatIsLeft) {
  front->shutdown(0);
  v1::GenerateRequest request;
  request.set_text("hi");
  EXPECT_EQ(call(request).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST(GrpcListen, APortInUseIsOneLine) {
  FakeText text;
  FakeScheduler scheduler;
  gateway::Gateway gateway{gateway::GatewayOptions{}, testing::fake_model(), scheduler, text};
  auto first = GrpcFront::start({}, gateway);
  ASSERT_TRUE(first.ok());
  GrpcFrontOptions options;
  options.listen = (*first)->address();
  auto second = GrpcFront::start(options, gateway);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(message_of(second.status()), ::testing::Not(HasSubstr("\n")));
  EXPECT_THAT(message_of(second.status()), HasSubstr((*first)->address()));
}

// What health and reflection answer; their few messages are written by hand, since their generated code is
// not packaged.
std::string answer_of(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                      const std::string& message) {
  std::string answer;
  const grpc::Status status = generic_call(channel, method, message, &answer);
  EXPECT_TRUE(status.ok()) << method << ": " << status.error_message();
  return answer;
}

TEST_F(GrpcTest, HealthAndReflection) {
  const std::string service = "conclave.v1.Inference";
  const std::string named = std::string("\x0a") + static_cast<char>(service.size()) + service;
  EXPECT_EQ(answer_of(channel, "/grpc.health.v1.Health/Check", ""), "\x08\x01");  // SERVING
  EXPECT_EQ(answer_of(channel, "/grpc.health.v1.Health/Check", named), "\x08\x01");
  front->set_serving(false);
  EXPECT_EQ(answer_of(channel, "/grpc.health.v1.Health/Check", named), "\x08\x02");  // NOT_SERVING
  const std::string list("\x3a\x00", 2);                                             // list_services: ""
  EXPECT_THAT(answer_of(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", list),
              HasSubstr(service));
}

TEST_F(GrpcTest, ARefusalSaysWhenToTryAgain) {
  v1::GenerateRequest request;
  request.set_text("hello");
  const std::pair<Nanos, const char*> cases[] = {{0, ""}, {1, "1"}, {7300 * kMillisecond + 1, "7301"}};
  for (const auto& [wait, told] : cases) {
    scheduler.refuse_all(with_retry_after(resource_exhausted("the queue is full"), wait));
    grpc::ClientContext unary, streaming;
    v1::GenerateResponse response;
    v1::GenerateChunk chunk;
    EXPECT_EQ(stub->Generate(&unary, request, &response).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    const auto reader = stub->GenerateStream(&streaming, request);
    EXPECT_FALSE(reader->Read(&chunk));
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    for (const grpc::ClientContext* context : {&unary, &streaming}) {
      const auto& trailing = context->GetServerTrailingMetadata();
      const auto at = trailing.find("retry-after-ms");
      EXPECT_EQ(at == trailing.end() ? "" : std::string(at->second.data(), at->second.size()), told);
    }
  }
}

}  // namespace
}  // namespace conclave::router
