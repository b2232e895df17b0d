#include "tests/cluster/fault_matrix.h"

#include <signal.h>

#include <algorithm>

#include "tests/cluster/completions.h"
#include "tests/cluster/router_load.h"

namespace conclave {
namespace {

constexpr uint32_t kStreams = 32;
constexpr size_t kLongPrompt = 128;
constexpr Nanos kReady = 60 * kSecond;
constexpr Nanos kEnd = 180 * kSecond;  // for the streams after the fault; only bounds a failing cell
constexpr Nanos kSettled = 60 * kSecond;
constexpr Nanos kAfter = 500 * kMillisecond;  // of load once the victim is back
constexpr Nanos kHeld = 10 * kSecond;         // until a moment that processes are held for has come
constexpr uint64_t kMoreBytes = 8u << 20;
constexpr size_t kSpareShard = 3;  // joins where a change is wanted; the shape has those before it
// Few enough that the rest goes on: each costs its dispatch a deadline.
constexpr char kCorruption[] = "CONCLAVE_TEST_FAULTS=corrupt_in=0.002,seed=";
constexpr double kCorrupted = 1;  // messages, at least

}  // namespace

StatusOr<std::unique_ptr<FaultMatrix>> FaultMatrix::start(const FaultCell& first, uint64_t seed,
                                                          std::vector<std::vector<TokenId>> expected) {
  std::unique_ptr<FaultMatrix> out(new FaultMatrix);
  out->expected_ = std::move(expected);
  const bool two = of_two(first.role);
  ClusterShape shape;
  shape.model = demo_model();
  shape.shards = two ? 3 : 2;
  shape.workers = two ? 2 : 1;
  if (!two) {
    shape.scheduler_arguments = {"--set", "scheduler.min_replicas=1", "--set", "scheduler.max_replicas=1"};
  }
  // Little more than the streams need: pages that were never touched before would look like a leak.
  shape.worker_arguments = {"--set", "attention.kv_bytes=10MiB"};
  if (first.networked()) {
    std::vector<std::string> nodes = {"scheduler", "worker", "worker1", "router"};
    for (size_t i = 0; i <= kSpareShard; ++i) nodes.push_back("shard" + std::to_string(i));
    ASSIGN_OR_RETURN(out->network_, Network::start(seed, nodes));
    shape.network = out->network_.get();
  }
  out->cluster_ = std::make_unique<ProcessCluster>(shape);
  const bool router = first.role == FaultRole::kRouter;
  out->keeper_ = std::make_unique<Keeper>(*out->cluster_, router);
  if (router) {
    out->cluster_->start_router();
    if (!out->cluster_->wait_router_ready()) return unavailable("the router is not ready");
    for (uint32_t i = 0; i < out->expected_.size(); ++i) {
      out->texts_.push_back(
          complete(out->cluster_->http_address(), i, static_cast<uint32_t>(out->expected_[i].size()), false));
    }
  }
  if (!out->cluster_->wait_ready()) return unavailable(out->cluster_->gateway->fleet().not_ready);
  RETURN_IF_ERROR(out->warm_up());
  Load load(*out->cluster_->gateway, out->expected_, {.concurrency = kStreams});
  if (!out->keeper_->tend_until([&] { return load.report().completed >= kStreams; }, kReady)) {
    return unavailable("the cluster serves nothing: " + out->cluster_->gateway->fleet().not_ready);
  }
  load.stop();
  out->keeper_->tend_until([&] { return load.over(); }, kEnd);
  if (std::string why = out->keeper_->settle(kSettled); !why.empty()) return unavailable(why);
  return out;
}

FaultMatrix::~FaultMatrix() = default;

Status FaultMatrix::warm_up() {
  std::vector<pid_t> now;
  for (const auto& [name, held] : keeper_->holdings()) now.push_back(held.pid);
  if (now == warm_) return OkStatus();
  warm_ = now;
  std::vector<std::shared_ptr<PendingCompletion>> prompts;
  for (uint32_t i = 0; i < kStreams * cluster_->shape().workers; ++i) {
    AcceptedRequest request = numbered_request(i, 1);
    while (request.prompt.size() < kLongPrompt) request.prompt.push_back(i);
    prompts.push_back(cluster_->submit(std::move(request)));
  }
  for (const auto& prompt : prompts) RETURN_IF_ERROR(prompt->wait(kReady).status());
  return OkStatus();
}

// One cell from its start to its end.
struct FaultMatrix::Course {
  Course(FaultMatrix& m, const FaultCell& c, uint64_t seed)
      : matrix(m), keeper(*m.keeper_), cluster(*m.cluster_), cell(c), random(seed) {}

