// The scheduler's side of its sessions, as bytes. What every step brings - plans, results, tokens - is
// written and read here directly: a protobuf message of two tokens costs more in objects than in bytes. The
// bytes are those of conclave/v1/cluster.proto all the same, bit for bit what protobuf writes, and anything
// but the plainest form goes through the protobuf messages of convert.h, which also word every refusal.
// Nothing here keeps memory but TokenBatch.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <vector>

#include "libs/base/status.h"
#include "libs/model/membership.h"
#include "libs/model/request.h"
#include "libs/ports/scheduler_port.h"

namespace google::protobuf {
class MessageLite;
}

namespace conclave::rpc {

// Called once by each encode(), with the exact length; returns where that many bytes are written.
using Allocate = std::function<char*(size_t bytes)>;

// As a conclave.v1.MemberDown.
void encode(const ToMember& message, const Allocate& allocate);
// Any other message.
void encode(const google::protobuf::MessageLite& message, const Allocate& allocate);

// From a conclave.v1.MemberUp. The error names the field.
StatusOr<FromMember> decode_from_member(std::string_view bytes);

// Token events that share one message to a gateway. Not thread-safe.
class TokenBatch {
 public:
  // A long round does not hold its first tokens back to its end; also bounds the memory.
  static constexpr size_t kMaxTokens = 1024;

  // False, and nothing is added, when the event is more than one token with or without an end. Not when full.
  bool add(const TokenEvent& event);
  bool empty() const { return rows_.empty(); }
  bool full() const { return rows_.size() >= kMaxTokens; }
  // As a conclave.v1.GatewayDown with a token_batch; the batch is empty after it.
  void flush(const Allocate& allocate);

 private:
  struct Row {
    RequestId request;
    uint32_t choice = 0;
    uint32_t index = 0;
    TokenId token = 0;
    FinishReason finish = FinishReason::kNone;
  };
  std::vector<Row> rows_;
};

}  // namespace conclave::rpc
