#include "tests/sim/cluster_sim.h"

#include <map>
#include <utility>

#include "libs/base/check.h"

namespace conclave::scheduler {
namespace {

SimWorld::Options world_options() {
  SimWorld::Options options;
  options.post_jitter = 50 * kMicrosecond;
  return options;
}

}  // namespace

struct ClusterSim::Process {
  Role role = Role::kAttention;
  std::string name;
  SimExecutor* executor = nullptr;  // of the present life
  Incarnation incarnation;
  FaultTransport* faults = nullptr;  // owned by transport, where there is one
  std::unique_ptr<ExpertTransport> transport;
  std::unique_ptr<Worker> worker;
  std::unique_ptr<Shard> shard;
  std::unique_ptr<SimLink> link;

  bool running() const { return link != nullptr; }
};

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
      router_(world_.add_process("router")),
      hub_(std::make_shared<LoopbackHub>()) {
  hub_->set_delay_model([this](Incarnation, Incarnation, uint64_t bytes) -> std::optional<Nanos> {
    // The news that a connection was closed is the kernel's, and is not lost.
    if (bytes > 0 && config_.network_loss > 0 && world_.random().chance(config_.network_loss))
      return std::nullopt;
    return static_cast<Nanos>(10 * kMicrosecond + static_cast<Nanos>(world_.random().below(kMillisecond)));
  });
  start_scheduler();
  gateway_ = std::make_unique<SimGateway>(world_, place_, router_);
  for (uint32_t i = 0; i < config_.workers; ++i) {
    processes_.emplace_back().name = "attention-" + std::to_string(i);
  }
  for (uint32_t i = 0; i < config_.shards; ++i) {
    Process& process = processes_.emplace_back();
    process.role = Role::kExpert;
    process.name = "expert-" + std::to_string(i);
  }
  for (Process& process : processes_) start(process);
  world_.set_after_step([this] { check(); });
}

ClusterSim::~ClusterSim() {
  world_.set_after_step(nullptr);
  for (Process& process : processes_) stop(process);
  gateway_.reset();
  world_.kill(supervisor_);
  world_.kill(router_);
  world_.kill(*place_.process);
  loop_.reset();
}

void ClusterSim::start_scheduler() {
  ++scheduler_life_;
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
  gateway_->reset();
  supervisor_.post_at(world_.now() + config_.restart_after, [this] {
    ++restarts_;
    start_scheduler();
  });
}

// A connection reset, as the scheduler of the time sees it.
void ClusterSim::tell_lost(SessionId session, Nanos delay) {
  if (!session) return;
  supervisor_.post_at(world_.now() + delay, [this, session, life = scheduler_life_] {
    if (loop_ && life == scheduler_life_) loop_->member_closed(session, unavailable("connection reset"));
  });
}

void ClusterSim::start(Process& process) {
  if (process.running()) return;
  process.executor = &world_.add_process(process.name);
  process.incarnation = Incarnation(next_incarnation_++);
  const bool worker = process.role == Role::kAttention;

  TransportOptions transport;
  transport.self = process.incarnation;
  transport.secret = "simulation";
  transport.fleet = "simulation";
  transport.connect_deadline = 200 * kMillisecond;
  transport.keepalive_interval = 100 * kMillisecond;
  transport.keepalive_timeout = 1 * kSecond;
  transport.random = [this] { return world_.random().next(); };
  process.transport = std::make_unique<LoopbackTransport>(hub_, *process.executor, transport);
  if (worker) {
    auto faults = std::make_unique<FaultTransport>(std::move(process.transport), *process.executor,
                                                   world_.random().next(), config_.worker_faults);
    process.faults = faults.get();
    process.transport = std::move(faults);
  }

  const testing::RandomModel& model = sim_model();
  MemberHandler* handler = nullptr;
  SimLink::Beat beat;
  const auto on_refused = [this, &process](const Refusal&) { restart_later(process); };
  if (worker) {
    WorkerOptions options;
    options.name = process.name;
    options.numerics_id = "sim";
    options.model_fingerprint = "random";
    options.kv_blocks = config_.kv_blocks;
    options.max_batch_tokens = 64;
    options.micro_batch_min_rows = 2;  // small batches, and still two in flight
    options.exchange.deadline_floor = 50 * kMillisecond;
    options.exchange.trouble_interval = 100 * kMillisecond;
    auto created = Worker::create(*process.executor, *process.transport, model.spec, model.dense,
                                  kernels::Context{}, options);
    CONCLAVE_CHECK(created.ok());
    process.worker = std::move(*created);
    process.worker->set_on_refused(on_refused);
    handler = process.worker.get();
    beat = [w = process.worker.get()] { return w->heartbeat(); };
  } else {
    ShardOptions options;
    options.name = process.name;
    options.numerics_id = "sim";
    options.model_fingerprint = "random";
    process.shard = std::make_unique<Shard>(*process.executor, *process.transport, model.spec, model.experts,
                                            kernels::Context{}, options);
    process.shard->set_on_refused(on_refused);
    handler = process.shard.get();
    beat = [s = process.shard.get()] { return s->heartbeat(); };
  }
  process.link = std::make_unique<SimLink>(world_, place_, *process.executor, *handler, std::move(beat));
  if (worker) {
    process.worker->set_link(process.link.get());
    process.worker->start();
  } else {
    process.shard->set_link(process.link.get());
    process.shard->start();
  }
}

void ClusterSim::stop(Process& process) {
  if (!process.running()) return;
  world_.kill(*process.executor);
  if (process.worker) past_retried_ += process.worker->metrics().exchange.retried_items;
  if (process.faults != nullptr) past_injected_ += process.faults->counts().total();
  process.faults = nullptr;
  process.worker.reset();
  process.shard.reset();
  process.link.reset();
  process.transport.reset();
}

void ClusterSim::restart_later(Process& process) {
  // From the supervisor's own task: the process may be the one that runs now.
  supervisor_.post([this, &process, executor = process.executor] {
    if (process.executor != executor || !process.running()) return;
    const SessionId session = process.link->session();
    stop(process);
    tell_lost(session, 0);
    supervisor_.post_at(world_.now() + config_.restart_after, [this, &process] {
      ++restarts_;
      start(process);
    });
  });
}

void ClusterSim::kill(const std::string& name, bool silent) {
  Process& process = find(name);
  if (!process.running()) return;
  const SessionId session = process.link->session();
  stop(process);
  if (!silent) tell_lost(session, kMillisecond);
  supervisor_.post_at(world_.now() + config_.restart_after, [this, &process] {
    ++restarts_;
    start(process);
  });
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

void ClusterSim::check() {
  if (!violation_.empty()) return;
  const auto violate = [&](const std::string& what) {
    violation_ = "seed " + std::to_string(config_.seed) +
                 ", t=" + std::to_string(world_.now() / kMillisecond) + " ms: " + what;
  };
  for (const auto& [id, stream] : gateway_->streams()) {
    if (!stream.fault.empty()) violate("request " + std::to_string(id.lo) + ": " + stream.fault);
  }
  if (!loop_) return;
  if (const Status audit = loop_->audit(); !audit.ok()) violate(message_of(audit));
  if (loop_->metrics().protocol_violations != 0) violate("a worker broke the protocol");
}

bool ClusterSim::run_ready() {
  return world_.run_until([this] { return (loop_ && loop_->fleet().ready) || !violation_.empty(); },
                          world_.now() + 60 * kSecond) &&
         violation_.empty();
}

size_t ClusterSim::open_streams() const {
  size_t open = 0;
  for (const auto& [id, stream] : gateway_->streams()) open += stream.ended() ? 0 : 1;
  return open;
}

size_t ClusterSim::tokens_delivered() const {
  size_t tokens = 0;
  for (const auto& [id, stream] : gateway_->streams()) {
    for (const Stream::Choice& choice : stream.choices) tokens += choice.tokens.size();
  }
  return tokens;
}

bool ClusterSim::run_streams(Nanos limit) {
  return world_.run_until([this] { return open_streams() == 0 || !violation_.empty(); },
                          world_.now() + limit) &&
         violation_.empty();
}

uint64_t ClusterSim::retried_items() const {
  uint64_t sum = past_retried_;
  for (const Process& process : processes_) {
    if (process.worker) sum += process.worker->metrics().exchange.retried_items;
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
