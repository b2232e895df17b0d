// The whole cluster in seeded virtual time: the real scheduler loop and core, worker and shard cores, and the
// loopback transport, as processes of one SimWorld with a tiny random model. Processes crash (SIGKILL), stop
// for a while (SIGSTOP) and come back under supervision; the network delays and loses. A run is a function of
// its seed.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attention_service/core/worker.h"
#include "expert_service/core/shard.h"
#include "libs/runtime/sim_executor.h"
#include "libs/transport/fault_transport.h"
#include "libs/transport/loopback_transport.h"
#include "scheduler/loop.h"
#include "tests/sim/sim_link.h"
#include "tests/support/random_model.h"

namespace conclave::scheduler {

struct ClusterConfig {
  uint64_t seed = 1;
  uint32_t workers = 1;
  uint32_t shards = 2;
  uint32_t kv_blocks = 64;
  Nanos restart_after = 300 * kMillisecond;  // the supervisor's back-off
  double network_loss = 0;                   // of data plane messages
  FaultPlan worker_faults;                   // at the worker's end of the data plane
  SchedulerOptions scheduler;
};

class ClusterSim {
 public:
  explicit ClusterSim(const ClusterConfig& config);
  ~ClusterSim();

  SimWorld& world() { return world_; }
  // The present one; it must be up.
  SchedulerLoop& scheduler() { return *loop_; }
  // Runs until the fleet is ready; false when it does not get there in a virtual minute.
  bool run_ready();
  Stream& submit(AcceptedRequest request) { return gateway_->submit(std::move(request)); }
  void cancel(Stream& stream) { gateway_->cancel(stream); }
  void cancel_choice(Stream& stream, uint32_t choice) { gateway_->cancel_choice(stream, choice); }
  // Runs until every stream has ended, or for the time at most.
  bool run_streams(Nanos limit);
  void run_for(Nanos time) { world_.run_until(world_.now() + time); }
  size_t open_streams() const;
  size_t tokens_delivered() const;

  // SIGKILL: no goodbye. `silent`: nor a reset of its connections that would tell the scheduler.
  void kill(const std::string& name, bool silent = false);
  void pause(const std::string& name, Nanos time);
  // SIGKILL of the scheduler; another one, which knows nothing, comes after restart_after.
  void kill_scheduler();
  // Whether the process runs, is welcome and (a shard) warm.
  bool up(const std::string& name) const;

  // The first broken rule; empty when all held. Checked after every event.
  const std::string& violation() const { return violation_; }
  // Sums over every life of every process.
  uint64_t retried_items() const;
  uint64_t injected_faults() const;
  uint64_t restarts() const { return restarts_; }
  uint64_t resubmitted() const { return gateway_->resubmitted(); }
  uint64_t replayed() const;
  uint64_t members_lost() const;

 private:
  struct Process;
  void start_scheduler();
  void tell_lost(SessionId session, Nanos delay);
  void start(Process& process);
  void stop(Process& process);
  void restart_later(Process& process);
  Process& find(const std::string& name);
  const Process& find(const std::string& name) const;
  void check();

  const ClusterConfig config_;
  SimWorld world_;
  SimExecutor& supervisor_;
  SimExecutor& router_;
  std::shared_ptr<LoopbackHub> hub_;
  SchedulerPlace place_;
  uint64_t scheduler_life_ = 0;
  std::unique_ptr<SchedulerLoop> loop_;  // null while it is down
  std::unique_ptr<SimGateway> gateway_;
  std::deque<Process> processes_;
  uint64_t next_incarnation_ = 1;
  uint64_t restarts_ = 0;
  uint64_t past_retried_ = 0;
  uint64_t past_injected_ = 0;
  uint64_t past_replayed_ = 0;
  uint64_t past_lost_ = 0;
  std::string violation_;
};

// The model of every cluster simulation, made once.
const testing::RandomModel& sim_model();

// What the cluster must answer: the request alone on one worker and one shard that nothing happens to.
Stream undisturbed(const AcceptedRequest& request);

}  // namespace conclave::scheduler
