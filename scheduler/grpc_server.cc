#include "scheduler/grpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string_view>
#include <utility>

#include "conclave/v1/cluster.grpc.pb.h"
#include "libs/base/address.h"
#include "libs/base/id_text.h"
#include "libs/rpc/convert.h"
#include "libs/rpc/grpc_setup.h"
#include "libs/rpc/server_stream.h"
#include "libs/rpc/session_wire.h"
#include "libs/telemetry/log.h"
#include "scheduler/peer_address.h"

namespace conclave::scheduler {
namespace {

namespace pb = ::conclave::v1;

// Messages after which the loop's executor is asked for a credit; a part of the read window.
constexpr int kCreditBatch = 16;

struct Counters {
  std::atomic<uint64_t> opened{0};
  std::atomic<uint64_t> invalid{0};
  std::atomic<uint64_t> slow{0};
  std::atomic<uint32_t> streams{0};
};

// What every session needs; outlives them.
struct Context {
  Context(SchedulerLoop& l, Executor& e, GrpcServerOptions o,
          std::function<void(const std::string&, const Status&)> f)
      : loop(l), executor(e), options(std::move(o)), on_session_end(std::move(f)) {}

  SchedulerLoop& loop;
  Executor& executor;
  GrpcServerOptions options;
  std::function<void(const std::string&, const Status&)> on_session_end;
  const TimePoint started = steady_now();
  Counters counters;

  rpc::ServerStreamLimits limits() const {
    rpc::ServerStreamLimits out;
    out.queue_messages = options.session_queue_messages;
    out.queue_bytes = options.session_queue_bytes;
    out.first_message_deadline = options.hello_deadline;
    return out;
  }
};

const char* finish_name(FinishReason reason) {
  constexpr const char* kNames[] = {"none", "stop", "length", "cancelled", "deadline", "error"};
  return kNames[static_cast<size_t>(reason)];
}

// The bytes that encode(..., allocate) makes.
template <class Encode>
grpc::Slice to_slice(const Encode& encode) {
  grpc::Slice slice;
  encode([&slice](size_t bytes) {
    slice = grpc::Slice(bytes);
    // Nobody else has it yet; gRPC's own serializer writes into a new slice in the same way.
    return reinterpret_cast<char*>(const_cast<uint8_t*>(slice.begin()));
  });
  return slice;
}

// What both kinds of session share: credits for the reader, counting, the end.
class Session : public rpc::ServerStream {
 public:
  explicit Session(std::shared_ptr<Context> context)
      : rpc::ServerStream(context->limits()), context_(std::move(context)) {
    ++context_->counters.opened;
    ++context_->counters.streams;
  }

 protected:
  // After a message was handed to the loop: its executor runs tasks in order, so when the credit runs there,
  // everything before it was dealt with.
  void credit() {
    if (++uncredited_ < kCreditBatch) return;
    // Posted last: the credit may start the next read, whose message is counted on another thread.
    const int count = std::exchange(uncredited_, 0);
    context_->executor.post([self = shared_from_this(), count] { self->processed(count); });
  }

  // Where the operations port of the process at the other end is found from here.
  void complete(Hello& hello) {
    hello.ops_address = reachable_from(hello.ops_address, peer());
    log_debug(LogModule::kSessions, "hello",
              {{"peer", peer()},
               {"member", hello.name},
               {"member_incarnation", hello.incarnation.value},
               {"numerics_id", hello.numerics_id},
               {"version", hello.version}});
  }

  Status invalid(const Status& status) {
    ++context_->counters.invalid;
    return annotate(status, "invalid message");
  }

  void ended(const Status& cause) {
    --context_->counters.streams;
    if (cause.code() == StatusCode::kResourceExhausted) ++context_->counters.slow;
    if (context_->on_session_end) context_->on_session_end(peer(), cause);
  }

  const std::shared_ptr<Context> context_;
  // Set by the first message; read on gRPC's threads, one message at a time.
  SessionId session_;

 private:
  int uncredited_ = 0;
};

class MemberStream final : public Session, public MemberSession {
 public:
  using Session::Session;

  // --- MemberSession, on the loop's executor
  void send(ToMember message) override {
    write(to_slice([&](const rpc::Allocate& allocate) { rpc::encode(message, allocate); }));
  }
  void close(const Status& cause) override { finish(cause, true); }

