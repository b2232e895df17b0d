#include "tests/sim/sim_link.h"

#include <algorithm>
#include <utility>

namespace conclave::scheduler {
namespace {
constexpr Nanos kMaxDelay = kMillisecond;
constexpr Nanos kBeat = 100 * kMillisecond;
constexpr Nanos kReconnect = 50 * kMillisecond;
constexpr Nanos kTryAgain = 100 * kMillisecond;
}  // namespace

void SimPipe::carry(SimExecutor& sender, std::function<void()> deliver) {
  queue_.push_back(std::move(deliver));
  const Nanos delay = static_cast<Nanos>(world_.random().below(kMaxDelay) + 1);
  sender.post_at(std::max(world_.now(), blocked_until_) + delay, [self = shared_from_this()] {
    if (self->queue_.empty()) return;
    const std::function<void()> front = std::move(self->queue_.front());
    self->queue_.pop_front();
    front();
  });
}

// --- SimLink
// --------------------------------------------------------------------------------------------------------

struct SimLink::State : std::enable_shared_from_this<State> {
  State(SimWorld& w, SchedulerPlace& p, SimExecutor& m, MemberHandler& h, Beat b)
      : world(w), place(p), member(m), handler(h), beat(std::move(b)) {}

  void send_up(FromMember message) {
    if (!alive || !session) return;
    up->carry(member,
              [this, self = shared_from_this(), connection = connections, message = std::move(message)] {
                if (place.loop != nullptr && place.life == life && connection == connections && session) {
                  place.loop->on_member_message(session, message);
                }
              });
  }
  void connect();
  void heartbeat(uint64_t connection) {
    if (!alive || connection != connections || !session) return;
    send_up(beat());
    member.post_at(world.now() + kBeat,
                   [self = shared_from_this(), connection] { self->heartbeat(connection); });
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
  SchedulerPlace& place;
  SimExecutor& member;
  MemberHandler& handler;
  const Beat beat;
  const Incarnation incarnation = handler.hello().incarnation;
  bool alive = true;
  uint64_t connections = 0;
  uint64_t life = 0;  // the scheduler's of the connection
  SessionId session;
  std::shared_ptr<SimPipe> up = std::make_shared<SimPipe>(world);
  std::shared_ptr<SimPipe> down = std::make_shared<SimPipe>(world);
};

class SimLink::Session : public MemberSession {
 public:
  Session(std::shared_ptr<State> state, uint64_t connection)
      : state_(std::move(state)), connection_(connection) {}
  void send(ToMember message) override {
    post([connection = connection_, message = std::move(message)](State& s) {
      s.on_message(connection, message);
    });
  }
  void close(const Status& cause) override {
    if (state_->alive && state_->place.on_closed) state_->place.on_closed(state_->incarnation, cause);
    post([connection = connection_, cause](State& s) { s.on_close(connection, cause); });
  }

 private:
  void post(std::function<void(State&)> act) {
    if (!state_->alive) return;
    state_->down->carry(*state_->place.process, [state = state_, act = std::move(act)] {
      state->member.post([state, act] { act(*state); });
    });
  }
  const std::shared_ptr<State> state_;
  const uint64_t connection_;
};

void SimLink::State::connect() {
  if (!alive || session) return;
  if (place.loop == nullptr) {
    member.post_at(world.now() + kReconnect, [self = shared_from_this()] { self->connect(); });
    return;
  }
  life = place.life;
  session = place.loop->member_connected(std::make_shared<Session>(shared_from_this(), ++connections));
  send_up(handler.hello());
  heartbeat(connections);
}

SimLink::SimLink(SimWorld& world, SchedulerPlace& place, SimExecutor& member, MemberHandler& handler,
                 Beat beat)
    : state_(std::make_shared<State>(world, place, member, handler, std::move(beat))) {
  member.post([state = state_] { state->connect(); });
}

SimLink::~SimLink() {
  state_->alive = false;
  state_->up->clear();  // what is queued holds the state
  state_->down->clear();
}

void SimLink::send(FromMember message) { state_->send_up(std::move(message)); }

SessionId SimLink::session() const { return state_->session; }

void SimLink::block(TimePoint until) {
  state_->up->block(until);
  state_->down->block(until);
}

void SimLink::reset() {
  state_->down->clear();
  state_->member.post([state = state_, connection = state_->connections] {
    state->on_close(connection, unavailable("connection reset"));
  });
}

// --- SimGateway
// -----------------------------------------------------------------------------------------------------

struct SimGateway::State : std::enable_shared_from_this<State> {
  State(SimWorld& w, SchedulerPlace& p, SimExecutor& e, Streams known)
      : world(w), place(p), process(e), streams(std::move(known)) {}

