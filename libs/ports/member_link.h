// A member's (worker's, shard's) line to the scheduler. The link owns reconnecting: on_up comes for each new
// scheduler connection that welcomed the member, on_down when it is lost.
#pragma once

#include "libs/base/status.h"
#include "libs/model/membership.h"

namespace conclave {

// Called on the member's executor.
class MemberHandler {
 public:
  virtual ~MemberHandler() = default;
  // Asked for at each connection attempt, since capacity and held state may have changed.
  virtual Hello hello() = 0;
  virtual void on_message(ToMember message) = 0;  // Welcome is delivered too
  virtual void on_down(const Status& cause) = 0;
};

class MemberLink {
 public:
  virtual ~MemberLink() = default;
  // From the member's executor. Dropped silently while the link is down: state is soft, a new connection
  // starts over.
  virtual void send(FromMember message) = 0;
};

}  // namespace conclave