 private:
  Status on_message(std::string_view bytes) override {
    StatusOr<FromMember> converted = rpc::decode_from_member(bytes);
    if (!converted.ok()) return invalid(converted.status());
    const bool hello = std::holds_alternative<Hello>(*converted);
    if (hello == static_cast<bool>(session_)) {
      return invalid(invalid_argument(hello ? "a second hello" : "the first message must be a hello"));
    }
    if (hello) {
      complete(std::get<Hello>(*converted));
      session_ = context_->loop.member_connected(std::static_pointer_cast<MemberStream>(shared_from_this()));
    }
    context_->loop.on_member_message(session_, std::move(*converted));
    credit();
    return OkStatus();
  }

  void on_end(const Status& cause) override {
    if (session_) context_->loop.member_closed(session_, cause);
    ended(cause);
  }
};

class GatewayStream final : public Session, public GatewaySession {
 public:
  using Session::Session;

  // --- GatewaySession, on the loop's executor
  void welcome(const Welcome& welcome) override {
    pb::GatewayDown out;
    rpc::to_proto(welcome, out.mutable_welcome());
    write(out);
  }
  void reply(RequestId request, const Status& status, bool resumable) override {
    pb::GatewayDown out;
    rpc::to_proto(request, status, out.mutable_submit_reply());
    out.mutable_submit_reply()->set_resumable(resumable);
    write(out);
  }
  void reply_adopt(RequestId request, const Status& status, const AdoptedRequest* adopted) override {
    pb::GatewayDown out;
    rpc::to_proto(request, status, adopted, out.mutable_adopt_reply());
    flush();  // tokens held back may be of the one who had it
    write(out);
  }
  void tokens(const TokenEvent& event) override {
    if (event.finish != FinishReason::kNone && log_enabled(LogModule::kRequests, LogLevel::kDebug)) {
      log_debug(LogModule::kRequests, "ended",
                {{"stream", id_text(event.request)},
                 {"choice", event.choice},
                 {"tokens", event.index + event.tokens.size()},
                 {"finish", finish_name(event.finish)},
                 {"error", event.error}});
    }
    if (held_.add(event)) {
      if (held_.full()) flush();
      return;
    }
    flush();
    pb::GatewayDown out;
    rpc::to_proto(event, out.mutable_tokens());
    write(out);
  }
  // Nothing overtakes the tokens of a request: its end is one of them or comes through tokens().
  void flush() override {
    if (held_.empty()) return;
    rpc::ServerStream::write(to_slice([&](const rpc::Allocate& allocate) { held_.flush(allocate); }));
  }
  void fleet(const FleetInfo& info) override {
    pb::GatewayDown out;
    rpc::to_proto(info, out.mutable_fleet());
    write(out);
  }
  void close(const Status& cause) override {
    flush();
    finish(cause, true);
  }

 private:
  void write(const pb::GatewayDown& message) {
    rpc::ServerStream::write(
        to_slice([&](const rpc::Allocate& allocate) { rpc::encode(message, allocate); }));
  }

