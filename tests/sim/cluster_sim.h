// The whole cluster in seeded virtual time: the real scheduler loop and core, worker and shard cores, and the
// loopback transport, as processes of one SimWorld with a tiny random model, and routers that keep their
// clients' requests. Processes crash (SIGKILL), stop for a while (SIGSTOP), are slow, come back under
// supervision, join and leave; the network delays, loses and parts them. A run is a function of its seed.
//
// Watched all the time: what clients get (sim_link.h), the scheduler's own recount, that every (token, slot)
// is counted once and in the round that asked for it, and that nothing of a shard that is dead, as the worker
// was told, is combined.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
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
  uint32_t routers = 1;
  uint32_t kv_blocks = 64;
  uint32_t shard_pairs = 0;  // (layer, expert) pairs a shard has room for; 0: no limit
  Nanos restart_after = 300 * kMillisecond;  // the supervisor's back-off
  double network_loss = 0;                   // of data plane messages
  FaultPlan worker_faults;                   // at the worker's end of the data plane
  ExchangeFaults planted;                    // in every worker
  bool keep_fenced = false;                  // planted too: workers never close a connection to a shard
  uint32_t audit_every = 1;                  // the scheduler's recount, once in so many events
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
  Stream& submit(AcceptedRequest request);
  void cancel(Stream& stream);
  void cancel_choice(Stream& stream, uint32_t choice);
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
  // SIGKILL of a router; its clients come back to its successor with what they have got.
  void kill_router(uint32_t index);
  // A new member, from now on; the answer is its name.
  std::string join(Role role);
  // SIGTERM: the member asks to be drained, and ends when it is told so, or after its patience.
  void leave(const std::string& name);
  // Every message of the data plane to and from the process takes so much longer.
  void slow(const std::string& name, Nanos by, Nanos time);
  // Nothing passes between the two on the data plane.
  void cut(const std::string& a, const std::string& b, Nanos time);
  // Nothing passes between the member and the scheduler, though the line seems to stand.
  void cut_off(const std::string& name, Nanos time);
  // The end of all that is slow, cut, lossy and faulty. What is stopped or down comes back by itself.
  void heal();
  // Members that are to be there: neither left nor leaving.
  std::vector<std::string> names(Role role) const;
  // Runs until nothing is pending anywhere: every member is back, idle and empty. The answer is what still
  // was after that time; empty: nothing.
  std::string run_idle(Nanos limit);
  // Whether the process runs, is welcome and (a shard) warm.
  bool up(const std::string& name) const;

  // The first broken rule; empty when all held. Checked after every event.
  const std::string& violation() const { return violation_; }
  // Sums over every life of every process.
  ExchangeMetrics exchange_metrics() const;
  uint64_t injected_faults() const;
  uint64_t restarts() const { return restarts_; }
  uint64_t resubmitted() const;
  uint64_t replayed() const;
  uint64_t members_lost() const;

 private:
  struct Process;
  struct Router;
  class Tap;
  struct Cut {
    const Process* a = nullptr;
    const Process* b = nullptr;
    TimePoint until = 0;
  };
  void start_scheduler();
  void tell_lost(const Process& process, SessionId session, Nanos delay);
  Process& add(Role role);
  void start(Process& process);
  void make_worker(Process& process);
  void make_shard(Process& process);
  void stop(Process& process);
  void restart_after_delay(Process& process);
  void restart_later(Process& process);
  void end(Process& process);
  void start_router(Router& router, Streams streams);
  const Streams& streams(const Router& router) const;
  Process& find(const std::string& name);
  const Process& find(const std::string& name) const;
  std::optional<Nanos> data_delay(Incarnation from, Incarnation to, uint64_t bytes);
  void learn_dead(Process& worker, const PlacementTable& table);
  void take(Process& worker, const TakenRow& row);
  void violate(const std::string& what);
  void check();
  std::string pending() const;

  const ClusterConfig config_;
  SimWorld world_;
  SimExecutor& supervisor_;
  std::shared_ptr<LoopbackHub> hub_;
  SchedulerPlace place_;
  std::unique_ptr<SchedulerLoop> loop_;  // null while it is down
  std::deque<Process> processes_;
  std::deque<Router> routers_;
  std::map<Incarnation, Process*> by_incarnation_;  // of every life
  std::set<Incarnation> dead_;                      // to the scheduler of now
  std::string last_closed_;                         // why it ended a member's session last
  std::vector<Cut> cuts_;
  bool healed_ = false;
  uint64_t next_incarnation_ = 1;
  uint64_t events_ = 0;
  uint64_t restarts_ = 0;
  ExchangeMetrics past_exchange_;
  uint64_t past_injected_ = 0;
  uint64_t past_replayed_ = 0;
  uint64_t past_lost_ = 0;
  uint64_t past_resubmitted_ = 0;
  std::string violation_;
};

// The model of every cluster simulation, made once.
const testing::RandomModel& sim_model();

// What the cluster must answer: the request alone on one worker and one shard that nothing happens to.
Stream undisturbed(const AcceptedRequest& request);

}  // namespace conclave::scheduler
