#include "libs/rpc/member_client.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "conclave/v1/cluster.grpc.pb.h"
#include "libs/base/random.h"
#include "libs/rpc/backoff.h"
#include "libs/rpc/client_stream.h"
#include "libs/rpc/convert.h"
#include "libs/runtime/loop_executor.h"

namespace conclave::rpc {
namespace {

constexpr Nanos kDefaultLease = 500 * kMillisecond;  // where the scheduler names none

using JoinStream = ClientStream<pb::MemberUp, pb::MemberDown>;

}  // namespace

// Three threads meet here. gRPC's: a stream's callbacks. The control loop's: attempts, heartbeats, deadlines.
// The member's executor: the handler and send(). What each owns is marked.
struct MemberClient::Impl {
  // One connection attempt.
  struct Attempt {
    uint64_t number = 0;
    std::shared_ptr<JoinStream> stream;
    std::atomic<bool> welcomed{false};
    std::atomic<bool> refused{false};
  };
  // What tasks on the member's executor may touch; outlives the client when such tasks are still queued.
  struct ExecutorSide {
    bool alive = true;
    std::shared_ptr<Attempt> up;  // the connection whose welcome the handler has seen
  };

  Impl(ClientOptions o, MemberHandler& h, Executor& e, std::function<Heartbeat()> b)
      : options(std::move(o)),
        handler(h),
        executor(e),
        heartbeat(std::move(b)),
        stub(pb::Cluster::NewStub(make_channel(options))),
        backoff(options.reconnect_min, options.reconnect_max, system_random_u64()) {
    set_reason("connecting to the scheduler at " + options.target);
  }

  void set_reason(std::string text) {
    std::lock_guard lock(mutex);
    reason = std::move(text);
  }

  // --- control loop

  void attempt() {
    if (stopping) return;
    const uint64_t number = ++attempts;
    executor.post([this, number, side = side] {
      if (!side->alive) return;
      Hello hello = handler.hello();
      control.loop().post([this, number, hello = std::move(hello)] { connect(number, hello); });
    });
  }

  void connect(uint64_t number, const Hello& hello) {
    if (stopping || number != attempts) return;
    current = std::make_shared<Attempt>();
    current->number = number;
    JoinStream::Events events;
    events.on_message = [this, a = current](pb::MemberDown&& m) { on_message(a, std::move(m)); };
    events.on_end = [this, number](const Status& cause, std::shared_ptr<JoinStream> stream) {
      on_end(number, cause, std::move(stream));
    };
    current->stream = std::make_shared<JoinStream>(options.queue_messages, std::move(events));
    {
      std::lock_guard lock(mutex);
      ++streams;
    }
    pb::MemberUp first;
    to_proto(hello, first.mutable_hello());
    first.mutable_hello()->set_ops_address(options.ops_address);
    first.mutable_hello()->set_version(options.version);
    current->stream->start([this](auto* context, auto* reactor) { stub->async()->Join(context, reactor); },
                           std::move(first));
    LoopExecutor& loop = control.loop();
    timer = loop.post_at(loop.now() + options.connect_deadline, [a = current, this] {
      a->stream->cancel(deadline_exceeded("no welcome within " +
                                          std::to_string(options.connect_deadline / kMillisecond) + " ms"));
    });
  }

  void welcomed(uint64_t number, Nanos lease) {
    if (stopping || current == nullptr || current->number != number) return;
    set_reason("");
    up_since = control.loop().now();
    heartbeat_every =
        std::max<Nanos>((lease > 0 ? lease : kDefaultLease) / kHeartbeatsPerLease, kMillisecond);
    control.loop().cancel(timer);
    beat();
  }

  void beat() {
    // One that still waits to be written renews the lease as well as another would.
    if (current->stream->queued() == 0) {
      pb::MemberUp message;
      const Heartbeat beat = heartbeat ? heartbeat() : Heartbeat{Epoch(epoch.load())};
      to_proto(FromMember(beat), &message);
      current->stream->write(std::move(message));
    }
    LoopExecutor& loop = control.loop();
    timer = loop.post_at(loop.now() + heartbeat_every, [this] { beat(); });
  }

  void ended(const Status& cause) {
    const bool was_refused = current->refused;
    LoopExecutor& loop = control.loop();
    loop.cancel(timer);
    current.reset();
    if (stopping) return;
    // A connection that did not last counts as a failed attempt.
    if (up_since != 0 && loop.now() - up_since >= options.reconnect_max) backoff.reset();
    up_since = 0;
    const Nanos pause = backoff.next();
    set_reason((was_refused ? "the scheduler at " + options.target + " refused this member: "
                            : "no connection to the scheduler at " + options.target + ": ") +
               message_of(cause));
    timer = loop.post_at(loop.now() + pause, [this] { attempt(); });
  }

