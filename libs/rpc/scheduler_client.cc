#include "libs/rpc/scheduler_client.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "conclave/v1/cluster.grpc.pb.h"
#include "libs/base/random.h"
#include "libs/rpc/backoff.h"
#include "libs/rpc/client_stream.h"
#include "libs/rpc/convert.h"
#include "libs/rpc/grpc_setup.h"
#include "libs/rpc/open_requests.h"
#include "libs/runtime/loop_executor.h"

namespace conclave::rpc {
namespace {

using GatewayStream = ClientStream<pb::GatewayUp, pb::GatewayDown>;

constexpr std::chrono::seconds kTimelineLimit(3);

}  // namespace

// Everything happens on the loop, to which gRPC's threads post what they receive.
struct SchedulerClient::Impl {
  struct Attempt {
    std::shared_ptr<GatewayStream> stream;
  };

  Impl(ClientOptions o, std::string name, Incarnation incarnation)
      : options(std::move(o)),
        stub(pb::Cluster::NewStub(make_channel(options))),
        open(options.submit_wait),
        backoff(options.reconnect_min, options.reconnect_max, system_random_u64()) {
    hello.role = Role::kRouter;
    hello.name = std::move(name);
    hello.incarnation = incarnation;
    hello.ops_address = options.ops_address;
    hello.version = options.version;
    set_absent("connecting to the scheduler at " + options.target);
  }

  void set_absent(const std::string& why) {
    absent = unavailable(why);
    std::lock_guard lock(mutex);
    FleetInfo gone = fleet;
    gone.ready = false;
    gone.not_ready = why;
    gone.max_router_context_bytes.reset();  // the next may be of another version
    fleet = fleet.follow(std::move(gone), steady_now());
  }

  void publish_metrics() {
    std::lock_guard lock(mutex);
    metrics.resubmissions = open.metrics().resubmissions;
    metrics.duplicate_tokens = open.metrics().duplicate_tokens;
    metrics.open = static_cast<uint32_t>(open.size());
  }

  // --- the connection

  void connect() {
    if (stopping) return;
    current = std::make_shared<Attempt>();
    GatewayStream::Events events;
    events.on_message = [this, a = current](pb::GatewayDown&& m) {
      auto message = std::make_shared<pb::GatewayDown>(std::move(m));
      thread.loop().post([this, a, message] {
        if (current == a && !stopping) on_message(*message);
        a->stream->processed();
      });
    };
    events.on_end = [this](const Status& cause, std::shared_ptr<GatewayStream> stream) {
      thread.loop().post([this, cause, s = std::move(stream)]() mutable {
        s->forget_events();  // they hold the attempt, which holds the stream
        s.reset();
        ended(cause);
        std::lock_guard lock(mutex);
        if (--streams == 0) no_streams.notify_all();
      });
    };
    current->stream = std::make_shared<GatewayStream>(options.queue_messages, std::move(events));
    {
      std::lock_guard lock(mutex);
      ++streams;
    }
    pb::GatewayUp first;
    to_proto(hello, first.mutable_hello());
    current->stream->start([this](auto* context, auto* reactor) { stub->async()->Gateway(context, reactor); },
                           std::move(first));
    LoopExecutor& loop = thread.loop();
    timer = loop.post_at(loop.now() + options.connect_deadline, [this, a = current] {
      a->stream->cancel(deadline_exceeded("no welcome and description of its fleet within " +
                                          std::to_string(options.connect_deadline / kMillisecond) + " ms"));
    });
  }

  void ended(const Status& cause) {
    LoopExecutor& loop = thread.loop();
    loop.cancel(timer);
    current.reset();
    welcomed = false;
    if (stopping) return;
    set_absent("no connection to the scheduler at " + options.target + ": " + message_of(cause));
    if (up) open.disconnected(loop.now());
    for (Adopting& waiting : std::exchange(adopting, {})) {
      if (waiting.observer) waiting.observer->on_refused(absent);
    }
    // A connection that did not last counts as a failed attempt.
    if (up && loop.now() - up_since >= options.reconnect_max) backoff.reset();
    up = false;
    timer = loop.post_at(loop.now() + backoff.next(), [this] { connect(); });
    after_change();
  }

  void invalid(const Status& cause) {
    {
      std::lock_guard lock(mutex);
      ++metrics.invalid_messages;
    }
    current->stream->cancel(annotate(cause, "invalid message from the scheduler"));
  }

