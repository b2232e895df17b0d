#include "scheduler/loop.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <utility>

#include "libs/base/check.h"
#include "scheduler/in_process_link.h"
#include "scheduler/loop_driver.h"

namespace conclave::scheduler {

// --- Driver: what happens on the executor
// -------------------------------------------------------------------------

SchedulerLoop::Driver::Driver(SchedulerOptions options, Executor& executor,
                              std::function<void(const ReportStall&)> on_stall)
    : max_inbox_submissions_(options.max_inbox_submissions),
      executor_(executor),
      on_stall_(std::move(on_stall)),
      core_(options) {
  metrics_ = core_.metrics();
  fleet_ = core_.fleet();
}

void SchedulerLoop::Driver::start() {
  local_gateway_ = next_session();
  push([session = local_gateway_](Driver& driver) {
    Hello hello;
    hello.role = Role::kRouter;
    hello.name = "local";
    driver.feed(GatewayJoined{session, std::move(hello)});
  });
}

SessionId SchedulerLoop::Driver::next_session() { return SessionId(next_session_.fetch_add(1)); }

void SchedulerLoop::Driver::push(Work work) {
  {
    std::lock_guard lock(mutex_);
    inbox_.push_back(std::move(work));
    if (drain_posted_) return;
    drain_posted_ = true;
  }
  executor_.post([weak = weak_from_this()] {
    if (auto self = weak.lock()) self->drain();
  });
}

bool SchedulerLoop::Driver::take_submission_place() {
  if (inbox_submissions_.fetch_add(1) < max_inbox_submissions_) return true;
  inbox_submissions_.fetch_sub(1);
  return false;
}

void SchedulerLoop::Driver::drain() {
  std::deque<Work> work;
  {
    std::lock_guard lock(mutex_);
    work.swap(inbox_);
    drain_posted_ = false;
  }
  // All that has happened first, then one round of planning: requests that came together share their first
  // step.
  for (Work& item : work) item(*this);
  finish_round();
}

void SchedulerLoop::Driver::finish_round() {
  apply(core_.plan(now()));
  // After the plans: a worker's next step is waited for longer than a token.
  for (const auto& [id, session] : gateways_) session->flush();
  const TimePoint next = core_.next_timer();
  if (next != timer_at_) {
    if (timer_) executor_.cancel(timer_);
    timer_ = {};
    timer_at_ = next;
    if (next != kNever) {
      timer_ = executor_.post_at(std::max(next, now()), [weak = weak_from_this()] {
        if (auto self = weak.lock()) self->on_timer();
      });
    }
  }
  const SchedulerMetrics metrics = core_.metrics();
  std::lock_guard lock(mutex_);
  metrics_ = metrics;
  fleet_ = fleet_.follow(core_.fleet(), now());
}

void SchedulerLoop::Driver::on_timer() {
  timer_ = {};
  timer_at_ = kNever;
  for (const auto& [session, joined] : std::map(in_process_)) {  // a copy: feeding may close sessions
    if (joined) feed(MemberMessage{session, Heartbeat{}});
  }
  feed(Tick{});
  finish_round();
}

TimePoint SchedulerLoop::Driver::now() {
  last_now_ = std::max(last_now_, executor_.now());
  return last_now_;
}

void SchedulerLoop::Driver::feed(Event event) { apply(core_.on_event(std::move(event), now())); }

void SchedulerLoop::Driver::apply(Actions actions) {
  for (Action& action : actions) std::visit([this](auto& a) { perform(a); }, action);
}

void SchedulerLoop::Driver::perform(SendMember& action) {
  const auto it = members_.find(action.session);
  if (it != members_.end()) it->second->send(std::move(action.message));
}

void SchedulerLoop::Driver::perform(CloseMember& action) {
  const auto it = members_.find(action.session);
  if (it == members_.end()) return;
  const auto session = std::move(it->second);
  members_.erase(it);
  in_process_.erase(action.session);
  session->close(action.cause);
}

void SchedulerLoop::Driver::perform(SendWelcome& action) {
  const auto it = gateways_.find(action.gateway);
  if (it != gateways_.end()) it->second->welcome(action.welcome);
}

void SchedulerLoop::Driver::perform(CloseGateway& action) {
  const auto it = gateways_.find(action.gateway);
  if (it == gateways_.end()) return;
  const auto session = std::move(it->second);
  gateways_.erase(it);
  session->close(action.cause);
}

void SchedulerLoop::Driver::perform(ReplySubmit& action) {
  if (action.gateway == local_gateway_) {
    // Answered within the event of the submission itself.
    const std::shared_ptr<RequestObserver> observer = std::exchange(submitting_, nullptr);
    CONCLAVE_CHECK(observer != nullptr);
    if (!action.status.ok()) return observer->on_refused(action.status);
    observers_[action.request] = {observer, submitting_choices_};
    if (action.resumable) observer->on_resumable();
    return observer->on_accepted();
  }
  const auto it = gateways_.find(action.gateway);
  if (it != gateways_.end()) it->second->reply(action.request, action.status, action.resumable);
}

void SchedulerLoop::Driver::perform(ReplyAdopt& action) {
  if (action.gateway == local_gateway_) {
    const std::shared_ptr<RequestObserver> observer = std::exchange(submitting_, nullptr);
    CONCLAVE_CHECK(observer != nullptr);
    if (!action.status.ok()) return observer->on_refused(action.status);
    observers_[action.request] = {observer, action.adopted->request.choices};
    return observer->on_adopted(*action.adopted);
  }
  const auto it = gateways_.find(action.gateway);
  if (it != gateways_.end()) it->second->reply_adopt(action.request, action.status, action.adopted.get());
}

void SchedulerLoop::Driver::perform(ReportStall& action) {
  if (on_stall_) on_stall_(action);
}

void SchedulerLoop::Driver::perform(ReplyDrain& action) {
  const auto done = drains_.extract(action.ticket);
  CONCLAVE_CHECK(!done.empty());
  done.mapped()(action.status);
}

void SchedulerLoop::Driver::perform(ReplyRebalance& action) {
  const auto done = rebalances_.extract(action.ticket);
  CONCLAVE_CHECK(!done.empty());
  done.mapped()(action.result);
}

void SchedulerLoop::Driver::perform(Note& action) {
  if (on_note_) on_note_(action);
}

void SchedulerLoop::Driver::perform(SendTokens& action) {
  if (action.gateway == local_gateway_) {
    const auto it = observers_.find(action.event.request);
    if (it == observers_.end()) return;
    const std::shared_ptr<RequestObserver> observer = it->second.observer;
    if (action.event.finish != FinishReason::kNone && --it->second.running == 0) observers_.erase(it);
    return observer->on_tokens(action.event);
  }
  const auto it = gateways_.find(action.gateway);
  if (it != gateways_.end()) it->second->tokens(action.event);
}

void SchedulerLoop::Driver::perform(SendFleet& action) {
  const auto it = gateways_.find(action.gateway);
  if (it != gateways_.end()) it->second->fleet(action.fleet);
}

void SchedulerLoop::Driver::submit_local(AcceptedRequest request, std::shared_ptr<RequestObserver> observer) {
  submitting_ = std::move(observer);
  submitting_choices_ = request.choices;
  for (const DeliveredChoice& choice : request.delivered) submitting_choices_ -= choice.ended;
  feed(Submit{local_gateway_, std::move(request)});
  CONCLAVE_CHECK(submitting_ == nullptr);
}

void SchedulerLoop::Driver::adopt_local(RequestId id, std::string tenant,
                                        std::shared_ptr<RequestObserver> observer) {
  submitting_ = std::move(observer);
  feed(Adopt{local_gateway_, id, std::move(tenant)});
  CONCLAVE_CHECK(submitting_ == nullptr);
}

// --- Driver: any thread
// -------------------------------------------------------------------------------------------

SessionId SchedulerLoop::Driver::member_connected(std::shared_ptr<MemberSession> session, bool in_process) {
  const SessionId id = next_session();
  push([id, in_process, session = std::move(session)](Driver& driver) {
    driver.members_.emplace(id, session);
    if (in_process) driver.in_process_.emplace(id, false);
  });
  return id;
}

void SchedulerLoop::Driver::on_member_message(SessionId session, FromMember message) {
  push([session, message = std::move(message)](Driver& driver) mutable {
    // After a close from this side the rest of the session's messages has no meaning.
    if (!driver.members_.contains(session)) return;
    driver.feed(MemberMessage{session, std::move(message)});
    if (const auto it = driver.in_process_.find(session); it != driver.in_process_.end()) it->second = true;
  });
}

void SchedulerLoop::Driver::member_closed(SessionId session, Status cause) {
  push([session, cause = std::move(cause)](Driver& driver) {
    driver.in_process_.erase(session);
    if (driver.members_.erase(session) > 0) driver.feed(MemberLost{session, cause});
  });
}

// --- SchedulerLoop
// ------------------------------------------------------------------------------------------------

SchedulerLoop::SchedulerLoop(SchedulerOptions options, Executor& executor,
                             std::function<void(const ReportStall&)> on_stall)
    : driver_(std::make_shared<Driver>(options, executor, std::move(on_stall))) {
  driver_->start();
}

SchedulerLoop::~SchedulerLoop() { driver_->shut_down(); }

void SchedulerLoop::Driver::shut_down() {
  if (timer_) executor_.cancel(timer_);
  timer_ = {};
  for (auto& [id, session] : std::exchange(members_, {})) session->close(unavailable("the scheduler ends"));
  for (auto& [id, session] : std::exchange(gateways_, {})) session->close(unavailable("the scheduler ends"));
  observers_.clear();
}

SessionId SchedulerLoop::member_connected(std::shared_ptr<MemberSession> session) {
  return driver_->member_connected(std::move(session));
}

void SchedulerLoop::on_member_message(SessionId session, FromMember message) {
  driver_->on_member_message(session, std::move(message));
}

void SchedulerLoop::member_closed(SessionId session, Status cause) {
  driver_->member_closed(session, std::move(cause));
}

SessionId SchedulerLoop::gateway_connected(std::shared_ptr<GatewaySession> session, Hello hello) {
  const SessionId id = driver_->next_session();
  driver_->push([id, session = std::move(session), hello = std::move(hello)](Driver& driver) {
    driver.gateways_.emplace(id, session);
    driver.feed(GatewayJoined{id, hello});
  });
  return id;
}

void SchedulerLoop::on_gateway_submit(SessionId session, AcceptedRequest request) {
  // What was accepted before is never shed, here as little as in the core.
  const bool counted = driver_->take_submission_place();
  if (!counted && !request.resubmitted) {
    driver_->push([session, id = request.id](Driver& driver) {
      const auto it = driver.gateways_.find(session);
      if (it != driver.gateways_.end()) it->second->reply(id, driver.inbox_full(), false);
    });
    return;
  }
  driver_->push([session, counted, request = std::move(request)](Driver& driver) mutable {
    if (counted) driver.leave_submission_place();
    if (driver.gateways_.contains(session)) driver.feed(Submit{session, std::move(request)});
  });
}

void SchedulerLoop::on_gateway_cancel(SessionId session, RequestId request, std::optional<uint32_t> choice) {
  driver_->push([session, request, choice](Driver& driver) {
    if (driver.gateways_.contains(session)) driver.feed(Cancel{session, request, choice});
  });
}

void SchedulerLoop::on_gateway_adopt(SessionId session, RequestId request, std::string tenant) {
  driver_->push([session, request, tenant = std::move(tenant)](Driver& driver) {
    if (driver.gateways_.contains(session)) driver.feed(Adopt{session, request, tenant});
  });
}

void SchedulerLoop::on_gateway_release(SessionId session, RequestId request, bool finished) {
  driver_->push([session, request, finished](Driver& driver) {
    if (driver.gateways_.contains(session)) driver.feed(Release{session, request, finished});
  });
}

void SchedulerLoop::gateway_closed(SessionId session, Status cause) {
  driver_->push([session, cause = std::move(cause)](Driver& driver) {
    if (driver.gateways_.erase(session) > 0) driver.feed(GatewayLost{session, cause});
  });
}

void SchedulerLoop::submit(AcceptedRequest request, std::shared_ptr<RequestObserver> observer) {
  CONCLAVE_CHECK(observer != nullptr);
  const bool counted = driver_->take_submission_place();
  if (!counted && !request.resubmitted) {
    driver_->push(
        [observer = std::move(observer)](Driver& driver) { observer->on_refused(driver.inbox_full()); });
    return;
  }
  driver_->push(
      [counted, request = std::move(request), observer = std::move(observer)](Driver& driver) mutable {
        if (counted) driver.leave_submission_place();
        driver.submit_local(std::move(request), std::move(observer));
      });
}

void SchedulerLoop::cancel(RequestId id) {
  driver_->push([id](Driver& driver) { driver.feed(Cancel{driver.local_gateway_, id, std::nullopt}); });
}

void SchedulerLoop::cancel_choice(RequestId id, uint32_t choice) {
  driver_->push([id, choice](Driver& driver) { driver.feed(Cancel{driver.local_gateway_, id, choice}); });
}

void SchedulerLoop::adopt(RequestId id, std::string tenant, std::shared_ptr<RequestObserver> observer) {
  CONCLAVE_CHECK(observer != nullptr);
  driver_->push([id, tenant = std::move(tenant), observer = std::move(observer)](Driver& driver) {
    driver.adopt_local(id, tenant, observer);
  });
}

void SchedulerLoop::release(RequestId id, const RequestObserver& observer, bool finished) {
  // Compared only: it may be gone by then, and nobody else can be at its place while the entry keeps it.
  driver_->push([id, observer = &observer, finished](Driver& driver) {
    const auto it = driver.observers_.find(id);
    if (it == driver.observers_.end() || it->second.observer.get() != observer) return;
    driver.observers_.erase(it);
    driver.feed(Release{driver.local_gateway_, id, finished});
  });
}

FleetInfo SchedulerLoop::fleet() const { return driver_->fleet(); }

std::unique_ptr<MemberLink> SchedulerLoop::attach_member(MemberHandler& handler, Executor& member_executor) {
  const std::weak_ptr<Driver> weak = driver_;
  InProcessLink::Scheduler scheduler;
  scheduler.connected = [weak](std::shared_ptr<MemberSession> session) {
    const auto driver = weak.lock();
    return driver ? driver->member_connected(std::move(session), true) : SessionId();
  };
  scheduler.message = [weak](SessionId session, FromMember message) {
    if (const auto driver = weak.lock()) driver->on_member_message(session, std::move(message));
  };
  scheduler.closed = [weak](SessionId session, const Status& cause) {
    if (const auto driver = weak.lock()) driver->member_closed(session, cause);
  };
  return std::make_unique<InProcessLink>(handler, member_executor, std::move(scheduler));
}

void SchedulerLoop::drain_member(Incarnation member, std::function<void(const Status&)> done) {
  driver_->push([member, done = std::move(done)](Driver& driver) {
    const uint64_t ticket = driver.next_ticket_++;
    driver.drains_.emplace(ticket, done);
    driver.feed(DrainMember{ticket, member});
  });
}

void SchedulerLoop::rebalance(bool dry_run, std::function<void(const StatusOr<RebalanceSummary>&)> done) {
  driver_->push([dry_run, done = std::move(done)](Driver& driver) {
    const uint64_t ticket = driver.next_ticket_++;
    driver.rebalances_.emplace(ticket, done);
    driver.feed(Rebalance{ticket, dry_run});
  });
}

void SchedulerLoop::experts(std::optional<uint32_t> layer,
                            std::function<void(const StatusOr<ExpertsSnapshot>&)> done) {
  driver_->push([layer, done = std::move(done)](Driver& driver) { done(driver.core_.experts(layer)); });
}

void SchedulerLoop::timeline(RequestId id, std::function<void(StatusOr<SchedulerTimeline>)> done) {
  driver_->push([id, done = std::move(done)](Driver& driver) { done(driver.core_.timeline(id)); });
}

void SchedulerLoop::set_on_note(std::function<void(const Note&)> f) {
  driver_->push([f = std::move(f)](Driver& driver) { driver.on_note_ = f; });
}

void SchedulerLoop::status(std::function<void(const StatusSnapshot&)> done) {
  driver_->push([done = std::move(done)](Driver& driver) {
    StatusSnapshot snapshot = driver.core_.status();
    snapshot.now = driver.now();
    snapshot.totals = driver.core_.metrics();
    done(snapshot);
  });
}

SchedulerMetrics SchedulerLoop::metrics() const { return driver_->metrics(); }

Status SchedulerLoop::audit() const { return driver_->core_.audit(); }

}  // namespace conclave::scheduler
