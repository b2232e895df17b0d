// Members, gateways, time and what people see. Requests are in core.cc, placement in core_placement.cc.
#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "libs/base/check.h"
#include "scheduler/core/core.h"

namespace conclave::scheduler {
namespace {

// Gateways hear of weights being read in steps of at least so much.
constexpr uint32_t kLoadedStep = 10;

void show_process(const Hello& hello, TimePoint joined, MemberSnapshot& entry) {
  entry.ops_address = hello.ops_address;
  entry.version = hello.version;
  entry.numerics_id = hello.numerics_id;
  entry.threads = hello.threads;
  entry.joined = joined;
}

}  // namespace

uint64_t ShardSet::follow(const PlacementTable& active) {
  if (active.epoch() == epoch_) return number_;
  epoch_ = active.epoch();
  std::vector<Incarnation> now;
  for (const ShardEndpoint& shard : active.shards()) now.push_back(shard.shard);
  std::sort(now.begin(), now.end());
  if (now == shards_) return number_;
  shards_ = std::move(now);
  return ++number_;
}

void SchedulerCore::handle(MemberMessage& event, TimePoint now) {
  Member* member = members_.find(event.session);
  if (member == nullptr) {
    if (auto* hello = std::get_if<Hello>(&event.message))
      return on_hello(event.session, std::move(*hello), now);
    ++counters_.protocol_violations;
    emit(CloseMember{event.session, failed_precondition("the first message of a member must be its hello")});
    return;
  }
  if (member->suspect) all_due_ = true;
  members_.heard(*member, now);
  const bool worker = member->hello.role == Role::kAttention;
  const char* unexpected = nullptr;
  if (const auto* heartbeat = std::get_if<Heartbeat>(&event.message)) {
    on_heartbeat(*member, *heartbeat);
    if (heartbeat->secrets) expel_strangers(now);
  } else if (auto* result = std::get_if<StepResult>(&event.message)) {
    if (worker) return on_step_result(*member, *result, now);
    unexpected = "a shard reported the result of a step";
  } else if (const auto* ready = std::get_if<PlacementReady>(&event.message)) {
    member->loaded_permille = 1000;
    all_due_ = true;
    if (!worker) return placement_.shard_ready(member->hello.incarnation, ready->epoch, now);
    unexpected = "a worker reported a placement as ready";
  } else if (const auto* trouble = std::get_if<PeerTrouble>(&event.message)) {
    if (worker) return on_peer_trouble(*trouble, now);
    unexpected = "a shard reported trouble with a peer";
  } else if (std::holds_alternative<Leaving>(event.message)) {
    return start_drain(*member, now);
  } else if (const auto* load = std::get_if<ExpertLoad>(&event.message)) {
    if (!worker && placement_.shard_load(member->hello.incarnation, *load, now)) return show_placement(now);
    unexpected = worker ? "a worker reported the load of experts" : "the load of an expert that is not there";
  } else {
    unexpected = "a second hello on one session";
  }
  if (unexpected != nullptr) {
    ++counters_.protocol_violations;
    lose_member(event.session, failed_precondition(unexpected), true, now);
  }
}

void SchedulerCore::on_heartbeat(Member& member, const Heartbeat& heartbeat) {
  if (heartbeat.secrets) member.hello.secrets = heartbeat.secrets;
  // One without an epoch only renews the lease, and one of the future is of another scheduler.
  if (heartbeat.epoch && heartbeat.epoch <= placement_.newest() &&
      std::exchange(member.epoch_in_use, heartbeat.epoch) != heartbeat.epoch) {
    epochs_changed_ = true;
    all_due_ = true;
  }
  if (!heartbeat.loaded_permille) return;
  member.held_experts = heartbeat.held_experts;
  if (std::exchange(member.loaded_permille, *heartbeat.loaded_permille) != *heartbeat.loaded_permille)
    all_due_ = true;
}

void SchedulerCore::on_hello(SessionId session, Hello hello, TimePoint now) {
  all_due_ = true;
  // The same process on a new connection: the old one is gone, whatever it looks like from here. What it ran
  // moves on, and the process joins again under a new incarnation.
  if (Member* old = members_.find(hello.incarnation)) {
    lose_member(old->session, unavailable(old->hello.name + " connected again"), true, now);
  }
  if (Status status = members_.check(hello); !status.ok()) {
    ++counters_.members_refused;
    events_.add("refused", hello.name, message_of(status), now);
    emit(SendMember{session, Refusal{status.code(), message_of(status)}});
    emit(CloseMember{session, status});
    return;
  }
  const bool first = !members_.model().has_value();
  Member& member = members_.add(session, std::move(hello), now);
  const Hello& info = member.hello;
  if (first) placement_.set_model(info.num_layers, info.num_experts);
  ++counters_.members_joined;
  events_.add("joined", info.name, info.role == Role::kExpert ? "an expert shard" : "an attention worker",
              now);
  show_members();
  emit(SendMember{session, welcome()});
  if (info.role == Role::kExpert) {
    add_shard(info, now);
  } else {
    add_worker(session, info);
  }
  if (info.drained) start_drain(member, now);  // by the scheduler before this one
  if (members_.alone(info)) {
    events_.add("stranger", info.name,
                "knows no secret of the data plane that any peer does (transport.secret_file); nor has any other member a peer",
                now);
  }
  expel_strangers(now);
}

// Members that joined before it could be said who is wrong.
void SchedulerCore::expel_strangers(TimePoint now) {
  for (const DeadMember& stranger : members_.strangers()) lose_member(stranger.session, stranger.cause, true, now);
}

void SchedulerCore::add_shard(const Hello& info, TimePoint now) {
  const bool limited = info.capacity_bytes > 0 && info.expert_bytes > 0;
  const uint64_t slots = limited ? info.capacity_bytes / info.expert_bytes : UINT64_MAX;
  placement_.shard_joined({info.incarnation, info.name, info.transport_address}, slots, now);
}

void SchedulerCore::add_worker(SessionId session, const Hello& info) {
  WorkerLimits limits;
  limits.step_tokens = options_.step_token_budget;
  if (info.max_batch_tokens > 0) limits.step_tokens = std::min(limits.step_tokens, info.max_batch_tokens);
  limits.chunk_tokens = options_.prefill_chunk_tokens;
  limits.sequences = std::min(options_.max_batch_sequences, limits.step_tokens);
  limits.steps_in_flight = options_.steps_in_flight;
  limits.vocab_size = info.vocab_size;
  limits.prefix_cache = options_.prefix_cache;
  limits.growth_pages = options_.preemption ? 1 : 0;
  limits.step_target = options_.itl_target_ms * kMillisecond;
  limits.prefill_target = options_.prefill_target_ms * kMillisecond;
  limits.min_prefill = options_.min_prefill_tokens;
  limits.owed_prefill = options_.max_owed_prefill_tokens;
  workers_.try_emplace(info.incarnation, info.kv_blocks, limits, faults_);
  largest_pool_ = std::max(largest_pool_, info.kv_blocks);
  if (placement_.active().epoch()) emit(SendMember{session, PlacementUpdate{placement_.active()}});
}

void SchedulerCore::on_peer_trouble(const PeerTrouble& trouble, TimePoint now) {
  ++counters_.peer_troubles;
  Member* shard = members_.find(trouble.peer);
  // A worker may complain about a shard that is gone already.
  if (shard != nullptr && shard->hello.role == Role::kExpert) members_.trouble(*shard, trouble.cause, now);
}

void SchedulerCore::lose_member(SessionId session, const Status& cause, bool close, TimePoint now) {
  Member* member = members_.find(session);
  CONCLAVE_CHECK(member != nullptr);
  const Hello hello = member->hello;
  all_due_ = true;
  if (member->draining && !member->drained) --draining_;
  // One that was told that nothing is left may go: nobody misses it.
  if (!member->drained) ++counters_.members_lost;
  events_.add(member->drained ? "left" : "lost", hello.name, message_of(cause), now);
  members_.remove(session);
  show_members();
  if (close) {
    emit(
        SendMember{session, Refusal{StatusCode::kFailedPrecondition, "declared dead: " + message_of(cause)}});
    emit(CloseMember{session, cause});
  }
  if (hello.role == Role::kExpert) {
    placement_.shard_lost(hello.incarnation, now);
    return;
  }
  // Its sequences go back to their places in the queue with everything generated so far.
  uint64_t replayed = 0;
  for (Choice* choice : requests_.running_on(hello.incarnation)) {
    if (faults_.forget_lost_worker) break;
    mark(*choice->request, TimelineMarkKind::kReplayed, choice->index, hello.name + " was lost");
    requests_.set_waiting(*choice);
    ++replayed;
  }
  counters_.sequences_replayed += replayed;
  if (replayed > 0)
    events_.add("replay", hello.name, std::to_string(replayed) + " sequences are computed again elsewhere",
                now);
  workers_.erase(hello.incarnation);
  retired_at_.erase(hello.incarnation);
  epochs_changed_ = true;
  show_pool(hello.incarnation);
}

void SchedulerCore::handle(MemberLost& event, TimePoint now) {
  if (members_.find(event.session) == nullptr) return;  // never joined, or closed from here
  lose_member(event.session, event.cause, false, now);
}

void SchedulerCore::handle(GatewayJoined& event, TimePoint now) {
  Status status = members_.check_gateway(event.hello);
  if (status.ok() && gateways_.size() >= options_.max_gateways) {
    status =
        resource_exhausted("there are " + std::to_string(options_.max_gateways) + " gateways (max_gateways)");
  }
  if (!status.ok()) {
    ++counters_.members_refused;
    events_.add("refused", event.hello.name, message_of(status), now);
    emit(CloseGateway{event.session, status});
    return;
  }
  if (event.hello.incarnation) events_.add("joined", event.hello.name, "a router", now);
  gateways_.emplace(event.session, GatewayMember{std::move(event.hello), now});
  emit(SendWelcome{event.session, welcome()});
  emit(SendFleet{event.session, fleet_});
}

void SchedulerCore::handle(GatewayLost& event, TimePoint now) {
  const auto gone = gateways_.extract(event.session);
  if (gone.empty()) return;
  if (gone.mapped().hello.incarnation)
    events_.add("lost", gone.mapped().hello.name, message_of(event.cause), now);
  for (Request* request : requests_.of_gateway(event.session)) {
    mark(*request, TimelineMarkKind::kDetached);
    requests_.detach(*request, grace_from(now));
  }
}

void SchedulerCore::handle(DrainMember& event, TimePoint now) {
  Member* member = members_.find(event.member);
  Status status;
  if (member == nullptr) {
    status = not_found("no member has the incarnation " + std::to_string(event.member.value));
  } else {
    start_drain(*member, now);
  }
  emit(ReplyDrain{event.ticket, std::move(status)});
}

bool SchedulerCore::takes_new_work(Incarnation worker) {
  const Member* member = members_.find(worker);
  return !member->suspect && !member->draining;
}

void SchedulerCore::start_drain(Member& member, TimePoint now) {
  if (member.draining) return;
  member.draining = true;
  if (member.hello.role == Role::kExpert) placement_.shard_leaving(member.hello.incarnation, now);
  emit(Note{"draining", member.hello.name});
  events_.add("draining", member.hello.name, "", now);
  all_due_ = true;
  ++draining_;
  ++counters_.members_drained;
}

void SchedulerCore::advance_drains(TimePoint now) {
  if (draining_ == 0) return;
  for (auto& [session, member] : members_.members()) {
    if (!member.draining || member.drained) continue;
    const auto worker = workers_.find(member.hello.incarnation);
    if (worker != workers_.end()) {
      if (worker->second.running() > 0) move_off(member.hello.incarnation, worker->second);
      if (!worker->second.idle()) continue;
      emit(Note{"drained", member.hello.name});
      events_.add("drained", member.hello.name, "", now);
    } else {
      if (!placement_.free_to_go(member.hello.incarnation)) continue;
      const std::string last = placement_.last_to_go() ? "though no shard is left that could take over" : "";
      emit(Note{"drained", member.hello.name + (last.empty() ? "" : ", " + last)});
      events_.add("drained", member.hello.name, last, now);
    }
    member.drained = true;
    --draining_;
    emit(SendMember{session, Drained{}});
  }
}

void SchedulerCore::move_off(Incarnation from, WorkerPlanner& worker) {
  uint32_t largest = 0;  // pages of a worker that can take over
  for (const auto& [incarnation, other] : workers_) {
    if (takes_new_work(incarnation)) largest = std::max(largest, other.pool().total());
  }
  if (largest == 0) return;
  for (Choice* choice : requests_.running_on(from)) {
    if (WorkerPlanner::blocks_for(choice->request->max_positions()) > largest) continue;
    worker.end(choice->seq);
    due_.push_back(from);
    mark(*choice->request, TimelineMarkKind::kMoved, choice->index);
    requests_.set_waiting(*choice);
    ++counters_.sequences_moved;
  }
}

void SchedulerCore::handle(Tick&, TimePoint now) {
  all_due_ = true;
  run_timers(now);
}

void SchedulerCore::forgive_own_stall(TimePoint now) {
  // A scheduler that was itself stopped or starved has not listened: silence in that time is no fault of the
  // members.
  if (timer_due_ == kNever) return;
  const Nanos late = now - std::max(timer_due_, last_now_);
  timer_due_ = kNever;
  if (late < options_.lease_ms * kMillisecond / 2) return;
  members_.extend_leases(late);
  for (auto& [incarnation, worker] : workers_) worker.forgive(now);
  forgive_stalls(late);
  ++counters_.stalls_forgiven;
  events_.add("late", "",
              "this scheduler was late by " + std::to_string(late / kMillisecond) + " ms; leases were extended",
              now);
}

void SchedulerCore::run_timers(TimePoint now) {
  std::vector<DeadMember> dead;
  const uint32_t suspects = members_.check_leases(now, dead);
  counters_.members_suspected += suspects;
  if (suspects > 0) tell_suspicions(now);
  const auto also_dead = [&](Incarnation incarnation, const std::string& what, uint32_t limit_ms) {
    const Member* member = members_.find(incarnation);
    if (member == nullptr) return;
    for (const DeadMember& listed : dead) {
      if (listed.session == member->session) return;
    }
    dead.push_back({member->session, deadline_exceeded(member->hello.name + what + " in " +
                                                       std::to_string(limit_ms) + " ms")});
  };
  for (const Incarnation shard : placement_.overdue(now)) {
    also_dead(shard, " did not get ready for its experts", options_.placement_ready_timeout_ms);
  }
  for (const auto& [incarnation, worker] : workers_) {
    if (!placement_.active_complete() || worker.owing_since() == kNever) continue;
    if (now - worker.owing_since() < options_.step_timeout_ms * kMillisecond) continue;
    also_dead(incarnation, " did not finish a step", options_.step_timeout_ms);
  }
  for (const DeadMember& member : dead) lose_member(member.session, member.cause, true, now);
  look_for_stalls(now);
  for (Request* request : requests_.expired(now)) {
    if (request->ended()) {
      requests_.erase(*request);  // its gateway did not come back for the end
    } else if (request->deadline <= now) {
      end_request(*request, FinishReason::kDeadline, "the deadline has passed");
    } else {
      ++counters_.requests_abandoned;
      requests_.forget_context(*request);
      end_request(*request, FinishReason::kCancelled, "");
      requests_.erase(*request);
    }
  }
}

void SchedulerCore::update_fleet() {
  FleetInfo info;
  if (const auto& model = members_.model()) {
    // A worker whose pages hold less than the context bounds what can be asked for.
    const uint64_t pages = uint64_t{largest_pool_} * kBlockTokens;
    info.max_positions = model->max_positions;
    if (pages > 0 && pages < info.max_positions) info.max_positions = static_cast<uint32_t>(pages);
    info.numerics_id = model->numerics_id;
    info.model_fingerprint = model->model_fingerprint;
  }
  if (workers_.empty()) {
    info.not_ready = "no attention worker is there";
  } else if (std::none_of(members_.all().begin(), members_.all().end(), [](const auto& entry) {
               return entry.second.hello.role == Role::kAttention && !entry.second.draining;
             })) {
    info.not_ready = "every attention worker is draining";
  } else if (placement_.shards() == 0) {
    info.not_ready = "no expert shard is there";
  } else if (const uint64_t pairs = uint64_t{members_.model()->num_layers} * members_.model()->num_experts;
             !placement_.active_complete() && placement_.slots() < pairs) {
    info.not_ready = "the expert shards (" + std::to_string(placement_.shards()) + ") have room for " +
                     std::to_string(placement_.slots()) + " of " + std::to_string(pairs) +
                     " experts of all layers (experts.capacity_bytes)";
  } else if (!placement_.active_complete()) {
    info.not_ready =
        "the expert shards (" + std::to_string(placement_.shards()) + ") are preparing their experts";
  }
  // A token goes through a new shard only once its worker has turned to the placement that names it.
  info.shard_set = workers_follow() ? shard_set_.follow(placement_.active()) : fleet_.shard_set;
  info.ready = info.not_ready.empty();
  info.loaded_permille = members_.loaded_permille();
  info.max_router_context_bytes = options_.max_router_context_bytes;
  const bool progressed = info.loaded_permille >= fleet_.loaded_permille + kLoadedStep ||
                          (info.loaded_permille == 1000 && fleet_.loaded_permille < 1000) ||
                          info.loaded_permille < fleet_.loaded_permille;
  if (info.ready == fleet_.ready && info.not_ready == fleet_.not_ready &&
      info.numerics_id == fleet_.numerics_id && info.max_positions == fleet_.max_positions &&
      info.shard_set == fleet_.shard_set && !progressed)
    return;
  fleet_ = std::move(info);
  for (const auto& [session, gateway] : gateways_) emit(SendFleet{session, fleet_});
}

Welcome SchedulerCore::welcome() const {
  Welcome result;
  result.scheduler = options_.incarnation;
  result.lease_ns = options_.lease_ms * kMillisecond;
  return result;
}

StatusSnapshot SchedulerCore::status() const {
  StatusSnapshot snapshot;
  snapshot.scheduler = options_.incarnation;
  snapshot.fleet = fleet_;
  snapshot.epoch = placement_.active().epoch();
  snapshot.requests_waiting = static_cast<uint32_t>(requests_.queue().size());
  snapshot.requests_running = requests_.running();
  snapshot.preparing_epoch = placement_.preparing_epoch();
  snapshot.busiest = placement_.busiest(false);
  if (const auto& model = members_.model()) {
    snapshot.layers = model->num_layers;
    snapshot.experts = model->num_experts;
  }
  for (const uint32_t stalled : counters_.requests_stalled) snapshot.requests_stalled += stalled;
  snapshot.events.assign(events_.entries().begin(), events_.entries().end());
  snapshot.now = last_now_;
  std::map<Incarnation, ShardFigures> figures = placement_.figures(last_now_);
  for (const auto& [session, member] : members_.all()) {
    MemberSnapshot entry;
    entry.role = member.hello.role;
    entry.name = member.hello.name;
    entry.incarnation = member.hello.incarnation;
    entry.state = "ready";
    show_process(member.hello, member.joined, entry);
    if (const auto it = workers_.find(member.hello.incarnation); it != workers_.end()) {
      entry.kv_blocks_total = it->second.pool().total();
      entry.kv_blocks_used = it->second.pool().used();
      entry.kv_blocks_cached = it->second.pool().cached();
      entry.sequences = it->second.running();
    } else {
      entry.shard = figures[member.hello.incarnation];
      entry.shard.holding = member.held_experts;
      if (placement_.active().find_shard(member.hello.incarnation) < 0) entry.state = "joining";
    }
    if (member.draining) entry.state = member.drained ? "drained" : "draining";
    if (member.suspect) entry.state = "suspect";
    snapshot.members.push_back(std::move(entry));
  }
  for (const auto& [session, gateway] : gateways_) {
    const Hello& hello = gateway.hello;
    if (!hello.incarnation) continue;  // in-process: no process of its own to show
    MemberSnapshot entry;
    show_process(hello, gateway.joined, entry);
    entry.role = Role::kRouter;
    entry.name = hello.name;
    entry.incarnation = hello.incarnation;
    entry.state = "ready";
    snapshot.members.push_back(std::move(entry));
  }
  return snapshot;
}

SchedulerMetrics SchedulerCore::metrics() const {
  SchedulerMetrics metrics = counters_;
  metrics.requests_waiting = static_cast<uint32_t>(requests_.queue().size());
  metrics.tokens_waiting = requests_.queue().tokens();
  metrics.requests_running = requests_.running();
  metrics.requests_detached = requests_.detached();
  metrics.requests_resumable = requests_.kept();
  metrics.resumable_bytes = requests_.kept_bytes();
  metrics.router_context_bytes = requests_.context_bytes();
  metrics.workers = static_cast<uint32_t>(workers_.size());
  metrics.shards = static_cast<uint32_t>(placement_.shards());
  metrics.gateways = static_cast<uint32_t>(gateways_.size());
  metrics.placement_epoch = placement_.active().epoch().value;
  metrics.placement_preparing = placement_.preparing();
  metrics.placement_changes = placement_.changes();
  metrics.homes_added = placement_.homes_added();
  metrics.homes_removed = placement_.homes_removed();
  metrics.timelines = static_cast<uint32_t>(timelines_.size());
  metrics.timelines_opened = timelines_.opened();
  metrics.timelines_refused = timelines_.refused();
  return metrics;
}

void SchedulerCore::show_pool(Incarnation worker) {
  const auto it = workers_.find(worker);
  PoolSum now;
  if (it != workers_.end()) {
    const KvCache& pool = it->second.pool();
    now = {pool.total(), pool.used(), pool.cached(), pool.promised(), pool.evictions()};
  }
  PoolSum& before = shown_[worker];
  counters_.kv_blocks_total += now.total - before.total;
  counters_.kv_blocks_used += now.used - before.used;
  counters_.kv_blocks_cached += now.cached - before.cached;
  counters_.kv_blocks_reserved += now.promised - before.promised;
  counters_.kv_evictions += now.evictions - before.evictions;
  before = now;
  if (it == workers_.end()) shown_.erase(worker);
}

Status SchedulerCore::audit() const {
  RETURN_IF_ERROR(requests_.audit());
  uint32_t running = 0;
  for (const auto& [incarnation, worker] : workers_) {
    RETURN_IF_ERROR(annotate(worker.audit(), "worker " + std::to_string(incarnation.value)));
    running += worker.running();
  }
  if (shown_.size() != workers_.size() && !all_due_) return internal_error("a worker's pool is not shown");
  if (running != requests_.running())
    return internal_error("workers run other sequences than there are requests");
  if (members_.fence_size() > options_.max_fenced_incarnations) return internal_error("too many fences");
  return OkStatus();
}

}  // namespace conclave::scheduler