  void on_message(const pb::GatewayDown& message) {
    if (!welcomed && message.what_case() != pb::GatewayDown::kWelcome &&
        message.what_case() != pb::GatewayDown::kRefusal) {
      return invalid(invalid_argument("not a welcome first"));
    }
    switch (message.what_case()) {
      case pb::GatewayDown::kWelcome: {
        StatusOr<Welcome> welcome = from_proto(message.welcome());
        if (!welcome.ok()) return invalid(welcome.status());
        if (welcomed) return invalid(invalid_argument("a second welcome"));
        welcomed = true;
        set_absent("the scheduler at " + options.target + " has not described its fleet yet");
        break;
      }
      case pb::GatewayDown::kRefusal: {
        StatusOr<Refusal> refusal = from_proto(message.refusal());
        if (!refusal.ok()) return invalid(refusal.status());
        current->stream->cancel(make_status(refusal->code, "refused: " + refusal->reason));
        break;
      }
      case pb::GatewayDown::kSubmitReply: {
        StatusOr<SubmitAnswer> answer = from_proto(message.submit_reply());
        if (!answer.ok()) return invalid(answer.status());
        open.on_reply(answer->id, answer->status, thread.loop().now(), answer->resumable);
        break;
      }
      case pb::GatewayDown::kAdoptReply: {
        StatusOr<AdoptAnswer> answer = from_proto(message.adopt_reply());
        if (!answer.ok()) return invalid(answer.status());
        if (Status taken = on_adopt_reply(*answer); !taken.ok()) return invalid(taken);
        break;
      }
      case pb::GatewayDown::kTokens: {
        StatusOr<TokenEvent> event = from_proto(message.tokens());
        if (!event.ok()) return invalid(event.status());
        if (Status taken = open.on_tokens(*event); !taken.ok()) return invalid(taken);
        break;
      }
      case pb::GatewayDown::kTokenBatch: {
        StatusOr<std::vector<TokenEvent>> events = from_proto(message.token_batch());
        if (!events.ok()) return invalid(events.status());
        for (const TokenEvent& event : *events) {
          if (Status taken = open.on_tokens(event); !taken.ok()) return invalid(taken);
        }
        break;
      }
      case pb::GatewayDown::kFleet: {
        StatusOr<FleetInfo> info = from_proto(message.fleet());
        if (!info.ok()) return invalid(info.status());
        const bool is_ready = info->ready;
        {
          std::lock_guard lock(mutex);
          fleet = fleet.follow(*std::move(info), steady_now());
        }
        if (!up) described();
        if (is_ready) {
          for (const AcceptedRequest& request : open.retry(thread.loop().now())) send_submit(request);
        }
        break;
      }
      case pb::GatewayDown::WHAT_NOT_SET:
        return invalid(invalid_argument("a message of an unknown kind"));
    }
    after_change();
  }

  // The scheduler has said what there is: only now it can be asked for something.
  void described() {
    LoopExecutor& loop = thread.loop();
    loop.cancel(timer);
    up = true;
    up_since = loop.now();
    {
      std::lock_guard lock(mutex);
      ++metrics.connections;
    }
    const OpenRequests::Resume resume = open.connected(loop.now());
    for (RequestId id : resume.cancel) send_cancel(id);
    for (const AcceptedRequest& request : resume.submit) send_submit(request);
  }

  void send_submit(const AcceptedRequest& request) {
    pb::GatewayUp message;
    to_proto(request, message.mutable_submit());
    current->stream->write(std::move(message));
  }

  void send_cancel(RequestId id, std::optional<uint32_t> choice = std::nullopt) {
    pb::GatewayUp message;
    to_proto(id, message.mutable_cancel()->mutable_id());
    if (choice) message.mutable_cancel()->set_choice(*choice);
    current->stream->write(std::move(message));
  }

  // --- requests

  void adopt(RequestId id, const std::string& tenant, std::shared_ptr<RequestObserver> observer) {
    if (!up || current == nullptr) return observer->on_refused(absent);
    if (open.size() + adopting.size() >= options.max_open_requests) {
      return observer->on_refused(
          resource_exhausted(std::to_string(open.size() + adopting.size()) +
                             " requests are open at this router (control.max_open_requests)"));
    }
    {
      std::lock_guard lock(mutex);
      // One that does not know the message would end the connection.
      if (fleet.max_router_context_bytes == 0u) {
        return observer->on_refused(
            make_status(StatusCode::kUnimplemented,
                        "the scheduler keeps no streams to be resumed (max_router_context_bytes)"));
      }
    }
    // Whoever has it here so far has it no more, and what it may still say of it does not count.
    open.drop(id);
    for (Adopting& waiting : adopting) {
      if (waiting.id == id) waiting.observer = nullptr;
    }
    adopting.push_back({id, std::move(observer)});
    pb::GatewayUp message;
    to_proto(id, message.mutable_adopt()->mutable_id());
    message.mutable_adopt()->set_tenant(tenant);
    current->stream->write(std::move(message));
    after_change();
  }

