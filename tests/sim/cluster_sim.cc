#include "tests/sim/cluster_sim.h"

#include <utility>

#include "libs/base/check.h"
#include "tests/sim/cluster_sim_entities.h"

namespace conclave::scheduler {
namespace {

SimWorld::Options world_options() {
  SimWorld::Options options;
  options.post_jitter = 50 * kMicrosecond;
  return options;
}

}  // namespace

const testing::RandomModel& sim_model() {
  static const testing::RandomModel model(WeightDtype::kBf16, 11,
                                          {.hidden = 32,
                                           .intermediate = 32,
                                           .layers = 2,
                                           .heads = 4,
                                           .kv_heads = 2,
                                           .head_dim = 8,
                                           .rotary_dim = 4,
                                           .experts = 8,
                                           .top_k = 2,
                                           .vocab = 64,
                                           .max_positions = 512});
  return model;
}

ClusterSim::ClusterSim(const ClusterConfig& config)
    : config_(config),
      world_(config.seed, world_options()),
      supervisor_(world_.add_process("supervisor")),
      hub_(std::make_shared<LoopbackHub>()) {
  hub_->set_delay_model(
      [this](Incarnation from, Incarnation to, uint64_t bytes) { return data_delay(from, to, bytes); });
  place_.on_closed = [this](Incarnation member, const Status& cause) {
    dead_.insert(member);
    last_closed_ = message_of(cause);
  };
  start_scheduler();
  for (uint32_t i = 0; i < config_.routers; ++i) start_router(routers_.emplace_back(), {});
  for (uint32_t i = 0; i < config_.workers; ++i) start(add(Role::kAttention));
  for (uint32_t i = 0; i < config_.shards; ++i) start(add(Role::kExpert));
  world_.set_after_step([this] { check(); });
}

ClusterSim::~ClusterSim() {
  world_.set_after_step(nullptr);
  for (Process& process : processes_) stop(process);
  for (Router& router : routers_) router.gateway.reset();
  world_.kill(supervisor_);
  for (Router& router : routers_) world_.kill(*router.process);
  world_.kill(*place_.process);
  loop_.reset();
}

std::optional<Nanos> ClusterSim::data_delay(Incarnation from, Incarnation to, uint64_t bytes) {
  const auto a = by_incarnation_.find(from);
  const auto b = by_incarnation_.find(to);
  const TimePoint now = world_.now();
  for (const Cut& parted : cuts_) {
    if (now >= parted.until || a == by_incarnation_.end() || b == by_incarnation_.end()) continue;
    if (parted.a == a->second && parted.b == b->second) return std::nullopt;
    if (parted.a == b->second && parted.b == a->second) return std::nullopt;
  }
  // The news that a connection was closed is the kernel's, and is not lost.
  if (bytes > 0 && !healed_ && config_.network_loss > 0 && world_.random().chance(config_.network_loss))
    return std::nullopt;
  Nanos delay =
      static_cast<Nanos>(10 * kMicrosecond + static_cast<Nanos>(world_.random().below(kMillisecond)));
  for (const auto& side : {a, b}) {
    if (side != by_incarnation_.end() && now < side->second->slow_until) delay += side->second->slow_by;
  }
  return delay;
}

Stream& ClusterSim::submit(AcceptedRequest request) {
  Router& router = routers_[request.id.lo % routers_.size()];
  if (router.gateway) return router.gateway->submit(std::move(request));
  Stream& stream = router.waiting[request.id];  // its client tries again
  stream.request = std::move(request);
  stream.choices.resize(stream.request.choices);
  return stream;
}

void ClusterSim::cancel(Stream& stream) {
  stream.cancelled = true;
  Router& router = routers_[stream.request.id.lo % routers_.size()];
  if (router.gateway) router.gateway->cancel(stream);
}

void ClusterSim::cancel_choice(Stream& stream, uint32_t choice) {
  stream.choices[choice].cancelled = true;
  Router& router = routers_[stream.request.id.lo % routers_.size()];
  if (router.gateway) router.gateway->cancel_choice(stream, choice);
}

void ClusterSim::slow(const std::string& name, Nanos by, Nanos time) {
  Process& process = find(name);
  process.slow_by = by;
  process.slow_until = world_.now() + time;
}

void ClusterSim::cut(const std::string& a, const std::string& b, Nanos time) {
  cuts_.push_back({&find(a), &find(b), world_.now() + time});
}

void ClusterSim::cut_off(const std::string& name, Nanos time) {
  Process& process = find(name);
  if (process.running()) process.link->block(world_.now() + time);
}

void ClusterSim::heal() {
  healed_ = true;
  cuts_.clear();
  for (Process& process : processes_) {
    process.slow_until = 0;
    if (process.faults != nullptr) process.faults->set_plan({});
  }
}

std::vector<std::string> ClusterSim::names(Role role) const {
  std::vector<std::string> result;
  for (const Process& process : processes_) {
    if (process.role == role && !process.leaving) result.push_back(process.name);
  }
  return result;
}

void ClusterSim::pause(const std::string& name, Nanos time) {
  Process& process = find(name);
  if (process.running()) world_.pause(*process.executor, world_.now() + time);
}

bool ClusterSim::up(const std::string& name) const {
  const Process& process = find(name);
  if (!process.running()) return false;
  return process.worker ? process.worker->ready() : process.shard->ready();
}

ClusterSim::Process& ClusterSim::find(const std::string& name) {
  return const_cast<Process&>(std::as_const(*this).find(name));
}

const ClusterSim::Process& ClusterSim::find(const std::string& name) const {
  for (const Process& process : processes_) {
    if (process.name == name) return process;
  }
  CONCLAVE_CHECK(false);
  std::abort();
}

void ClusterSim::learn_dead(Process& worker, const PlacementTable& table) {
  for (const Incarnation shard : dead_) {
    if (table.find_shard(shard) < 0) worker.told_dead.insert(shard);
  }
}

void ClusterSim::take(Process& worker, const TakenRow& row) {
  const std::string what = "token " + std::to_string(row.token) + ", slot " + std::to_string(row.slot) +
                           ", computed by incarnation " + std::to_string(row.shard.value);
  if (worker.told_dead.contains(row.shard)) violate(what + ", was combined though that is fenced");
  if (row.round != row.sent_in) violate(what + ", is late and was combined");
  if (!worker.taken.insert((row.round << 20) | (static_cast<uint64_t>(row.token) << 8) | row.slot).second) {
    violate(what + ", was counted twice");
  }
}

void ClusterSim::violate(const std::string& what) {
  if (!violation_.empty()) return;
  violation_ = "seed " + std::to_string(config_.seed) + ", t=" + std::to_string(world_.now() / kMillisecond) +
               " ms: " + what;
}

void ClusterSim::check() {
  for (const Router& router : routers_) {
    if (router.gateway && !router.gateway->fault().empty()) violate(router.gateway->fault());
  }
  if (!loop_ || ++events_ % config_.audit_every != 0) return;
  if (const Status audit = loop_->audit(); !audit.ok()) violate(message_of(audit));
  if (loop_->metrics().protocol_violations != 0) violate("a member broke the protocol: " + last_closed_);
}

std::string ClusterSim::pending() const {
  if (!loop_) return "there is no scheduler";
  if (!loop_->fleet().ready) return "the fleet is not ready: " + loop_->fleet().not_ready;
  const SchedulerMetrics metrics = loop_->metrics();
  if (metrics.requests_running + metrics.requests_waiting > 0) return "requests run or wait";
  if (metrics.kv_blocks_used > 0) return std::to_string(metrics.kv_blocks_used) + " pages are in use";
  if (metrics.kv_blocks_reserved > 0)
    return std::to_string(metrics.kv_blocks_reserved) + " pages are promised";
  uint64_t workers = 0, shards = 0;
  for (const Process& process : processes_) {
    if (process.gone) continue;
    if (process.leaving) return process.name + " has not left";
    if (!process.running() || !up(process.name)) return process.name + " is not back";
    ++(process.worker ? workers : shards);
    if (process.worker && process.worker->metrics().sequences > 0) return process.name + " keeps sequences";
    if (process.worker && process.worker->metrics().queued_plans > 0) return process.name + " has plans";
    if (process.shard && process.shard->metrics().queued_items > 0) return process.name + " has rows";
  }
  if (metrics.workers != workers) return "the scheduler knows another number of workers";
  if (metrics.shards != shards) return "the scheduler knows another number of shards";
  return "";
}

std::string ClusterSim::run_idle(Nanos limit) {
  const TimePoint until = world_.now() + limit;
  std::string what = pending();
  while (!what.empty() && world_.now() < until && violation_.empty()) {
    run_for(100 * kMillisecond);
    what = pending();
  }
  return violation_.empty() ? what : violation_;
}

bool ClusterSim::run_ready() {
  return world_.run_until([this] { return (loop_ && loop_->fleet().ready) || !violation_.empty(); },
                          world_.now() + 60 * kSecond) &&
         violation_.empty();
}

size_t ClusterSim::open_streams() const {
  size_t open = 0;
  for (const Router& router : routers_) {
    for (const auto& [id, stream] : streams(router)) open += stream.ended() ? 0 : 1;
  }
  return open;
}

size_t ClusterSim::tokens_delivered() const {
  size_t tokens = 0;
  for (const Router& router : routers_) {
    for (const auto& [id, stream] : streams(router)) {
      for (const Stream::Choice& choice : stream.choices) tokens += choice.tokens.size();
    }
  }
  return tokens;
}

bool ClusterSim::run_streams(Nanos limit) {
  return world_.run_until([this] { return open_streams() == 0 || !violation_.empty(); },
                          world_.now() + limit) &&
         violation_.empty();
}

uint64_t ClusterSim::resubmitted() const {
  uint64_t sum = past_resubmitted_;
  for (const Router& router : routers_) sum += router.gateway ? router.gateway->resubmitted() : 0;
  return sum;
}

ExchangeMetrics ClusterSim::exchange_metrics() const {
  ExchangeMetrics sum = past_exchange_;
  for (const Process& process : processes_) {
    if (process.worker) accumulate(sum, process.worker->metrics().exchange);
  }
  return sum;
}

uint64_t ClusterSim::injected_faults() const {
  uint64_t sum = past_injected_;
  for (const Process& process : processes_) {
    if (process.faults != nullptr) sum += process.faults->counts().total();
  }
  return sum;
}

uint64_t ClusterSim::replayed() const {
  return past_replayed_ + (loop_ ? loop_->metrics().sequences_replayed : 0);
}

uint64_t ClusterSim::members_lost() const { return past_lost_ + (loop_ ? loop_->metrics().members_lost : 0); }

Stream undisturbed(const AcceptedRequest& request) {
  ClusterConfig config;
  config.shards = 1;
  ClusterSim cluster(config);
  CONCLAVE_CHECK(cluster.run_ready());
  const Stream& stream = cluster.submit(request);
  CONCLAVE_CHECK(cluster.run_streams(600 * kSecond));
  return stream;
}

}  // namespace conclave::scheduler
