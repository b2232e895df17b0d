// Streams over gRPC that break and go on elsewhere.
#include <gmock/gmock.h>

#include "router_service/grpc/inference_convert.h"
#include "tests/router/grpc_fixture.h"
#include "tests/router/replay_scheduler.h"

namespace conclave::router {
namespace {

using testing::byte_tokens;
using ::testing::HasSubstr;
using testing::ReplayScheduler;

struct GrpcRouter {
  explicit GrpcRouter(ReplayScheduler& scheduler)
      : gateway(gateway::GatewayOptions{}, testing::fake_model(), scheduler, text) {
    auto started = GrpcFront::start({}, gateway);
    EXPECT_TRUE(started.ok()) << started.status();
    front = std::move(started).value();
    stub = v1::Inference::NewStub(grpc::CreateChannel(front->address(), grpc::InsecureChannelCredentials()));
  }
  ~GrpcRouter() {
    gateway.begin_drain();
    gateway.abort_all(unavailable("the test is over"));
    front.reset();
  }

  testing::FakeText text;
  gateway::Gateway gateway;
  std::unique_ptr<GrpcFront> front;
  std::unique_ptr<v1::Inference::Stub> stub;
};

template <class Chunk>
struct Stream {
  std::vector<std::string> chunks;  // serialized
  std::string id;                   // of the initial metadata
  grpc::Status status;
};

template <class Chunk>
Stream<Chunk> read_all(grpc::ClientContext& context, grpc::ClientReader<Chunk>& reader) {
  Stream<Chunk> out;
  Chunk chunk;
  while (reader.Read(&chunk)) out.chunks.push_back(chunk.SerializeAsString());
  out.status = reader.Finish();
  const auto& initial = context.GetServerInitialMetadata();
  const auto at = initial.find("x-conclave-stream-id");
  if (at != initial.end()) out.id = std::string(at->second.data(), at->second.size());
  return out;
}

Stream<v1::ResumeChunk> resume(GrpcRouter& router, const std::string& id, uint64_t after) {
  grpc::ClientContext context;
  v1::ResumeRequest request;
  request.set_id(id);
  request.set_after(after);
  return read_all(context, *router.stub->Resume(&context, request));
}

v1::GenerateRequest words() {
  v1::GenerateRequest request;
  request.set_text("1");
  request.set_max_tokens(60);
  request.set_n(2);
  request.set_logprobs(true);
  request.add_stop("END");
  return request;
}

TEST(GrpcResume, ChunksBehindTheOnesThatAClientHas) {
  ReplayScheduler scheduler([](const AcceptedRequest&, uint32_t choice) {
    return byte_tokens(choice == 0 ? "one two three END four" : "a b c");
  });
  GrpcRouter first(scheduler), second(scheduler);
  grpc::ClientContext context;
  context.AddMetadata("x-conclave-resumable", "1");
  const auto whole = read_all(context, *first.stub->GenerateStream(&context, words()));
  ASSERT_TRUE(whole.status.ok()) << whole.status.error_message();
  ASSERT_EQ(whole.id.size(), 32u);
  ASSERT_GT(whole.chunks.size(), 10u);
  for (size_t after = 0; after <= whole.chunks.size(); ++after) {
    const auto rest = resume(after % 2 == 0 ? second : first, whole.id, after);
    ASSERT_TRUE(rest.status.ok()) << rest.status.error_message();
    ASSERT_EQ(rest.chunks.size(), whole.chunks.size() - after);
    for (size_t i = 0; i < rest.chunks.size(); ++i) {
      v1::ResumeChunk chunk;
      ASSERT_TRUE(chunk.ParseFromString(rest.chunks[i]));
      EXPECT_EQ(chunk.generate().event(), after + i + 1);
      EXPECT_EQ(chunk.generate().SerializeAsString(), whole.chunks[after + i]);
    }
  }
  EXPECT_EQ(resume(second, "0123456789abcdef0123456789abcdef", 0).status.error_code(),
            grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(resume(second, "", 0).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(scheduler.cancels(), 0u);
}

TEST(GrpcResume, ACancelledCallGoesOnAndAPlainOneIsForgotten) {
  ReplayScheduler scheduler(
      [](const AcceptedRequest&, uint32_t) { return byte_tokens("hm</think>\n\nso it goes on"); });
  GrpcRouter first(scheduler), second(scheduler);
  first.text.starts_in_reasoning = true;
  v1::ChatRequest chat;
  auto* message = chat.add_messages();
  message->set_role("user");
  message->set_content("hi");
  for (const bool resumable : {true, false}) {
    scheduler.open_to(4);
    grpc::ClientContext context;
    if (resumable) context.AddMetadata("x-conclave-resumable", "1");
    auto reader = first.stub->ChatStream(&context, chat);
    v1::ChatChunk chunk;
    ASSERT_TRUE(reader->Read(&chunk));
    EXPECT_EQ(chunk.event(), resumable ? 1u : 0u);
    const std::string id = chunk.id();
    context.TryCancel();
    while (reader->Read(&chunk)) {
    }
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
    ASSERT_TRUE(first.gateway.wait_idle(10 * kSecond));
    scheduler.open_to(~size_t{0});
    const auto rest = resume(second, id, 1);
    if (!resumable) {
      EXPECT_EQ(rest.status.error_code(), grpc::StatusCode::NOT_FOUND);
      EXPECT_EQ(scheduler.cancels(), 1u);
      break;
    }
    ASSERT_TRUE(rest.status.ok()) << rest.status.error_message();
    std::string content, reasoning, finish;
    for (const std::string& bytes : resume(second, id, 0).chunks) {
      v1::ResumeChunk all;
      ASSERT_TRUE(all.ParseFromString(bytes));
      content += all.chat().content();
      reasoning += all.chat().reasoning_content();
      finish += all.chat().finish_reason();
    }
    EXPECT_EQ(content, "so it goes on");
    EXPECT_EQ(reasoning, "hm");
    EXPECT_EQ(finish, "stop");
    EXPECT_EQ(scheduler.cancels(), 0u);
  }
}

TEST(GrpcResume, BadMetadataIsNamed) {
  ReplayScheduler scheduler([](const AcceptedRequest&, uint32_t) { return byte_tokens("x"); });
  GrpcRouter router(scheduler);
  grpc::ClientContext context;
  context.AddMetadata("x-conclave-resumable", "perhaps");
  const auto answer = read_all(context, *router.stub->GenerateStream(&context, words()));
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(answer.status.error_message(), HasSubstr("x-conclave-resumable"));
}

TEST(GrpcResume, ContextsAreReadByTheirOwnProtocolOnly) {
  const std::string generate = stream_context(words());
  EXPECT_THAT(generate, ::testing::Not(HasSubstr("\"1\"")));
  EXPECT_TRUE(reopen_stream(generate).ok());
  for (const std::string& bad :
       {std::string(), std::string("{\"v\":1}"), std::string("X"), "C" + generate.substr(1)}) {
    const auto read = reopen_stream(bad);
    if (bad.empty() || bad[0] != 'C') {
      EXPECT_EQ(read.status().code(), StatusCode::kFailedPrecondition) << bad;
    }
  }
}

}  // namespace
}  // namespace conclave::router