  // Answers come in the order of asking.
  Status on_adopt_reply(const AdoptAnswer& answer) {
    if (adopting.empty() || !(adopting.front().id == answer.id)) {
      return data_loss("an adoption was answered that nobody asked for");
    }
    const std::shared_ptr<RequestObserver> observer = std::move(adopting.front().observer);
    adopting.pop_front();
    if (!observer) return OkStatus();  // it has let go meanwhile, and the scheduler was told
    if (!answer.status.ok()) {
      observer->on_refused(answer.status);
      return OkStatus();
    }
    {
      std::lock_guard lock(mutex);
      ++metrics.adoptions;
    }
    open.adopt(answer.adopted, observer, thread.loop().now());
    return OkStatus();
  }

  void release(RequestId id, const RequestObserver* observer, bool finished) {
    bool tell = open.release(id, observer, up && current != nullptr);
    for (Adopting& waiting : adopting) {
      if (!waiting.observer || waiting.observer.get() != observer) continue;
      waiting.observer = nullptr;
      tell = true;
    }
    if (tell) {
      pb::GatewayUp message;
      to_proto(id, message.mutable_release()->mutable_id());
      message.mutable_release()->set_finished(finished);
      current->stream->write(std::move(message));
    }
    after_change();
  }

  void submit(AcceptedRequest&& request, std::shared_ptr<RequestObserver> observer) {
    if (open.size() >= options.max_open_requests) {
      observer->on_refused(resource_exhausted(
          std::to_string(open.size()) + " requests are open at this router (control.max_open_requests)"));
      return;
    }
    const RequestId id = request.id;
    const TimePoint now = thread.loop().now();
    const size_t before = open.size();
    open.add(std::move(request), std::move(observer), now);
    if (open.size() == before) return;  // refused
    if (up && current != nullptr) send_submit(*open.to_submit(id, now));
    after_change();
  }

  void cancel(RequestId id) {
    if (open.cancel(id, up && current != nullptr)) send_cancel(id);
    after_change();
  }

  void cancel_choice(RequestId id, uint32_t choice) {
    if (open.cancel_choice(id, choice, up && current != nullptr)) send_cancel(id, choice);
    after_change();
  }

  // One timer for whatever expires first.
  void after_change() {
    publish_metrics();
    const TimePoint next = open.next_expiry();
    if (next == expiry_at) return;
    LoopExecutor& loop = thread.loop();
    if (expiry_timer) loop.cancel(expiry_timer);
    expiry_timer = TimerId{};
    expiry_at = next;
    if (next == kNever) return;
    expiry_timer = loop.post_at(next, [this] {
      expiry_at = kNever;
      expiry_timer = TimerId{};
      open.expire(thread.loop().now(), absent);
      after_change();
    });
  }

  const ClientOptions options;
  Hello hello;

  mutable std::mutex mutex;
  FleetInfo fleet;                 // guarded by mutex
  SchedulerClientMetrics metrics;  // guarded by mutex
  int streams = 0;                 // guarded by mutex: streams that gRPC still holds
  std::condition_variable no_streams;

  const std::unique_ptr<pb::Cluster::Stub> stub;

  // the loop's
  OpenRequests open;
  struct Adopting {
    RequestId id;
    std::shared_ptr<RequestObserver> observer;  // null: it has let go
  };
  std::deque<Adopting> adopting;  // asked for on this connection, oldest first
  Backoff backoff;
  Status absent;  // why nobody is there to be asked
  std::shared_ptr<Attempt> current;
  bool welcomed = false;
  bool up = false;  // welcomed, and told of the fleet
  TimePoint up_since = 0;
  TimerId timer;  // the next attempt, or the connect deadline
  TimerId expiry_timer;
  TimePoint expiry_at = kNever;
  bool stopping = false;

