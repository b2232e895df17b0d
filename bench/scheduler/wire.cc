#include "bench/scheduler/wire.h"

#include <utility>

#include "libs/base/check.h"
#include "libs/rpc/convert.h"

namespace conclave::bench {
namespace {

namespace pb = ::conclave::v1;

template <class Message>
Message parse(std::string_view bytes) {
  Message message;
  CONCLAVE_CHECK(message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())));
  return message;
}

template <class Message>
void serialize(Message&& message, std::string& bytes) {
  bytes.resize(message.ByteSizeLong());
  const Message queued = std::move(message);
  CONCLAVE_CHECK(queued.SerializeToArray(bytes.data(), static_cast<int>(bytes.size())));
}

}  // namespace

FromMember decode_from_member(std::string_view bytes) {
  StatusOr<FromMember> converted = rpc::from_proto(parse<pb::MemberUp>(bytes));
  CONCLAVE_CHECK(converted.ok());
  return *std::move(converted);
}

AcceptedRequest decode_submit(std::string_view bytes) {
  const auto message = parse<pb::GatewayUp>(bytes);
  StatusOr<AcceptedRequest> request = rpc::from_proto(message.submit());
  CONCLAVE_CHECK(request.ok());
  return *std::move(request);
}

void encode_to_member(const ToMember& message, std::string& bytes) {
  pb::MemberDown out;
  rpc::to_proto(message, &out);
  serialize(std::move(out), bytes);
}

void encode_reply(RequestId request, const Status& status, std::string& bytes) {
  pb::GatewayDown out;
  rpc::to_proto(request, status, out.mutable_submit_reply());
  serialize(std::move(out), bytes);
}

struct TokenWriter::Held {
  pb::GatewayDown message;
};

TokenWriter::TokenWriter() : held_(std::make_unique<Held>()) {}
TokenWriter::~TokenWriter() = default;

void TokenWriter::add(const TokenEvent& event) {
  if (rpc::append(event, held_->message.mutable_token_batch())) {
    if (held_->message.token_batch().token_size() >= 1024) flush();
    return;
  }
  flush();
  pb::GatewayDown out;
  rpc::to_proto(event, out.mutable_tokens());
  serialize(std::move(out), bytes_);
  written_ += bytes_.size();
}

void TokenWriter::flush() {
  if (held_->message.token_batch().token_size() == 0) return;
  serialize(std::exchange(held_->message, pb::GatewayDown()), bytes_);
  written_ += bytes_.size();
}

void encode_from_member(const FromMember& message, std::string& bytes) {
  pb::MemberUp out;
  rpc::to_proto(message, &out);
  serialize(std::move(out), bytes);
}

void encode_submit(const AcceptedRequest& request, std::string& bytes) {
  pb::GatewayUp out;
  rpc::to_proto(request, out.mutable_submit());
  serialize(std::move(out), bytes);
}

ToMember decode_to_member(std::string_view bytes) {
  StatusOr<ToMember> converted = rpc::from_proto(parse<pb::MemberDown>(bytes));
  CONCLAVE_CHECK(converted.ok());
  return *std::move(converted);
}

}  // namespace conclave::bench
