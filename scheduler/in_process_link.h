// The line between a member and a scheduler of the same process: messages cross as tasks of the receiver's
// executor. Private to scheduler/; members get one from SchedulerLoop::attach_member.
#pragma once

#include <functional>
#include <memory>

#include "libs/ports/executor.h"
#include "libs/ports/member_link.h"
#include "scheduler/loop.h"

namespace conclave::scheduler {

class InProcessLink : public MemberLink {
 public:
  // The scheduler's side; each may be called from any thread.
  struct Scheduler {
    std::function<SessionId(std::shared_ptr<MemberSession>)> connected;  // 0: the scheduler is gone
    std::function<void(SessionId, FromMember)> message;
    std::function<void(SessionId, const Status&)> closed;
  };

  InProcessLink(MemberHandler& handler, Executor& executor, Scheduler scheduler);
  ~InProcessLink() override;
  void send(FromMember message) override;

 private:
  class State;
  class Session;
  std::shared_ptr<State> state_;
};

}  // namespace conclave::scheduler