  Status on_message(std::string_view bytes) override {
    pb::GatewayUp message;
    if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return invalid(invalid_argument("not a conclave.v1.GatewayUp"));
    }
    if (static_cast<bool>(session_) == (message.what_case() == pb::GatewayUp::kHello)) {
      return invalid(invalid_argument(session_ ? "a second hello" : "the first message must be a hello"));
    }
    switch (message.what_case()) {
      case pb::GatewayUp::kHello: {
        StatusOr<Hello> hello = rpc::from_proto(message.hello());
        if (!hello.ok()) return invalid(hello.status());
        complete(*hello);
        session_ = context_->loop.gateway_connected(
            std::static_pointer_cast<GatewayStream>(shared_from_this()), std::move(*hello));
        break;
      }
      case pb::GatewayUp::kSubmit: {
        StatusOr<AcceptedRequest> request = rpc::from_proto(message.submit());
        if (request.ok() && log_enabled(LogModule::kRequests, LogLevel::kDebug)) {
          log_debug(LogModule::kRequests, "submitted",
                    {{"stream", id_text(request->id)},
                     {"peer", peer()},
                     {"prompt_tokens", request->prompt.size()},
                     {"choices", request->choices},
                     {"resubmitted", request->resubmitted}});
        }
        if (!request.ok()) {
          // The session can go on where it is known which request was wrong.
          StatusOr<RequestId> id = rpc::from_proto(message.submit().id());
          if (!id.ok()) return invalid(id.status());
          ++context_->counters.invalid;
          reply(*id, request.status(), false);
          this->processed(1);
          return OkStatus();
        }
        context_->loop.on_gateway_submit(session_, std::move(*request));
        break;
      }
      case pb::GatewayUp::kCancel: {
        StatusOr<RequestId> id = rpc::from_proto(message.cancel().id());
        if (!id.ok()) return invalid(id.status());
        std::optional<uint32_t> choice;
        if (message.cancel().has_choice()) choice = message.cancel().choice();
        context_->loop.on_gateway_cancel(session_, *id, choice);
        break;
      }
      case pb::GatewayUp::kAdopt: {
        StatusOr<RequestId> id = rpc::from_proto(message.adopt().id());
        if (!id.ok()) return invalid(id.status());
        if (message.adopt().tenant().size() > rpc::kMaxNameBytes) {
          return invalid(invalid_field("adopt.tenant", "adopt.tenant is too long"));
        }
        context_->loop.on_gateway_adopt(session_, *id, message.adopt().tenant());
        break;
      }
      case pb::GatewayUp::kRelease: {
        StatusOr<RequestId> id = rpc::from_proto(message.release().id());
        if (!id.ok()) return invalid(id.status());
        context_->loop.on_gateway_release(session_, *id, message.release().finished());
        break;
      }
      case pb::GatewayUp::kHeartbeat:
        this->processed(1);
        return OkStatus();
      case pb::GatewayUp::WHAT_NOT_SET:
        return invalid(invalid_argument("a message of an unknown kind"));
    }
    credit();
    return OkStatus();
  }

  void on_end(const Status& cause) override {
    if (session_) context_->loop.gateway_closed(session_, cause);
    ended(cause);
  }

