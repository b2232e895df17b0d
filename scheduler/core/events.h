// What goes into the scheduler core and what comes out. Sessions are numbered by whoever drives the core
// (loop.h); a number is never used twice. Every message of a session arrives in order; nothing arrives after
// its *Lost event.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/model/membership.h"
#include "libs/model/request.h"
#include "scheduler/core/stall_hop.h"
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
// A gateway takes over a resumable request, whoever has it; answered by ReplyAdopt, then by its tokens from
// the first one on.
struct Adopt {
  SessionId gateway;
  RequestId request;
  std::string tenant;
};
// A gateway lets go of a resumable request of its own. `finished`: nothing more is to be generated.
struct Release {
  SessionId gateway;
  RequestId request;
  bool finished = false;
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

using Event = std::variant<MemberMessage, MemberLost, GatewayJoined, GatewayLost, Submit, Cancel, Adopt,
                           Release, DrainMember, Rebalance, Tick>;

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
  bool resumable = false;  // OK: its router_context is kept
};
struct ReplyAdopt {
  SessionId gateway;
  RequestId request;
  Status status;
  std::shared_ptr<const AdoptedRequest> adopted = nullptr;  // OK: never null
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

// A request has made no progress for `stalled`; said once for each hop it is stuck at.
struct ReportStall {
  RequestId request;
  StallHop hop;
  std::string detail;  // who it waits for, where that is known
  Nanos stalled = 0;
};

using Action = std::variant<SendMember, CloseMember, SendWelcome, CloseGateway, ReplySubmit, ReplyAdopt,
                            ReplyDrain, ReplyRebalance, Note, SendTokens, SendFleet, ReportStall>;
using Actions = std::vector<Action>;

}  // namespace conclave::scheduler
