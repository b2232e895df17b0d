#include "bench/scheduler/wire.h"

#include <utility>

#include "libs/base/check.h"
#include "libs/rpc/convert.h"
#include "libs/rpc/session_wire.h"

namespace conclave::bench {
namespace {

namespace pb = ::conclave::v1;

template <class Message>
Message parse(std::string_view bytes) {
  Message message;
  CONCLAVE_CHECK(message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())));
  return message;
}

rpc::Allocate into(std::string& bytes) {
  return [&bytes](size_t size) {
    bytes.resize(size);
    return bytes.data();
  };
}

}  // namespace

FromMember decode_from_member(std::string_view bytes) {
  StatusOr<FromMember> converted = rpc::decode_from_member(bytes);
  CONCLAVE_CHECK(converted.ok());
  return *std::move(converted);
}

AcceptedRequest decode_submit(std::string_view bytes) {
  const auto message = parse<pb::GatewayUp>(bytes);
  StatusOr<AcceptedRequest> request = rpc::from_proto(message.submit());
  CONCLAVE_CHECK(request.ok());
  return *std::move(request);
}

void encode_to_member(const ToMember& message, std::string& bytes) { rpc::encode(message, into(bytes)); }

void encode_reply(RequestId request, const Status& status, std::string& bytes) {
  pb::GatewayDown out;
  rpc::to_proto(request, status, out.mutable_submit_reply());
  rpc::encode(out, into(bytes));
}

void TokenWriter::add(const TokenEvent& event) {
  if (held_.add(event)) {
    if (held_.full()) flush();
    return;
  }
  flush();
  pb::GatewayDown out;
  rpc::to_proto(event, out.mutable_tokens());
  std::string bytes;
  rpc::encode(out, into(bytes));
  written_ += bytes.size();
}

void TokenWriter::flush() {
  if (held_.empty()) return;
  std::string bytes;
  held_.flush(into(bytes));
  written_ += bytes.size();
}

void encode_from_member(const FromMember& message, std::string& bytes) {
  pb::MemberUp out;
  rpc::to_proto(message, &out);
  rpc::encode(out, into(bytes));
}

void encode_submit(const AcceptedRequest& request, std::string& bytes) {
  pb::GatewayUp out;
  rpc::to_proto(request, out.mutable_submit());
  rpc::encode(out, into(bytes));
}

ToMember decode_to_member(std::string_view bytes) {
  StatusOr<ToMember> converted = rpc::from_proto(parse<pb::MemberDown>(bytes));
  CONCLAVE_CHECK(converted.ok());
  return *std::move(converted);
}

}  // namespace conclave::bench
