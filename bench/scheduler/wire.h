// Messages as bytes, made and read exactly as the scheduler's gRPC adapter does it
// (scheduler/grpc_server.cc): a message of its own for each action, its bytes made when it is queued. gRPC's
// own work is left out. CHECKs where the adapter would close the session: benches send nothing wrong.
#pragma once

#include <string>
#include <string_view>

#include "libs/model/membership.h"
#include "libs/model/request.h"
#include "libs/rpc/session_wire.h"
#include "scheduler/core/events.h"

namespace conclave::bench {

// --- the scheduler's side
FromMember decode_from_member(std::string_view bytes);
AcceptedRequest decode_submit(std::string_view bytes);
void encode_to_member(const ToMember& message, std::string& bytes);
void encode_reply(RequestId request, const Status& status, std::string& bytes);
// Token events of one round, in as many messages as the adapter makes of them.
class TokenWriter {
 public:
  void add(const TokenEvent& event);
  void flush();
  uint64_t bytes_written() const { return written_; }

 private:
  rpc::TokenBatch held_;
  uint64_t written_ = 0;
};

// --- the peers' side
void encode_from_member(const FromMember& message, std::string& bytes);
void encode_submit(const AcceptedRequest& request, std::string& bytes);
ToMember decode_to_member(std::string_view bytes);

}  // namespace conclave::bench