  // --- gRPC's threads

  void on_message(const std::shared_ptr<Attempt>& a, pb::MemberDown&& message) {
    StatusOr<ToMember> converted = from_proto(message);
    if (!converted.ok()) {
      a->stream->cancel(annotate(converted.status(), "invalid message from the scheduler"));
      return;
    }
    if (const auto* welcome = std::get_if<Welcome>(&*converted)) {
      ever_welcomed = true;
      if (a->welcomed.exchange(true)) {
        a->stream->cancel(invalid_argument("invalid message from the scheduler: a second welcome"));
        return;
      }
      control.loop().post([this, number = a->number, lease = welcome->lease_ns] { welcomed(number, lease); });
    } else if (const auto* refusal = std::get_if<Refusal>(&*converted)) {
      a->refused = true;
      a->stream->cancel(make_status(refusal->code, refusal->reason));
    } else if (!a->welcomed) {
      a->stream->cancel(invalid_argument("invalid message from the scheduler: not a welcome first"));
      return;
    }
    executor.post([this, side = side, a, m = std::make_shared<ToMember>(std::move(*converted))] {
      if (!side->alive) return;
      if (std::holds_alternative<Welcome>(*m)) side->up = a;
      handler.on_message(std::move(*m));
      a->stream->processed();
    });
  }

  void on_end(uint64_t number, const Status& cause, std::shared_ptr<JoinStream> stream) {
    executor.post([this, side = side, number, cause] {
      if (!side->alive || side->up == nullptr || side->up->number != number) return;
      side->up.reset();
      handler.on_down(cause);
    });
    control.loop().post([this, cause, s = std::move(stream)]() mutable {
      s->forget_events();  // they hold the attempt, which holds the stream
      s.reset();
      ended(cause);
      std::lock_guard lock(mutex);
      if (--streams == 0) no_streams.notify_all();
    });
  }

  const ClientOptions options;
  MemberHandler& handler;
  Executor& executor;
  const std::function<Heartbeat()> heartbeat;
  const std::shared_ptr<ExecutorSide> side = std::make_shared<ExecutorSide>();

  std::atomic<bool> ever_welcomed{false};
  std::atomic<uint64_t> epoch{0};  // of the last heartbeat that the member sent itself

  mutable std::mutex mutex;
  std::string reason;  // guarded by mutex
  int streams = 0;     // guarded by mutex: streams that gRPC still holds
  std::condition_variable no_streams;

  const std::unique_ptr<pb::Cluster::Stub> stub;

  // the control loop's
  Backoff backoff;
  uint64_t attempts = 0;
  std::shared_ptr<Attempt> current;
  TimerId timer;  // the one thing waited for: the next attempt, the connect deadline, or the next heartbeat
  Nanos heartbeat_every = kDefaultLease / kHeartbeatsPerLease;
  TimePoint up_since = 0;
  bool stopping = false;

  LoopThread control{LoopExecutor::Options{.spin_ns = 0}};  // last: its tasks use everything above
};

MemberClient::MemberClient(ClientOptions options, MemberHandler& handler, Executor& executor,
                           std::function<Heartbeat()> heartbeat)
    : impl_(std::make_unique<Impl>(std::move(options), handler, executor, std::move(heartbeat))) {}

MemberClient::~MemberClient() {
  impl_->side->alive = false;
  impl_->side->up.reset();
  impl_->control.loop().call([this] {
    impl_->stopping = true;
    impl_->control.loop().cancel(impl_->timer);
    if (impl_->current != nullptr) impl_->current->stream->cancel(cancelled("the member ends"));
  });
  {
    // Bounded by gRPC, which ends a cancelled call at once.
    std::unique_lock lock(impl_->mutex);
    impl_->no_streams.wait(lock, [this] { return impl_->streams == 0; });
  }
  impl_->control.stop();
}

void MemberClient::start() {
  impl_->control.loop().post([impl = impl_.get()] { impl->attempt(); });
}

void MemberClient::send(FromMember message) {
  if (const auto* heartbeat = std::get_if<Heartbeat>(&message)) impl_->epoch.store(heartbeat->epoch.value);
  const std::shared_ptr<Impl::Attempt>& up = impl_->side->up;
  if (up == nullptr) return;
  pb::MemberUp out;
  to_proto(message, &out);
  up->stream->write(std::move(out));
}

bool MemberClient::was_welcomed() const { return impl_->ever_welcomed; }

std::string MemberClient::not_joined() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->reason;
}

}  // namespace conclave::rpc
