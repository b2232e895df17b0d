// What goes into the scheduler core and what comes out. Sessions are numbered by whoever drives the core
// (loop.h); a number is never used twice. Every message of a session arrives in order; nothing arrives after
// its *Lost event.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/model/membership.h"
#include "libs/model/request.h"
#include "scheduler/core/status_snapshot.h"

namespace conclave::scheduler {

// One connection of a member or a gateway. 0 means "none".
using SessionId = StrongId<struct SessionTag, uint64_t>;

// --- in ---
struct MemberMessage {  // the first one of a session is its Hello
  SessionId session;
  FromMember message;
};
struct MemberLost {
  SessionId session;
  Status cause;
};
struct GatewayJoined {
  SessionId session;
  Hello hello;
};
struct GatewayLost {
  SessionId session;
  Status cause;
};
struct Submit {
  SessionId gateway;
  AcceptedRequest request;
};
struct Cancel {
  SessionId gateway;
  RequestId request;
  std::optional<uint32_t> choice = std::nullopt;  // none: all of them
};
// An operator wants what a member runs or holds to move elsewhere; answered by ReplyDrain with the same
// ticket.
struct DrainMember {
  uint64_t ticket = 0;
  Incarnation member;
};
// Answered by ReplyRebalance with the same ticket.
struct Rebalance {
  uint64_t ticket = 0;
  bool dry_run = false;
};
struct Tick {};  // time has passed

using Event = std::variant<MemberMessage, MemberLost, GatewayJoined, GatewayLost, Submit, Cancel, DrainMember,
                           Rebalance, Tick>;

// --- out ---
struct SendMember {
  SessionId session;
  ToMember message;
};
// The session is over; no MemberLost need follow, and one that does is ignored.
struct CloseMember {
  SessionId session;
  Status cause;
};
struct SendWelcome {
  SessionId gateway;
  Welcome welcome;
};
struct CloseGateway {
  SessionId gateway;
  Status cause;
};
struct ReplySubmit {  // OK: accepted
  SessionId gateway;
  RequestId request;
  Status status;
};
// OK: the member is draining, or drained already; status() tells when it is done.
struct ReplyDrain {
  uint64_t ticket = 0;
  Status status;
};
struct ReplyRebalance {
  uint64_t ticket = 0;
  StatusOr<RebalanceSummary> result;
};
// Something that belongs into the log.
struct Note {
  std::string event;
  std::string detail;
};
struct SendTokens {
  SessionId gateway;
  TokenEvent event;
};
struct SendFleet {
  SessionId gateway;
  FleetInfo fleet;
};

using Action = std::variant<SendMember, CloseMember, SendWelcome, CloseGateway, ReplySubmit, ReplyDrain,
                            ReplyRebalance, Note, SendTokens, SendFleet>;
using Actions = std::vector<Action>;

}  // namespace conclave::scheduler
