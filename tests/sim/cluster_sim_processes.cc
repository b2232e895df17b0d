// How processes of the simulated cluster start, end and come back.
#include <utility>

#include "libs/base/check.h"
#include "tests/sim/cluster_sim_entities.h"

namespace conclave::scheduler {
namespace {

constexpr Nanos kPatience = 10 * kSecond;  // of a member that was asked to leave

// The fastest of this machine: all have the same bits.
kernels::Context sim_kernels() {
  static const kernels::Isa isa = kernels::choose_isa().value_or(kernels::Isa::kScalar);
  return {.isa = isa, .pool = nullptr, .dot = kernels::DotProduct::kNever};
}

}  // namespace

void ClusterSim::start_scheduler() {
  ++place_.life;
  dead_.clear();  // it knows nobody
  SchedulerOptions options = config_.scheduler;
  options.incarnation = Incarnation(next_incarnation_++);
  place_.process = &world_.add_process("scheduler");
  loop_ = std::make_unique<SchedulerLoop>(options, *place_.process);
  place_.loop = loop_.get();
}

void ClusterSim::kill_scheduler() {
  if (!loop_) return;
  const SchedulerMetrics metrics = loop_->metrics();
  past_replayed_ += metrics.sequences_replayed;
  past_lost_ += metrics.members_lost;
  world_.kill(*place_.process);
  place_.loop = nullptr;
  loop_.reset();
  for (Process& process : processes_) {
    if (process.running()) process.link->reset();
  }
  for (Router& router : routers_) {
    if (router.gateway) router.gateway->reset();
  }
  supervisor_.post_at(world_.now() + config_.restart_after, [this] {
    ++restarts_;
    start_scheduler();
  });
}

void ClusterSim::start_router(Router& router, Streams streams) {
  router.process = &world_.add_process("router");
  router.gateway = std::make_unique<SimGateway>(world_, place_, *router.process, std::move(streams));
}

void ClusterSim::kill_router(uint32_t index) {
  Router& router = routers_.at(index);
  if (!router.gateway) return;
  const SessionId session = router.gateway->session();
  past_resubmitted_ += router.gateway->resubmitted();
  world_.kill(*router.process);
  router.waiting = router.gateway->release();
  router.gateway.reset();
  supervisor_.post_at(world_.now() + kMillisecond, [this, session, life = place_.life] {
    if (session && loop_ && life == place_.life)
      loop_->gateway_closed(session, unavailable("connection reset"));
  });
  supervisor_.post_at(world_.now() + config_.restart_after, [this, &router] {
    ++restarts_;
    start_router(router, std::exchange(router.waiting, {}));
  });
}

const Streams& ClusterSim::streams(const Router& router) const {
  return router.gateway ? router.gateway->streams() : router.waiting;
}

// A connection reset, as the scheduler of the time sees it.
void ClusterSim::tell_lost(const Process& process, SessionId session, Nanos delay) {
  if (!session) return;
  supervisor_.post_at(world_.now() + delay,
                      [this, session, incarnation = process.incarnation, life = place_.life] {
                        if (!loop_ || life != place_.life) return;
                        dead_.insert(incarnation);
                        loop_->member_closed(session, unavailable("connection reset"));
                      });
}

ClusterSim::Process& ClusterSim::add(Role role) {
  uint32_t number = 0;
  for (const Process& process : processes_) number += process.role == role ? 1 : 0;
  Process& process = processes_.emplace_back();
  process.role = role;
  process.name = (role == Role::kAttention ? "attention-" : "expert-") + std::to_string(number);
  return process;
}

std::string ClusterSim::join(Role role) {
  Process& process = add(role);
  start(process);
  return process.name;
}

void ClusterSim::start(Process& process) {
  if (process.running() || process.gone) return;
  process.executor = &world_.add_process(process.name);
  process.incarnation = Incarnation(next_incarnation_++);
  process.told_dead.clear();
  process.taken.clear();
  by_incarnation_[process.incarnation] = &process;

  TransportOptions transport;
  transport.self = process.incarnation;
  transport.secret = "simulation";
  transport.fleet = "simulation";
  transport.connect_deadline = 200 * kMillisecond;
  transport.keepalive_interval = 100 * kMillisecond;
  transport.keepalive_timeout = 1 * kSecond;
  transport.random = [this] { return world_.random().next(); };
  process.transport = std::make_unique<LoopbackTransport>(hub_, *process.executor, transport);
  if (process.role == Role::kAttention) {
    make_worker(process);
  } else {
    make_shard(process);
  }
}

void ClusterSim::make_worker(Process& process) {
  const FaultPlan plan = healed_ ? FaultPlan{} : config_.worker_faults;
  auto faults = std::make_unique<FaultTransport>(std::move(process.transport), *process.executor,
                                                 world_.random().next(), plan);
  process.faults = faults.get();
  process.transport = std::move(faults);
  if (config_.keep_fenced)
    process.transport = std::make_unique<UnclosingTransport>(std::move(process.transport));

  const testing::RandomModel& model = sim_model();
  WorkerOptions options;
  options.name = process.name;
  options.numerics_id = "sim";
  options.model_fingerprint = "random";
  options.kv_blocks = config_.kv_blocks;
  options.max_batch_tokens = 64;
  options.micro_batch_min_rows = 2;  // small batches, and still two in flight
  options.exchange.deadline_floor = 50 * kMillisecond;
  options.exchange.trouble_interval = 100 * kMillisecond;
  options.exchange.faults = config_.planted;
  options.exchange.taken_observer = [this, &process](const TakenRow& row) { take(process, row); };
  auto created =
      Worker::create(*process.executor, *process.transport, model.spec, model.dense, sim_kernels(), options);
  CONCLAVE_CHECK(created.ok());
  process.worker = std::move(*created);
  process.worker->set_on_refused([this, &process](const Refusal&) { restart_later(process); });
  process.tap = std::make_unique<Tap>(*this, process, *process.worker);
  process.link = std::make_unique<SimLink>(world_, place_, *process.executor, *process.tap,
                                           [w = process.worker.get()] { return w->heartbeat(); });
  process.worker->set_link(process.link.get());
  process.worker->start();
}

void ClusterSim::make_shard(Process& process) {
  const testing::RandomModel& model = sim_model();
  ShardOptions options;
  options.name = process.name;
  options.numerics_id = "sim";
  options.model_fingerprint = "random";
  options.capacity_bytes =
      config_.shard_pairs * ExpertStore(model.experts, model.spec.num_experts, {}).largest_bytes();
  options.load_report = 200 * kMillisecond;
  process.shard = std::make_unique<Shard>(*process.executor, *process.transport, model.spec, model.experts,
                                          sim_kernels(), options);
  process.shard->set_on_refused([this, &process](const Refusal&) { restart_later(process); });
  process.tap = std::make_unique<Tap>(*this, process, *process.shard);
  process.link = std::make_unique<SimLink>(world_, place_, *process.executor, *process.tap,
                                           [s = process.shard.get()] { return s->heartbeat(); });
  process.shard->set_link(process.link.get());
  process.shard->start();
}

void ClusterSim::stop(Process& process) {
  if (!process.running()) return;
  world_.kill(*process.executor);
  if (process.worker) accumulate(past_exchange_, process.worker->metrics().exchange);
  if (process.faults != nullptr) past_injected_ += process.faults->counts().total();
  process.faults = nullptr;
  process.worker.reset();
  process.shard.reset();
  process.link.reset();
  process.tap.reset();
  process.transport.reset();
}

void ClusterSim::restart_after_delay(Process& process) {
  process.gone = process.leaving;  // nobody starts it again
  if (process.gone) return;
  supervisor_.post_at(world_.now() + config_.restart_after, [this, &process] {
    ++restarts_;
    start(process);
  });
}

void ClusterSim::restart_later(Process& process) {
  // From the supervisor's own task: the process may be the one that runs now.
  supervisor_.post([this, &process, executor = process.executor] {
    if (process.executor != executor || !process.running()) return;
    const SessionId session = process.link->session();
    stop(process);
    tell_lost(process, session, 0);
    restart_after_delay(process);
  });
}

void ClusterSim::kill(const std::string& name, bool silent) {
  Process& process = find(name);
  if (!process.running()) return;
  const SessionId session = process.link->session();
  stop(process);
  if (!silent) tell_lost(process, session, kMillisecond);
  restart_after_delay(process);
}

void ClusterSim::leave(const std::string& name) {
  Process& process = find(name);
  if (process.leaving) return;
  process.leaving = true;
  if (!process.running()) {
    process.gone = true;
    return;
  }
  process.executor->post([&process] { process.link->send(Leaving{}); });
  supervisor_.post_at(world_.now() + kPatience, [this, &process] { end(process); });
}

// A member that leaves is through, or has waited long enough.
void ClusterSim::end(Process& process) {
  if (!process.leaving) return;
  restart_later(process);
}

}  // namespace conclave::scheduler