  rpc::TokenBatch held_;  // tokens of this round; the loop's executor's
};

void shard_to_proto(const ShardFigures& from, pb::MemberStatus* to) {
  to->set_experts_held(from.homes);
  pb::ShardStatus* out = to->mutable_shard();
  out->set_homes(from.homes);
  out->set_sole_homes(from.sole_homes);
  out->set_held(from.holding);
  out->set_slots(from.slots == UINT64_MAX ? 0 : from.slots);
  out->set_load(from.load);
  out->set_assigned_load(from.assigned_load);
}

void totals_to_proto(const SchedulerMetrics& from, pb::ClusterTotals* to) {
  to->set_tokens_generated(from.tokens_sampled - std::min(from.tokens_discarded, from.tokens_sampled));
  to->set_prompt_tokens(from.prefill_tokens);
  to->set_cached_tokens(from.prompt_tokens_cached);
  to->set_steps(from.steps_retired);
  to->set_requests_accepted(from.requests_accepted);
  to->set_requests_refused(from.requests_refused_full + from.requests_refused_invalid +
                           from.requests_refused_unready);
  to->set_requests_failed(from.requests_failed + from.requests_deadline);
  to->set_requests_ended(from.requests_finished_stop + from.requests_finished_length +
                         from.requests_cancelled + from.requests_abandoned + from.requests_deadline +
                         from.requests_failed);
  to->set_sequences_replayed(from.sequences_replayed);
  to->set_sequences_preempted(from.sequences_preempted);
  to->set_placement_changes(from.placement_changes);
  to->set_homes_added(from.homes_added);
  to->set_homes_removed(from.homes_removed);
  to->set_members_lost(from.members_lost);
  for (const uint64_t stalls : from.stalls_reported) to->set_stalls(to->stalls() + stalls);
}

void status_to_proto(const StatusSnapshot& from, pb::StatusReply* to) {
  to->set_scheduler_incarnation(from.scheduler.value);
  rpc::to_proto(from.fleet, to->mutable_fleet());
  to->set_epoch(from.epoch.value);
  to->set_requests_waiting(from.requests_waiting);
  to->set_requests_running(from.requests_running);
  for (const MemberSnapshot& member : from.members) {
    pb::MemberStatus* out = to->add_members();
    out->set_role(static_cast<pb::Role>(member.role));
    out->set_name(rpc::wire_text(member.name, rpc::kMaxNameBytes));
    out->set_incarnation(member.incarnation.value);
    out->set_state(rpc::wire_text(member.state, rpc::kMaxNameBytes));
    out->set_kv_blocks_total(member.kv_blocks_total);
    out->set_kv_blocks_used(member.kv_blocks_used);
    out->set_kv_blocks_cached(member.kv_blocks_cached);
    out->set_sequences(member.sequences);
    if (member.role == Role::kExpert) shard_to_proto(member.shard, out);
    out->set_ops_address(rpc::wire_text(member.ops_address, rpc::kMaxNameBytes));
    out->set_version(rpc::wire_text(member.version, rpc::kMaxNameBytes));
    out->set_numerics_id(rpc::wire_text(member.numerics_id, rpc::kMaxNameBytes));
    out->set_threads(member.threads);
    out->set_age_ns(from.now - member.joined);
  }
  to->set_layers(from.layers);
  to->set_experts(from.experts);
  to->set_preparing_epoch(from.preparing_epoch.value);
  to->set_busiest(from.busiest);
  to->set_requests_stalled(from.requests_stalled);
  totals_to_proto(from.totals, to->mutable_totals());
  for (const ClusterEvent& event : from.events) {
    pb::ClusterEvent* out = to->add_events();
    out->set_number(event.number);
    out->set_kind(rpc::wire_text(event.kind, rpc::kMaxNameBytes));
    out->set_who(rpc::wire_text(event.who, rpc::kMaxNameBytes));
    out->set_detail(rpc::wire_text(event.detail, rpc::kMaxNameBytes));
    out->set_age_ns(from.now - event.at);
    out->set_times(event.times);
  }
}

void experts_to_proto(const ExpertsSnapshot& from, pb::ExpertsReply* to) {
  to->set_epoch(from.epoch.value);
  to->set_layers(from.layers);
  to->set_experts(from.experts);
  to->set_first_layer(from.first_layer);
  for (const ShardEndpoint& shard : from.shards) {
    pb::ShardEndpoint* out = to->add_shards();
    out->set_incarnation(shard.shard.value);
    out->set_name(rpc::wire_text(shard.name, rpc::kMaxNameBytes));
  }
  for (const double load : from.load) to->add_load(load);
  to->add_home_begin(0);
  for (const auto& homes : from.homes) {
    for (const uint16_t home : homes) to->add_home_shards(home);
    to->add_home_begin(static_cast<uint32_t>(to->home_shards_size()));
  }
}

void rebalance_to_proto(const RebalanceSummary& from, pb::RebalanceReply* to) {
  to->set_added(from.added);
  to->set_removed(from.removed);
  to->set_busiest_before(from.busiest_before);
  to->set_busiest_after(from.busiest_after);
  to->set_epoch(from.epoch.value);
}

// The sessions' messages stay bytes as far as gRPC is concerned.
using AskedBase = pb::Cluster::WithCallbackMethod_Status<pb::Cluster::WithCallbackMethod_Drain<
    pb::Cluster::WithCallbackMethod_Experts<pb::Cluster::WithCallbackMethod_Rebalance<
        pb::Cluster::WithCallbackMethod_Timeline<pb::Cluster::Service>>>>>;
using ServiceBase =
    pb::Cluster::WithRawCallbackMethod_Join<pb::Cluster::WithRawCallbackMethod_Gateway<AskedBase>>;

class ClusterService final : public ServiceBase {
 public:
  using Stream = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  explicit ClusterService(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  Stream* Join(grpc::CallbackServerContext* call) override {
    auto stream = std::make_shared<MemberStream>(context_);
    stream->start(call);
    return stream.get();
  }

  Stream* Gateway(grpc::CallbackServerContext* call) override {
    auto stream = std::make_shared<GatewayStream>(context_);
    stream->start(call);
    return stream.get();
  }

  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext* call, const pb::StatusRequest*,
                                   pb::StatusReply* reply) override {
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    context_->loop.status([reactor, reply, context = context_](const StatusSnapshot& snapshot) {
      status_to_proto(snapshot, reply);
      reply->set_ops_address(rpc::wire_text(context->options.ops_address, rpc::kMaxNameBytes));
      reply->set_version(context->options.version);
      reply->set_age_ns(steady_now() - context->started);
      reply->set_wall_ns(wall_now_ns());
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* call, const pb::DrainRequest* request,
                                  pb::DrainReply*) override {
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    context_->loop.drain_member(
        Incarnation(request->incarnation()),
        [reactor](const conclave::Status& status) { reactor->Finish(rpc::to_grpc(status)); });
    return reactor;
  }

  grpc::ServerUnaryReactor* Experts(grpc::CallbackServerContext* call, const pb::ExpertsRequest* request,
                                    pb::ExpertsReply* reply) override {
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    std::optional<uint32_t> layer;
    if (request->has_layer()) layer = request->layer();
    context_->loop.experts(layer, [reactor, reply](const StatusOr<ExpertsSnapshot>& snapshot) {
      if (snapshot.ok()) experts_to_proto(*snapshot, reply);
      reactor->Finish(rpc::to_grpc(snapshot.status()));
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* Rebalance(grpc::CallbackServerContext* call, const pb::RebalanceRequest* request,
                                      pb::RebalanceReply* reply) override {
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    context_->loop.rebalance(request->dry_run(), [reactor, reply](const StatusOr<RebalanceSummary>& summary) {
      if (summary.ok()) rebalance_to_proto(*summary, reply);
      reactor->Finish(rpc::to_grpc(summary.status()));
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* Timeline(grpc::CallbackServerContext* call, const pb::TimelineRequest* request,
                                     pb::TimelineReply* reply) override {
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    const StatusOr<RequestId> id = rpc::from_proto(request->id());
    if (!id.ok()) {
      reactor->Finish(rpc::to_grpc(id.status()));
      return reactor;
    }
    context_->loop.timeline(*id, [reactor, reply](const StatusOr<SchedulerTimeline>& timeline) {
      if (timeline.ok()) rpc::to_proto(*timeline, reply);
      reactor->Finish(rpc::to_grpc(timeline.status()));
    });
    return reactor;
  }

 private:
  const std::shared_ptr<Context> context_;
};

class GrpcServerImpl final : public GrpcServer {
 public:
  explicit GrpcServerImpl(std::shared_ptr<Context> context)
      : context_(context), service_(std::move(context)) {}
  ~GrpcServerImpl() override { shutdown(0); }

  Status listen() {
    static std::once_flag once;
    std::call_once(once, [] {
      grpc::EnableDefaultHealthCheckService(true);
      grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    });
    const GrpcServerOptions& options = context_->options;
    ASSIGN_OR_RETURN(HostPort address, parse_host_port(options.listen));
    int port = 0;
    grpc::ServerBuilder builder;
    rpc::configure_server(builder, options.listen, options.max_message_bytes, &port, options.tls);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0)
      return rpc::explain_listen_failure(options.listen, "scheduler.listen");
    address.port = static_cast<uint16_t>(port);
    address_ = address;
    set_serving(false);
    return OkStatus();
  }

  std::string address() const override { return address_.text(); }
  uint16_t port() const override { return address_.port; }

  void set_serving(bool serving) override {
    grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
    if (health == nullptr) return;
    health->SetServingStatus(serving);
    health->SetServingStatus("conclave.v1.Cluster", serving);
  }

  void shutdown(Nanos limit) override {
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::nanoseconds(limit));
    server_->Wait();
    server_.reset();
  }

  GrpcServerMetrics metrics() const override {
    const Counters& c = context_->counters;
    return {c.opened.load(), c.invalid.load(), c.slow.load(), c.streams.load()};
  }

 private:
  const std::shared_ptr<Context> context_;
  ClusterService service_;
  std::unique_ptr<grpc::Server> server_;
  HostPort address_;
};

}  // namespace

StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::start(
    const GrpcServerOptions& options, SchedulerLoop& loop, Executor& executor,
    std::function<void(const std::string& peer, const Status& cause)> on_session_end) {
  auto context = std::make_shared<Context>(loop, executor, options, std::move(on_session_end));
  auto server = std::make_unique<GrpcServerImpl>(std::move(context));
  RETURN_IF_ERROR(server->listen());
  return std::unique_ptr<GrpcServer>(std::move(server));
}

}  // namespace conclave::scheduler