  void connect();
  void send_up(std::function<void(SchedulerLoop&, SessionId)> act) {
    if (!alive || !session) return;
    up->carry(process, [this, self = shared_from_this(), connection = connections, act = std::move(act)] {
      if (place.loop != nullptr && place.life == life && connection == connections && session)
        act(*place.loop, session);
    });
  }
  void send_submit(const Stream& stream) {
    AcceptedRequest request = stream.request;
    for (const Stream::Choice& c : stream.choices) {
      request.delivered.push_back({c.tokens, c.finish != FinishReason::kNone});
    }
    request.prompt_logprobs_delivered = static_cast<uint32_t>(stream.prompt_logprobs.size());
    request.resubmitted = stream.accepted;
    send_up([request](SchedulerLoop& loop, SessionId s) { loop.on_gateway_submit(s, request); });
    for (uint32_t c = 0; c < stream.choices.size(); ++c) {
      if (stream.choices[c].cancelled && stream.choices[c].finish == FinishReason::kNone) {
        send_cancel(request.id, c);
      }
    }
    if (stream.cancelled) send_cancel(request.id, std::nullopt);
  }
  void send_cancel(RequestId id, std::optional<uint32_t> choice) {
    send_up([id, choice](SchedulerLoop& loop, SessionId s) { loop.on_gateway_cancel(s, id, choice); });
  }
  void fail(Stream& stream, const std::string& what) {
    if (stream.fault.empty()) stream.fault = what;
    if (fault.empty()) fault = "request " + std::to_string(stream.request.id.lo) + ": " + what;
  }
  void on_reply(RequestId id, const Status& status) {
    Stream& stream = streams.at(id);
    if (status.ok()) {
      stream.accepted = true;
    } else if (!stream.accepted && (status.code() == StatusCode::kUnavailable ||
                                    status.code() == StatusCode::kResourceExhausted)) {
      // Its client tries again.
      process.post_at(world.now() + kTryAgain, [self = shared_from_this(), id] {
        const auto it = self->streams.find(id);
        if (self->alive && it != self->streams.end() && !it->second.accepted) self->send_submit(it->second);
      });
    } else {
      fail(stream, "refused: " + message_of(status));
    }
  }
  void on_tokens(const TokenEvent& event);
  void on_down(uint64_t connection) {
    if (!alive || connection != connections || !session) return;
    session = {};
    process.post_at(world.now() + kReconnect, [self = shared_from_this()] { self->connect(); });
  }

  SimWorld& world;
  SchedulerPlace& place;
  SimExecutor& process;
  bool alive = true;
  uint64_t connections = 0;
  uint64_t life = 0;  // the scheduler's of the connection
  SessionId session;
  Streams streams;
  std::string fault;
  uint64_t resubmitted = 0;
  std::shared_ptr<SimPipe> up = std::make_shared<SimPipe>(world);
  std::shared_ptr<SimPipe> down = std::make_shared<SimPipe>(world);
};

class SimGateway::Session : public GatewaySession {
 public:
  Session(std::shared_ptr<State> state, uint64_t connection)
      : state_(std::move(state)), connection_(connection) {}
  void welcome(const Welcome&) override {}
  void fleet(const FleetInfo&) override {}
  void reply(RequestId request, const Status& status) override {
    post([request, status](State& s) { s.on_reply(request, status); });
  }
  void tokens(const TokenEvent& event) override {
    post([event](State& s) { s.on_tokens(event); });
  }
  void close(const Status&) override {
    post([connection = connection_](State& s) { s.on_down(connection); });
  }

