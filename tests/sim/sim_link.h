// A member's line to the scheduler between two simulated processes: ordered, with delays, heartbeats and
// reconnects, as the gRPC one behaves. What is under way when a process dies is lost with it.
#pragma once

#include <functional>
#include <memory>

#include "libs/ports/member_link.h"
#include "libs/runtime/sim_executor.h"
#include "scheduler/loop.h"

namespace conclave::scheduler {

class SimLink : public MemberLink {
 public:
  using Beat = std::function<Heartbeat()>;
  // All borrowed. Connects in a task of the member.
  SimLink(SimWorld& world, SchedulerLoop& loop, SimExecutor& scheduler, SimExecutor& member,
          MemberHandler& handler, Beat beat);
  ~SimLink() override;
  void send(FromMember message) override;
  // The session as the scheduler knows it; none while down.
  SessionId session() const;

 private:
  struct State;
  class Session;
  std::shared_ptr<State> state_;
};

}  // namespace conclave::scheduler
