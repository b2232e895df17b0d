#include "scheduler/in_process_link.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace conclave::scheduler {
namespace {
constexpr Nanos kFirstRetry = 20 * kMillisecond;
constexpr Nanos kLastRetry = 2 * kSecond;
}  // namespace

// Lives on the member's executor; only post() is called from elsewhere.
class InProcessLink::State : public std::enable_shared_from_this<State> {
 public:
  State(MemberHandler& handler, Executor& executor, Scheduler scheduler)
      : handler_(handler), executor_(executor), scheduler_(std::move(scheduler)) {}

  // Any thread. Dropped once the link is gone.
  void post(std::function<void(State&)> task) {
    std::lock_guard lock(mutex_);
    if (gone_) return;
    executor_.post([self = shared_from_this(), task = std::move(task)] {
      if (!self->gone_on_executor_) task(*self);
    });
  }

  void connect();
  void on_message(uint64_t connection, ToMember message) {
    if (connection != connection_ || !session_) return;
    if (std::holds_alternative<Welcome>(message)) retry_in_ = kFirstRetry;
    if (const auto* refusal = std::get_if<Refusal>(&message)) {
      if (refusal->code == StatusCode::kFailedPrecondition) refused_ = incarnation_;
    }
    handler_.on_message(std::move(message));
  }
  void on_close(uint64_t connection, const Status& cause) {
    if (connection != connection_ || !session_) return;
    session_ = {};
    handler_.on_down(cause);
    if (!gone_on_executor_) retry_later();
  }
  void send(FromMember message) {
    if (session_) scheduler_.message(session_, std::move(message));
  }
  void destroy() {
    {
      std::lock_guard lock(mutex_);
      gone_ = true;
    }
    gone_on_executor_ = true;
    if (retry_) executor_.cancel(retry_);
    if (session_) scheduler_.closed(session_, unavailable("the member's link was closed"));
  }

 private:
  void retry_later() {
    const TimePoint when = executor_.now() + retry_in_;
    retry_in_ = std::min(retry_in_ * 2, kLastRetry);
    retry_ = executor_.post_at(when, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (!self || self->gone_on_executor_) return;
      self->retry_ = {};
      self->connect();
    });
  }

  MemberHandler& handler_;
  Executor& executor_;
  const Scheduler scheduler_;
  std::mutex mutex_;
  bool gone_ = false;  // guarded by mutex_

  // The member's executor only, from here on.
  bool gone_on_executor_ = false;
  uint64_t connection_ = 0;  // counts connections: messages of an earlier one are dropped
  SessionId session_;        // none: down
  Incarnation incarnation_;
  Incarnation refused_;  // for ever: there is no use in trying it again
  Nanos retry_in_ = kFirstRetry;
  TimerId retry_;
};

class InProcessLink::Session : public MemberSession {
 public:
  Session(std::shared_ptr<State> state, uint64_t connection)
      : state_(std::move(state)), connection_(connection) {}
  void send(ToMember message) override {
    state_->post([connection = connection_, message = std::move(message)](State& state) mutable {
      state.on_message(connection, std::move(message));
    });
  }
  void close(const Status& cause) override {
    state_->post([connection = connection_, cause](State& state) { state.on_close(connection, cause); });
  }

 private:
  const std::shared_ptr<State> state_;
  const uint64_t connection_;
};

void InProcessLink::State::connect() {
  Hello hello = handler_.hello();
  if (refused_ && hello.incarnation == refused_) return retry_later();
  incarnation_ = hello.incarnation;
  session_ = scheduler_.connected(std::make_shared<Session>(shared_from_this(), ++connection_));
  if (!session_) return retry_later();
  scheduler_.message(session_, std::move(hello));
}

InProcessLink::InProcessLink(MemberHandler& handler, Executor& executor, Scheduler scheduler)
    : state_(std::make_shared<State>(handler, executor, std::move(scheduler))) {
  state_->post([](State& state) { state.connect(); });
}

InProcessLink::~InProcessLink() { state_->destroy(); }

void InProcessLink::send(FromMember message) { state_->send(std::move(message)); }

}  // namespace conclave::scheduler