 private:
  void post(std::function<void(State&)> act) {
    if (!state_->alive) return;
    state_->down->carry(*state_->place.process,
                        [state = state_, connection = connection_, act = std::move(act)] {
                          state->process.post([state, connection, act] {
                            if (state->alive && connection == state->connections && state->session)
                              act(*state);
                          });
                        });
  }
  const std::shared_ptr<State> state_;
  const uint64_t connection_;
};

void SimGateway::State::connect() {
  if (!alive || session) return;
  if (place.loop == nullptr) {
    process.post_at(world.now() + kReconnect, [self = shared_from_this()] { self->connect(); });
    return;
  }
  Hello hello;
  hello.name = "router";
  life = place.life;
  session =
      place.loop->gateway_connected(std::make_shared<Session>(shared_from_this(), ++connections), hello);
  for (const auto& [id, stream] : streams) {
    if (stream.ended()) continue;
    if (stream.accepted) ++resubmitted;
    send_submit(stream);
  }
}

void SimGateway::State::on_tokens(const TokenEvent& event) {
  Stream& stream = streams.at(event.request);
  Stream::Choice& choice = stream.choices.at(event.choice);
  if (choice.finish != FinishReason::kNone) {
    fail(stream, "something came after its end");
  } else if (!stream.accepted) {
    fail(stream, "tokens came before it was accepted");
  } else if (event.index != choice.tokens.size()) {
    fail(stream, "index " + std::to_string(event.index) + " where " + std::to_string(choice.tokens.size()) +
                     " is due");
  } else if (!event.prompt_logprobs.empty() && event.prompt_start != stream.prompt_logprobs.size() + 1) {
    fail(stream, "prompt log-probabilities from " + std::to_string(event.prompt_start) + " where " +
                     std::to_string(stream.prompt_logprobs.size() + 1) + " is due");
  } else if (event.finish == FinishReason::kError) {
    fail(stream, "failed: " + event.error);
  } else if (event.finish == FinishReason::kCancelled && !stream.cancelled && !choice.cancelled) {
    fail(stream, "cancelled by nobody");
  }
  choice.tokens.insert(choice.tokens.end(), event.tokens.begin(), event.tokens.end());
  choice.logprobs.insert(choice.logprobs.end(), event.logprobs.begin(), event.logprobs.end());
  for (const PromptLogprob& entry : event.prompt_logprobs) stream.prompt_logprobs.push_back(entry.logprob);
  choice.finish = event.finish;
}

SimGateway::SimGateway(SimWorld& world, SchedulerPlace& place, SimExecutor& process, Streams streams)
    : state_(std::make_shared<State>(world, place, process, std::move(streams))) {
  process.post([state = state_] { state->connect(); });
}

SimGateway::~SimGateway() {
  state_->alive = false;
  state_->up->clear();
  state_->down->clear();
}

Stream& SimGateway::submit(AcceptedRequest request) {
  Stream& stream = state_->streams[request.id];
  stream.request = std::move(request);
  stream.choices.resize(stream.request.choices);
  state_->send_submit(stream);
  return stream;
}

void SimGateway::cancel(Stream& stream) {
  stream.cancelled = true;
  state_->send_cancel(stream.request.id, std::nullopt);
}

void SimGateway::cancel_choice(Stream& stream, uint32_t choice) {
  stream.choices[choice].cancelled = true;
  state_->send_cancel(stream.request.id, choice);
}

void SimGateway::reset() {
  state_->down->clear();
  state_->process.post([state = state_, connection = state_->connections] { state->on_down(connection); });
}

const Streams& SimGateway::streams() const { return state_->streams; }

Streams SimGateway::release() { return std::exchange(state_->streams, {}); }

SessionId SimGateway::session() const { return state_->session; }

const std::string& SimGateway::fault() const { return state_->fault; }

uint64_t SimGateway::resubmitted() const { return state_->resubmitted; }

}  // namespace conclave::scheduler