  LoopThread thread{LoopExecutor::Options{.spin_ns = 0}};  // last: its tasks use everything above
};

SchedulerClient::SchedulerClient(ClientOptions options, std::string name, Incarnation incarnation)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(name), incarnation)) {
  impl_->thread.loop().post([impl = impl_.get()] { impl->connect(); });
}

SchedulerClient::~SchedulerClient() {
  impl_->thread.loop().call([impl = impl_.get()] {
    impl->stopping = true;
    if (impl->current != nullptr) impl->current->stream->cancel(cancelled("the router ends"));
    impl->open.end_all();
    for (Impl::Adopting& waiting : std::exchange(impl->adopting, {})) {
      if (waiting.observer) waiting.observer->on_refused(unavailable("the router is stopping"));
    }
  });
  {
    // Bounded by gRPC, which ends a cancelled call at once.
    std::unique_lock lock(impl_->mutex);
    impl_->no_streams.wait(lock, [this] { return impl_->streams == 0; });
  }
  impl_->thread.stop();
}

void SchedulerClient::submit(AcceptedRequest request, std::shared_ptr<RequestObserver> observer) {
  impl_->thread.loop().post([impl = impl_.get(), r = std::make_shared<AcceptedRequest>(std::move(request)),
                             o = std::move(observer)] {
    if (impl->stopping) return o->on_refused(unavailable("the router is stopping"));
    impl->submit(std::move(*r), o);
  });
}

void SchedulerClient::cancel(RequestId id) {
  impl_->thread.loop().post([impl = impl_.get(), id] {
    if (!impl->stopping) impl->cancel(id);
  });
}

void SchedulerClient::cancel_choice(RequestId id, uint32_t choice) {
  impl_->thread.loop().post([impl = impl_.get(), id, choice] {
    if (!impl->stopping) impl->cancel_choice(id, choice);
  });
}

void SchedulerClient::adopt(RequestId id, std::string tenant, std::shared_ptr<RequestObserver> observer) {
  impl_->thread.loop().post([impl = impl_.get(), id, t = std::move(tenant), o = std::move(observer)] {
    if (impl->stopping) return o->on_refused(unavailable("the router is stopping"));
    impl->adopt(id, t, o);
  });
}

void SchedulerClient::release(RequestId id, const RequestObserver& observer, bool finished) {
  // Compared only: nobody else can be at its place while an entry keeps it.
  impl_->thread.loop().post([impl = impl_.get(), id, o = &observer, finished] {
    if (!impl->stopping) impl->release(id, o, finished);
  });
}

FleetInfo SchedulerClient::fleet() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->fleet;
}

void SchedulerClient::timeline(RequestId id, std::function<void(StatusOr<SchedulerTimeline>)> done) {
  // A call of its own, beside the stream: it keeps nothing of this object.
  struct Call {
    grpc::ClientContext context;
    pb::TimelineRequest request;
    pb::TimelineReply reply;
    std::function<void(StatusOr<SchedulerTimeline>)> done;
  };
  auto call = std::make_shared<Call>();
  call->context.set_deadline(std::chrono::system_clock::now() + kTimelineLimit);
  to_proto(id, call->request.mutable_id());
  call->done = std::move(done);
  impl_->stub->async()->Timeline(
      &call->context, &call->request, &call->reply, [call](const grpc::Status& status) {
        if (status.ok()) return call->done(from_proto(call->reply));
        const Status cause = from_grpc(status);
        const bool told = cause.code() == StatusCode::kNotFound || cause.code() == StatusCode::kUnimplemented;
        call->done(told ? cause : unavailable("the scheduler does not answer: " + message_of(cause)));
      });
}

std::optional<FleetLoad> SchedulerClient::load(Nanos limit) const {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::nanoseconds(limit));
  pb::StatusReply reply;
  if (!impl_->stub->Status(&context, {}, &reply).ok()) return std::nullopt;
  FleetLoad load;
  load.waiting = reply.requests_waiting();
  load.running = reply.requests_running();
  uint64_t used = 0, total = 0;
  for (const pb::MemberStatus& member : reply.members()) {
    used += member.kv_blocks_used();
    total += member.kv_blocks_total();
  }
  if (total > 0) load.kv_usage = static_cast<double>(used) / static_cast<double>(total);
  return load;
}

void SchedulerClient::post(std::function<void()> task) { impl_->thread.loop().post(std::move(task)); }

SchedulerClientMetrics SchedulerClient::metrics() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->metrics;
}

}  // namespace conclave::rpc
