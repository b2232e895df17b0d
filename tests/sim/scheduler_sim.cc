#include "tests/sim/scheduler_sim.h"

#include <algorithm>

#include "tests/sim/scheduler_sim_entities.h"

namespace conclave::scheduler {
SchedulerSim::SchedulerSim(const SimConfig& config) : config_(config), random_(config.seed) {
  options_.max_waiting_requests = static_cast<uint32_t>(between(4, 16));
  options_.max_waiting_tokens = static_cast<uint64_t>(between(100, 500));
  options_.max_running_requests = static_cast<uint32_t>(between(3, 9));
  options_.step_token_budget = static_cast<uint32_t>(between(6, 40));
  options_.prefill_chunk_tokens = static_cast<uint32_t>(between(3, 20));
  options_.max_batch_sequences = static_cast<uint32_t>(between(1, 6));
  options_.steps_in_flight = static_cast<uint32_t>(between(1, 3));
  options_.preemption = !random_.chance(0.15);
  options_.admission_reserve_tokens = static_cast<uint32_t>(between(0, 24));
  options_.max_owed_prefill_tokens = random_.chance(0.3) ? 0 : static_cast<uint32_t>(between(1, 60));
  options_.itl_target_ms = random_.chance(0.5) ? 0 : static_cast<uint32_t>(between(1, 20));
  options_.min_prefill_tokens = static_cast<uint32_t>(between(1, 8));
  options_.band_aging_ms = random_.chance(0.2) ? 0 : static_cast<uint32_t>(between(20, 2000));
  options_.fair_tenants = !random_.chance(0.15);
  options_.tenant_weights = {{"other", 3}};
  options_.max_idle_tenants = 2;
  options_.deadline_order = !random_.chance(0.15);
  options_.queue_reserve_percent = static_cast<uint32_t>(between(0, 30));
  options_.prefix_cache = !random_.chance(0.1);
  options_.lease_ms = 300;
  options_.dead_after_ms = 1500;
  options_.dead_after_trouble_ms = 700;
  options_.max_peer_troubles = 5;
  options_.placement_settle_ms = 20;
  options_.placement_ready_timeout_ms = 2500;
  options_.gateway_grace_ms = 400;
  options_.max_fenced_incarnations = 8;
  if (config.flood) {
    options_.max_waiting_requests = 64;
    options_.max_waiting_tokens = 5000;
    options_.fair_tenants = true;
    options_.band_aging_ms = 0;
  }
  // Whoever loses the last result of a worker learns of it only so.
  if (config.lose_a_step_result) options_.step_timeout_ms = 20'000;
}

SchedulerSim::~SchedulerSim() = default;

void SchedulerSim::violate(const std::string& what) {
  if (outcome_.violation.empty()) {
    outcome_.violation = "seed " + std::to_string(config_.seed) +
                         ", t=" + std::to_string(now_ / kMillisecond) + " ms: " + what;
  }
}

void SchedulerSim::at(TimePoint when, std::function<void()> task) {
  queue_.emplace(std::make_pair(std::max(when, now_), serial_++), std::move(task));
}

SimOutcome SchedulerSim::run() {
  end_of_chaos_ = now_ + config_.chaos;
  start_scheduler();
  const int workers = config_.flood ? 1 : static_cast<int>(between(1, 3));
  const int shards = static_cast<int>(between(1, 3));
  for (int i = 0; i < workers; ++i) add_node(Role::kAttention, "attention-" + std::to_string(i));
  for (int i = 0; i < shards; ++i) add_node(Role::kExpert, "expert-" + std::to_string(i));
  for (Node& node : nodes_) after(between(0, 50 * kMillisecond), [this, &node] { connect(node); });
  for (int i = 0; i < 2; ++i) {
    gateways_.emplace_back();
    gateways_.back().name = "router-" + std::to_string(i);
  }
  for (Gateway& gateway : gateways_) {
    connect(gateway);
    after(between(0, 300 * kMillisecond), [this, &gateway] { submit_new(gateway); });
  }
  if (!config_.flood) after(500 * kMillisecond, [this] { chaos(); });

  const TimePoint limit = end_of_chaos_ + config_.settle;
  while (outcome_.violation.empty()) {
    const TimePoint tick = std::max({core_->next_timer(), stalled_until_, now_});
    const bool timer = core_->next_timer() != kNever;
    if (queue_.empty() && !timer) break;
    const bool run_tick = timer && (queue_.empty() || tick < queue_.begin()->first.first);
    const TimePoint next = run_tick ? tick : queue_.begin()->first.first;
    if (next > limit) break;
    if (now_ > end_of_chaos_ && quiet()) break;
    now_ = next;
    ++outcome_.events;
    if (run_tick) {
      feed(Tick{});
      continue;
    }
    auto task = std::move(queue_.begin()->second);
    queue_.erase(queue_.begin());
    task();
  }

  for (Gateway& gateway : gateways_) {
    for (auto& [id, client] : gateway.clients) {
      if (client.state == Client::kSubmitted || client.state == Client::kAccepted) {
        violate("request " + std::to_string(id.lo) + " never ended");
      }
      count(client.state == Client::kRefused ? "client refused" : "client ended");
    }
  }
  const SchedulerMetrics m = core_->metrics();
  if (m.kv_blocks_used != 0 || m.kv_blocks_reserved != 0) violate("pages are still in use when all is over");
  if (m.requests_running != 0 || m.requests_waiting != 0 || m.requests_detached != 0)
    violate("requests are left over");
  for (Node& node : nodes_) {
    if (node.session && node.model.owned_blocks() != 0) violate(node.name + " still holds pages");
  }
  absorb_metrics();
  outcome_.trace_hash = trace_;
  return outcome_;
}

bool SchedulerSim::quiet() const {
  for (const Gateway& gateway : gateways_) {
    for (const auto& [id, client] : gateway.clients) {
      if (client.state == Client::kSubmitted || client.state == Client::kAccepted) return false;
    }
  }
  for (const Node& node : nodes_) {
    if (!node.session || node.busy || !node.plans.empty() || node.model.owned_blocks() != 0) return false;
  }
  const SchedulerMetrics m = core_->metrics();
  return m.requests_detached == 0 && m.kv_blocks_used == 0 && m.workers > 0;
}

// --- the core and its driver
// ----------------------------------------------------------------------------------------

void SchedulerSim::start_scheduler() {
  ++scheduler_life_;
  options_.incarnation = Incarnation(scheduler_life_);
  core_ = std::make_unique<SchedulerCore>(options_, config_.faults);
  emitted_.clear();
  inbox_.clear();
  plan_pending_ = false;
}

void SchedulerSim::restart_scheduler() {
  count("scheduler restarted");
  absorb_metrics();
  for (Node& node : nodes_) disconnect(node);
  for (Gateway& gateway : gateways_) drop(gateway);
  start_scheduler();
}

void SchedulerSim::absorb_metrics() {
  const SchedulerMetrics m = core_->metrics();
  count("requests_accepted", m.requests_accepted);
  count("requests_refused_full", m.requests_refused_full);
  count("requests_refused_invalid", m.requests_refused_invalid);
  count("requests_refused_unready", m.requests_refused_unready);
  count("requests_reattached", m.requests_reattached);
  count("requests_finished_stop", m.requests_finished_stop);
  count("requests_finished_length", m.requests_finished_length);
  count("requests_cancelled", m.requests_cancelled);
  count("requests_abandoned", m.requests_abandoned);
  count("requests_deadline", m.requests_deadline);
  count("sequences_replayed", m.sequences_replayed);
  count("sequences_moved", m.sequences_moved);
  count("sequences_preempted", m.sequences_preempted);
  count("tokens_discarded", m.tokens_discarded);
  count("prompt_tokens_cached", m.prompt_tokens_cached);
  count("kv_evictions", m.kv_evictions);
  count("members_refused", m.members_refused);
  count("members_lost", m.members_lost);
  count("members_suspected", m.members_suspected);
  count("peer_troubles", m.peer_troubles);
  count("placements_published", m.placements_published);
  count("stalls_forgiven", m.stalls_forgiven);
  if (m.requests_failed != 0) violate("a request failed although no worker reported a failure");
  if (m.protocol_violations != 0 && !config_.lose_a_step_result) violate("an honest worker was accused");
  count("protocol_violations", m.protocol_violations);
}

// Events meet the scheduler when it runs; a stalled one takes them later, in order.
void SchedulerSim::to_core(Event event) {
  inbox_.push_back(std::move(event));
  drain();
}

void SchedulerSim::drain() {
  while (!inbox_.empty() && now_ >= stalled_until_) {
    Event event = std::move(inbox_.front());
    inbox_.pop_front();
    // The driver drops what a session says after the core closed it.
    const auto* message = std::get_if<MemberMessage>(&event);
    if (message == nullptr || sessions_.at(message->session).alive) feed(std::move(event));
  }
}

void SchedulerSim::stall(TimePoint until) {
  count("scheduler stalled");
  stalled_until_ = std::max(stalled_until_, until);
  at(stalled_until_, [this] { drain(); });
}

void SchedulerSim::feed(Event event) {
  note(static_cast<uint64_t>(now_) * 8 + event.index());
  const auto* submit = std::get_if<Submit>(&event);
  const RequestId submitted = submit ? submit->request.id : RequestId{};
  std::vector<uint32_t> delivered;
  for (uint32_t c = 0; submit != nullptr && c < submit->request.choices; ++c) {
    const auto& have = submit->request.delivered;
    delivered.push_back(c < have.size() ? static_cast<uint32_t>(have[c].tokens.size()) : 0);
  }
  const uint64_t accepted = core_->metrics().requests_accepted;
  Actions actions = core_->on_event(std::move(event), now_);
  // Taken in anew: what an earlier life of the request told anybody and nobody received is not known here.
  if (core_->metrics().requests_accepted != accepted) {
    for (uint32_t c = 0; c < delivered.size(); ++c) emitted_[{submitted, c}] = delivered[c];
  }
  perform(std::move(actions));
  check_core();
  // The driver plans after each burst: sometimes at once, sometimes after more events of the same moment.
  if (random_.chance(0.5)) {
    perform(core_->plan(now_));
    check_core();
  } else if (!plan_pending_) {
    plan_pending_ = true;
    after(between(0, kMillisecond), [this, life = scheduler_life_] {
      if (life != scheduler_life_) return;
      plan_pending_ = false;
      perform(core_->plan(now_));
      check_core();
    });
  }
}

void SchedulerSim::check_core() {
  if (!config_.checks) return;
  if (const Status status = core_->audit(); !status.ok()) violate(message_of(status));
  const SchedulerMetrics m = core_->metrics();
  if (m.requests_running > options_.max_running_requests)
    violate("more requests run than max_running_requests");
  if (m.kv_blocks_used > m.kv_blocks_total) violate("more pages are used than there are");
}

void SchedulerSim::perform(Actions actions) {
  for (Action& action : actions) {
    note(action.index() + 100);
    std::visit([this](auto& a) { do_action(a); }, action);
  }
}

void SchedulerSim::do_action(SendMember& action) {
  Session& session = sessions_.at(action.session);
  if (const auto* plan = std::get_if<BatchPlan>(&action.message)) {
    note(plan->step.value);
    for (const PlanSlice& slice : plan->slices) note(slice.seq.value * 1000 + slice.start * 10 + slice.count);
    if (config_.flood) check_service(*plan);
    for (const SequenceStart& start : plan->starts) {
      if (start.tokens.size() < start.prompt_tokens + emitted_[{start.request, start.choice}]) {
        violate("a replay of request " + std::to_string(start.request.lo) + " generates told tokens again");
      }
    }
  }
  if (!session.alive) return;
  Node& node = *session.node;
  const auto* update = std::get_if<PlacementUpdate>(&action.message);
  if (update != nullptr && update->release) check_release(node, update->table);
  session.down_at = std::max(session.down_at, now_ + between(kMicrosecond, 3 * kMillisecond));
  at(session.down_at, [this, &node, id = action.session, message = std::move(action.message)]() mutable {
    if (node.session != id) return;
    node.inbox.push_back(std::move(message));
    drain(node);
  });
}

void SchedulerSim::check_service(const BatchPlan& plan) {
  // What runs goes on whoever waits, and rows computed again after a preemption are nobody's: the other one
  // may be ahead by what that makes.
  constexpr int64_t kSlack = 2000;
  for (const SequenceStart& start : plan.starts) {
    const bool modest = modest_.contains(start.request);
    if (modest) {
      modest_waiting_.erase(start.request);
      modest_running_.insert(start.seq);
      count("modest started");
    } else if (!modest_waiting_.empty() && gap_ > kSlack) {
      violate("a tenant waits while another one got " + std::to_string(gap_) + " rows more and starts");
    }
  }
  for (const PlanSlice& slice : plan.slices) {
    gap_ += modest_running_.contains(slice.seq) ? -int64_t{slice.count} : int64_t{slice.count};
  }
  gap_ = std::max<int64_t>(gap_, 0);
}

void SchedulerSim::do_action(CloseMember& action) {
  Session& session = sessions_.at(action.session);
  session.alive = false;
  Node& node = *session.node;
  const TimePoint when = std::max(session.down_at, now_) + kMillisecond;
  at(when, [this, &node, id = action.session] {
    if (node.session != id) return;
    node_later(node, 0, [this, &node, id] {
      if (node.session != id) return;
      disconnect(node);
    });
  });
}

void SchedulerSim::do_action(SendWelcome&) {}
void SchedulerSim::do_action(SendFleet&) {}
void SchedulerSim::do_action(ReplyAdopt&) { violate("an adoption that nobody asked for"); }
void SchedulerSim::do_action(ReportStall&) {}

void SchedulerSim::do_action(CloseGateway&) { violate("a gateway was closed"); }

void SchedulerSim::do_action(ReplySubmit& action) {
  Session& session = sessions_.at(action.gateway);
  Gateway& gateway = *session.gateway;
  session.down_at = std::max(session.down_at, now_ + between(kMicrosecond, 3 * kMillisecond));
  if (action.status.ok() && modest_.contains(action.request)) {
    if (modest_waiting_.empty()) gap_ = 0;
    modest_waiting_.insert(action.request);
  }
  at(session.down_at, [this, &gateway, action] {
    if (gateway.session == action.gateway) gateway_replies(gateway, action.request, action.status);
  });
}

void SchedulerSim::do_action(ReplyDrain& action) {
  count(action.status.ok() ? "drain taken" : "drain refused");
}

void SchedulerSim::do_action(Note& action) { count(action.event); }

void SchedulerSim::do_action(SendTokens& action) {
  const TokenEvent& event = action.event;
  if (event.finish != FinishReason::kNone) modest_waiting_.erase(event.request);
  note(event.request.lo * 1000 + event.choice * 500 + event.index + static_cast<uint64_t>(event.finish));
  for (const TokenId token : event.tokens) note(token);
  uint32_t& told = emitted_[{event.request, event.choice}];
  told = std::max(told, event.index + static_cast<uint32_t>(event.tokens.size()));
  Session& session = sessions_.at(action.gateway);
  if (config_.lose_a_token_event && !lost_one_ && session.alive && event.index > 0 &&
      event.finish == FinishReason::kNone) {
    lost_one_ = true;
    return;
  }
  Gateway& gateway = *session.gateway;
  session.down_at = std::max(session.down_at, now_ + between(kMicrosecond, 3 * kMillisecond));
  at(session.down_at, [this, &gateway, action] {
    if (gateway.session == action.gateway) gateway_tokens(gateway, action.event);
  });
}

}  // namespace conclave::scheduler
