#include "tests/sim/sim_link.h"

#include <algorithm>
#include <deque>
#include <utility>

namespace conclave::scheduler {
namespace {
constexpr Nanos kMaxDelay = kMillisecond;
constexpr Nanos kBeat = 100 * kMillisecond;
constexpr Nanos kReconnect = 50 * kMillisecond;
}  // namespace

struct SimLink::State : std::enable_shared_from_this<State> {
  State(SimWorld& w, SchedulerLoop& l, SimExecutor& s, SimExecutor& m, MemberHandler& h, Beat b)
      : world(w), loop(l), scheduler(s), member(m), handler(h), beat(std::move(b)) {}

  // Messages wait in `queue`; each timer delivers the front one, so a stopped process keeps their order.
  template <class T, class F>
  void carry(std::deque<T>& queue, SimExecutor& sender, T item, F deliver) {
    queue.push_back(std::move(item));
    const Nanos delay = static_cast<Nanos>(world.random().below(kMaxDelay) + 1);
    sender.post_at(world.now() + delay, [self = shared_from_this(), &queue, deliver] {
      if (queue.empty()) return;
      T front = std::move(queue.front());
      queue.pop_front();
      deliver(*self, std::move(front));
    });
  }

  void send_up(FromMember message) {
    if (!alive || !session) return;
    carry(up, member, std::pair(session, std::move(message)),
          [](State& s, std::pair<SessionId, FromMember> item) {
            s.loop.on_member_message(item.first, std::move(item.second));
          });
  }
  void connect();
  void heartbeat(SessionId of) {
    if (!alive || session != of) return;
    send_up(beat());
    member.post_at(world.now() + kBeat, [self = shared_from_this(), of] { self->heartbeat(of); });
  }
  void on_message(uint64_t connection, ToMember message) {
    if (alive && connection == connections && session) handler.on_message(std::move(message));
  }
  void on_close(uint64_t connection, const Status& cause) {
    if (!alive || connection != connections || !session) return;
    session = {};
    handler.on_down(cause);
    member.post_at(world.now() + kReconnect, [self = shared_from_this()] { self->connect(); });
  }

  SimWorld& world;
  SchedulerLoop& loop;
  SimExecutor& scheduler;
  SimExecutor& member;
  MemberHandler& handler;
  const Beat beat;
  bool alive = true;
  uint64_t connections = 0;
  SessionId session;
  std::deque<std::pair<SessionId, FromMember>> up;
  std::deque<std::function<void()>> down;
};

class SimLink::Session : public MemberSession {
 public:
  Session(std::shared_ptr<State> state, uint64_t connection)
      : state_(std::move(state)), connection_(connection) {}
  void send(ToMember message) override {
    post([connection = connection_, message = std::move(message)](State& s) mutable {
      s.on_message(connection, std::move(message));
    });
  }
  void close(const Status& cause) override {
    post([connection = connection_, cause](State& s) { s.on_close(connection, cause); });
  }

 private:
  void post(std::function<void(State&)> act) {
    const auto state = state_;
    if (!state->alive) return;
    state_->carry(state_->down, state_->scheduler,
                  std::function<void()>([state, act = std::move(act)] { act(*state); }),
                  [](State& s, std::function<void()> deliver) { s.member.post(std::move(deliver)); });
  }
  const std::shared_ptr<State> state_;
  const uint64_t connection_;
};

void SimLink::State::connect() {
  if (!alive || session) return;
  session = loop.member_connected(std::make_shared<Session>(shared_from_this(), ++connections));
  send_up(handler.hello());
  heartbeat(session);
}

SimLink::SimLink(SimWorld& world, SchedulerLoop& loop, SimExecutor& scheduler, SimExecutor& member,
                 MemberHandler& handler, Beat beat)
    : state_(std::make_shared<State>(world, loop, scheduler, member, handler, std::move(beat))) {
  member.post([state = state_] { state->connect(); });
}

SimLink::~SimLink() {
  state_->alive = false;
  state_->up.clear();
  state_->down.clear();  // the members' side of a cycle: what is queued holds the state
}

void SimLink::send(FromMember message) { state_->send_up(std::move(message)); }

SessionId SimLink::session() const { return state_->session; }

}  // namespace conclave::scheduler