  bool check(const std::string& fault) {
    if (!fault.empty()) result.faults.push_back(fault);
    return fault.empty();
  }

  std::string victim_name() {
    switch (cell.role) {
      case FaultRole::kShardWithReplica:
      case FaultRole::kShard:
        return "shard" + std::to_string(random.below(cluster.shape().shards));
      case FaultRole::kWorkerOfTwo:
        return random.chance(0.5) ? "worker" : "worker1";
      case FaultRole::kOnlyWorker:
        return "worker";
      case FaultRole::kScheduler:
        return "scheduler";
      case FaultRole::kRouter:
        return "router";
    }
    return "";
  }

  // A shard that is not the victim.
  std::string other_shard() const { return victim == "shard0" ? "shard1" : "shard0"; }

  void hold(const std::string& name) {
    keeper.process(name).signal(SIGSTOP);
    held.push_back(name);
  }
  void release() {
    for (const std::string& name : held) keeper.process(name).signal(SIGCONT);
    held.clear();
  }

  // Until no worker has finished a step for a while: what was held stands in their way.
  void wait_steps_stop() {
    double last = -1;
    int equal = 0;
    check(keeper.tend_until(
              [&] {
                double steps = 0;
                for (const std::string& name : keeper.names()) {
                  if (name.starts_with("worker"))
                    steps += cluster.metric(name, "conclave_attention_steps_total");
                }
                equal = steps == last ? equal + 1 : 0;
                last = steps;
                return equal >= 5;
              },
              kHeld)
              ? ""
              : "the moment did not come: steps go on");
  }

  void reach_moment() {
    switch (cell.moment) {
      case FaultMoment::kRandom:
        keeper.tend_for(static_cast<Nanos>(random.below(500 * kMillisecond)));
        return;
      case FaultMoment::kBeforeDispatch:
        hold("scheduler");  // plans run out
        wait_steps_stop();
        return;
      case FaultMoment::kBeforeReply:
        hold(victim.starts_with("shard") ? victim : "shard0");  // every step needs it
        wait_steps_stop();
        return;
      case FaultMoment::kDuringChange: {
        // A shard that joins has to be prepared by all, and one of them does not answer.
        const double joined = cluster.metric("scheduler", "conclave_scheduler_joined_members_total");
        hold(other_shard());
        if (cluster.shards.size() == cluster.shape().shards) cluster.shards.emplace_back();
        spare = "shard" + std::to_string(cluster.shards.size() - 1);
        keeper.expect(spare);
        keeper.start(spare);
        check(keeper.tend_until(
                  [&] {
                    return cluster.metric("scheduler", "conclave_scheduler_joined_members_total") > joined;
                  },
                  kHeld)
                  ? ""
                  : "the moment did not come: no shard joined");
        keeper.tend_for(150 * kMillisecond);  // placement_settle_ms and a bit
        return;
      }
      case FaultMoment::kDuringLoad:
        keeper.kill(victim);
        keeper.tend_until([&] { return keeper.process(victim).running(); }, kReady);
        keeper.tend_for(static_cast<Nanos>(random.below(250 * kMillisecond)));
        return;
    }
  }

  void link(const LinkFault& fault, Nanos time) {
    // The test is the gateway of all clusters without a router.
    const bool host = cell.role == FaultRole::kScheduler;
    check(message_of(matrix.network_->set_all(victim, fault, host)));
    release();
    keeper.tend_for(time);
    check(message_of(matrix.network_->set_all(victim, {}, host)));
  }

  void stop_for(Nanos time) {
    keeper.process(victim).signal(SIGSTOP);
    std::erase(held, victim);
    release();
    keeper.tend_for(time);
    keeper.process(victim).signal(SIGCONT);
  }

  void inflict() {
    switch (cell.kind) {
      case FaultKind::kKill:
        std::erase(held, victim);
        keeper.kill(victim);
        return release();
      case FaultKind::kStopShort:
        return stop_for(300 * kMillisecond);
      case FaultKind::kStopLong:
        return stop_for(5 * kSecond);
      case FaultKind::kCutShort:
        return link({.cut = true}, kSecond);
      case FaultKind::kCutLong:
        return link({.cut = true}, 10 * kSecond);
      case FaultKind::kDelay:
        return link({.delay = 50 * kMillisecond}, 3 * kSecond);
      case FaultKind::kLoss:
        return link({.loss = 0.01}, 3 * kSecond);
      case FaultKind::kPartition:
        check(message_of(matrix.network_->set(victim, "worker", {.cut = true})));
        release();
        keeper.tend_for(10 * kSecond);
        check(message_of(matrix.network_->set(victim, "worker", {})));
        return;
      case FaultKind::kCorrupt:
        check(keeper.tend_until([&] { return rejected() >= kCorrupted; }, kEnd) ? ""
                                                                                : "nothing was corrupted");
        return;
    }
  }

