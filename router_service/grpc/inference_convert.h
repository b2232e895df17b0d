// conclave.v1 <-> the gateway's types. What a client sent wrong is INVALID_ARGUMENT naming the field.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "conclave/v1/inference.pb.h"
#include "libs/base/status.h"
#include "router_service/gateway/gateway.h"

namespace conclave::router {

StatusOr<gateway::GenerateRequest> from_proto(const v1::GenerateRequest& in);
StatusOr<gateway::GenerateRequest> from_proto(const v1::ChatRequest& in);

// Bytes that are no such message: INVALID_ARGUMENT, where gRPC itself would answer UNIMPLEMENTED.
Status parse_message(const grpc::ByteBuffer& bytes, google::protobuf::Message* out);
grpc::ByteBuffer to_bytes(const google::protobuf::Message& message);

// Turns what a generation reports into one method's messages. Not thread-safe.
class AnswerSink {
 public:
  virtual ~AnswerSink() = default;
  // Before the log-probabilities of its tokens come.
  virtual void set_prompt(std::vector<TokenId> prompt) = 0;
  // Before the first of a stream's messages: they have numbers, the first `after` of them are left out, and,
  // `wrapped`, each is a ResumeChunk.
  virtual void number(uint64_t after, bool wrapped) = 0;
  // A stream: the messages for what came since the last call, the last with the usage when all has ended
  // well.
  virtual void chunks(gateway::Update update, std::deque<grpc::ByteBuffer>& out) = 0;
  // One message: what came, and at the end all of it.
  virtual void collect(gateway::Update update) = 0;
  virtual grpc::ByteBuffer whole() = 0;
};

struct SinkOptions {
  const gateway::TextCodec* text = nullptr;
  std::string model;
  bool logprobs = false;
};
// `id` is that of the generation.
std::unique_ptr<AnswerSink> make_generate_sink(SinkOptions options, RequestId id);
std::unique_ptr<AnswerSink> make_chat_sink(SinkOptions options, RequestId id);

// What another router needs to go on with a stream: the request without its input.
std::string stream_context(v1::GenerateRequest request);
std::string stream_context(v1::ChatRequest request);
struct ReopenedStream {
  gateway::GenerateRequest request;  // with a prompt that means nothing
  std::function<std::unique_ptr<AnswerSink>(SinkOptions, RequestId)> sink;
};
// FAILED_PRECONDITION for what this build cannot read, such as a stream of the HTTP interface.
StatusOr<ReopenedStream> reopen_stream(std::string_view context);

v1::ModelInfoResponse model_info(const gateway::Gateway& gateway);

}  // namespace conclave::router
