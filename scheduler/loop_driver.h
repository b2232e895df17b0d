// The part of SchedulerLoop that lives on the executor. Private to scheduler/loop.cc.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "scheduler/loop.h"

namespace conclave::scheduler {

class SchedulerLoop::Driver : public std::enable_shared_from_this<Driver> {
 public:
  using Work = std::function<void(Driver&)>;

  Driver(SchedulerOptions options, Executor& executor, std::function<void(const ReportStall&)> on_stall);
  void start();
  void shut_down();

  // --- any thread
  // One drain is posted for any number of pieces of work, so the executor's queue holds at most one of ours.
  // Members bound what they send by the plans they hold, gateways' submissions by take_submission_place.
  void push(Work work);
  SessionId next_session();
  bool take_submission_place();
  void leave_submission_place() { inbox_submissions_.fetch_sub(1); }
  Status inbox_full() const {
    return resource_exhausted("the scheduler is behind: " + std::to_string(max_inbox_submissions_) +
                              " submissions are unread (max_inbox_submissions); try again later");
  }
  SessionId member_connected(std::shared_ptr<MemberSession> session, bool in_process = false);
  void on_member_message(SessionId session, FromMember message);
  void member_closed(SessionId session, Status cause);
  FleetInfo fleet() const {
    std::lock_guard lock(mutex_);
    return fleet_;
  }
  SchedulerMetrics metrics() const {
    std::lock_guard lock(mutex_);
    return metrics_;
  }

 private:
  friend class SchedulerLoop;

  // --- on the executor
  void drain();
  void finish_round();
  void on_timer();
  TimePoint now();
  void feed(Event event);
  void apply(Actions actions);
  void submit_local(AcceptedRequest request, std::shared_ptr<RequestObserver> observer);
  void adopt_local(RequestId id, std::string tenant, std::shared_ptr<RequestObserver> observer);
  void perform(SendMember& action);
  void perform(CloseMember& action);
  void perform(SendWelcome& action);
  void perform(CloseGateway& action);
  void perform(ReplySubmit& action);
  void perform(ReplyAdopt& action);
  void perform(ReplyDrain& action);
  void perform(ReplyRebalance& action);
  void perform(Note& action);
  void perform(SendTokens& action);
  void perform(SendFleet& action);
  void perform(ReportStall& action);

  const uint32_t max_inbox_submissions_;
  Executor& executor_;
  const std::function<void(const ReportStall&)> on_stall_;
  std::atomic<uint64_t> next_session_{1};
  std::atomic<uint32_t> inbox_submissions_{0};
  SessionId local_gateway_;  // set before anything is posted

  mutable std::mutex mutex_;
  std::deque<Work> inbox_;  // guarded by mutex_
  bool drain_posted_ = false;
  FleetInfo fleet_;
  SchedulerMetrics metrics_;

  // The executor only, from here on.
  SchedulerCore core_;
  TimePoint last_now_ = 0;
  TimerId timer_;
  TimePoint timer_at_ = kNever;
  std::unordered_map<SessionId, std::shared_ptr<MemberSession>> members_;
  // Members of this process. They cannot vanish without their link, and one busy with a long computation is
  // no less alive, so their leases are renewed here. True once they said hello.
  std::map<SessionId, bool> in_process_;
  std::unordered_map<SessionId, std::shared_ptr<GatewaySession>> gateways_;
  struct LocalRequest {
    std::shared_ptr<RequestObserver> observer;
    uint32_t running = 0;  // choices that have not ended
  };
  std::unordered_map<RequestId, LocalRequest> observers_;
  std::shared_ptr<RequestObserver> submitting_;
  uint32_t submitting_choices_ = 0;
  // Answered within the event itself.
  uint64_t next_ticket_ = 1;
  std::map<uint64_t, std::function<void(const Status&)>> drains_;
  std::map<uint64_t, std::function<void(const StatusOr<RebalanceSummary>&)>> rebalances_;
  std::function<void(const Note&)> on_note_;
};

}  // namespace conclave::scheduler