  void run() {
    const TimePoint begin = steady_now();
    victim = victim_name();
    if (cell.kind == FaultKind::kCorrupt) corrupt(true);
    check(message_of(matrix.warm_up()));
    check(keeper.settle(kSettled));
    const std::map<std::string, Holdings> before = keeper.holdings();
    const size_t ends = keeper.unexpected().size();
    if (cell.role == FaultRole::kRouter) {
      RouterLoad load(cluster.http_address(), matrix.texts_,
                      static_cast<uint32_t>(matrix.expected_[0].size()), kStreams);
      under(load);
      result.resumed = load.resumed();
    } else {
      Load load(*cluster.gateway, matrix.expected_, {.concurrency = kStreams, .seed = random.next()});
      under(load);
      const LoadReport report = load.report();
      result.refused = report.refused;
    }
    if (!spare.empty()) leave();
    check(keeper.settle(kSettled));
    // What peers of the fault hold is given back within moments, not at once.
    std::string grown;
    const auto back = [&] { return (grown = keeper.grown(before, kMoreBytes)).empty(); };
    if (!keeper.tend_until(back, kSettled) && cell.kind == FaultKind::kPartition) {
      // UCX 1.13 may keep up to four sockets instead of one for a connection that came about in several
      // attempts through a partition, for as long as it lasts: they must go with it.
      result.until_restart = grown;
      keeper.kill(victim);
      check(keeper.settle(kSettled));
      keeper.tend_until(back, kSettled);
    }
    check(grown);
    if (cell.kind == FaultKind::kCorrupt) corrupt(false);
    result.unexpected_ends.assign(keeper.unexpected().begin() + static_cast<std::ptrdiff_t>(ends),
                                  keeper.unexpected().end());
    result.took = steady_now() - begin;
  }

  template <class AnyLoad>
  void under(AnyLoad& load) {
    check(keeper.tend_until([&] { return load.running() >= kStreams; }, kReady) ? ""
                                                                                : "the load did not begin");
    reach_moment();
    load.mark();
    inflict();
    // The victim comes back under load too, and everybody has a token after it.
    check(keeper.tend_until([&] { return keeper.process(victim).running(); }, kReady) ? ""
                                                                                      : victim + " is gone");
    keeper.tend_for(kAfter);
    const TimePoint back = steady_now();
    check(keeper.tend_until([&] { return load.all_moved(back); }, kEnd) ? "" : "a stream stands still");
    load.stop();
    check(keeper.tend_until([&] { return load.over(); }, kEnd) ? "" : "requests do not end");
    result.longest_gap = load.longest_gap();
    const LoadReport report = load.report();
    result.requests = report.completed;
    for (const std::string& fault : report.faults) check(fault);
  }

  // The shard that joined for a change leaves again.
  void leave() {
    check(keeper.settle(kSettled));
    keeper.let_go(spare);
    keeper.process(spare).signal(SIGTERM);
    const bool ended = keeper.tend_until([&] { return !keeper.process(spare).running(); }, kReady);
    check(ended ? "" : "the shard that was told to leave stays");
  }

  // Starts the victim again with faults in its data plane, or without.
  void corrupt(bool on) {
    if (on) {
      cluster.environment[victim] = {kCorruption + std::to_string(random.below(1000))};
    } else {
      cluster.environment.erase(victim);
    }
    keeper.kill(victim);
    keeper.tend_for(kRestartPause);
    check(keeper.settle(kSettled));
  }

  double rejected() {
    return cluster.metric(victim, victim.starts_with("worker") ? "conclave_attention_rejected_messages_total"
                                                               : "conclave_expert_rejected_dispatches_total");
  }

  FaultMatrix& matrix;
  Keeper& keeper;
  ProcessCluster& cluster;
  const FaultCell cell;
  SplitMix64 random;
  std::string victim, spare;
  std::vector<std::string> held;
  CellResult result;
};

CellResult FaultMatrix::run(const FaultCell& cell, uint64_t seed) {
  Course course(*this, cell, seed);
  course.run();
  return course.result;
}

}  // namespace conclave
