// The scheduler itself: events in, actions out. No clock, no thread, no I/O; equal events at equal times give
// equal actions. It owns admission order, every worker's block tables and the placement table (design §4).
//
// The driver calls on_event for what happened, then plan() once for a burst of events, and again no later
// than next_timer() with a Tick.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "libs/model/plan.h"
#include "scheduler/core/event_log.h"
#include "scheduler/core/events.h"
#include "scheduler/core/membership.h"
#include "scheduler/core/options.h"
#include "scheduler/core/placement_planner.h"
#include "scheduler/core/planted_faults.h"
#include "scheduler/core/requests.h"
#include "scheduler/core/status_snapshot.h"
#include "scheduler/core/timelines.h"
#include "scheduler/core/worker_planner.h"

namespace conclave::scheduler {

// Numbers the sets of shards that active placements name, in their order.
class ShardSet {
 public:
  uint64_t follow(const PlacementTable& active);

 private:
  Epoch epoch_;
  std::vector<Incarnation> shards_;  // ascending
  uint64_t number_ = 0;
};

// (layer, expert) pairs of one ExpertsSnapshot.
inline constexpr uint64_t kMaxExpertRows = 100'000;

class SchedulerCore {
 public:
  // CHECKs options.validate(): services report a bad configuration before they come here.
  explicit SchedulerCore(const SchedulerOptions& options, PlantedFaults faults = {});

  // `now` never goes back.
  Actions on_event(Event event, TimePoint now);
  // Admits what fits and plans every worker that has room for a step.
  Actions plan(TimePoint now);
  // When a Tick is due at the latest; kNever when nothing waits for time.
  TimePoint next_timer() const;

  const FleetInfo& fleet() const { return fleet_; }
  StatusSnapshot status() const;
  // Of one layer or all of them. INVALID_ARGUMENT: no such layer; all are more than kMaxExpertRows.
  StatusOr<ExpertsSnapshot> experts(std::optional<uint32_t> layer) const;
  SchedulerMetrics metrics() const;
  // NOT_FOUND: the request is not followed, or forgotten.
  StatusOr<SchedulerTimeline> timeline(RequestId request) const;
  // Recounts everything that is kept twice (blocks, queues, gauges); an error names the first difference. For
  // tests.
  Status audit() const;

 private:
  void handle(MemberMessage& event, TimePoint now);
  void handle(MemberLost& event, TimePoint now);
  void handle(GatewayJoined& event, TimePoint now);
  void handle(GatewayLost& event, TimePoint now);
  void handle(Submit& event, TimePoint now);
  void handle(Cancel& event, TimePoint now);
  void handle(Adopt& event, TimePoint now);
  void handle(Release& event, TimePoint now);
  void handle(DrainMember& event, TimePoint now);
  void handle(Rebalance& event, TimePoint now);
  void handle(Tick& event, TimePoint now);

  void on_hello(SessionId session, Hello hello, TimePoint now);
  void add_shard(const Hello& hello, TimePoint now);
  void add_worker(SessionId session, const Hello& hello);
  void expel_strangers(TimePoint now);
  void on_step_result(Member& member, StepResult& result, TimePoint now);
  std::optional<BatchPlan> plan_worker(WorkerPlanner& worker, const Member& member, TimePoint now);
  void on_peer_trouble(const PeerTrouble& trouble, TimePoint now);
  // Ends a membership for ever; what it ran or held moves on.
  void lose_member(SessionId session, const Status& cause, bool close, TimePoint now);
  void on_heartbeat(Member& member, const Heartbeat& heartbeat);
  void start_drain(Member& member, TimePoint now);
  // Moves what draining workers run to others, and tells those that have nothing left.
  void advance_drains(TimePoint now);
  // What no other worker can hold stays and runs to its end.
  void move_off(Incarnation from, WorkerPlanner& worker);
  // Takes a worker's pool (nothing, once it is gone) into the gauges.
  void show_pool(Incarnation worker);
  bool takes_new_work(Incarnation worker);
  void forgive_own_stall(TimePoint now);
  void run_timers(TimePoint now);
  void tell_suspicions(TimePoint now);

  // Notes for whoever looks at the request's timeline; nothing where it is not followed.
  void mark(const Request& request, TimelineMarkKind kind, uint32_t choice = 0, std::string_view detail = {});
  void note_steps(const Member& worker, StepResult& result, const StepOutcome& outcome, TimePoint now);

  // Whether the request fits the pages of the largest worker so far; the Status names the numbers.
  Status check_capacity(const AcceptedRequest& request) const;
  void reattach(Request& request, Submit& event);
  // --- resumable requests (core_resume.cc)
  TimePoint grace_from(TimePoint now) const { return now + options_.gateway_grace_ms * kMillisecond; }
  // Drops a context for which there is no room.
  void bound_context(AcceptedRequest& request);
  static bool misses_logprobs(const AcceptedRequest& request);
  bool may_cancel(const Request& request, SessionId gateway) const;
  // Why a request cannot be adopted, now that it is there.
  Status check_adoptable(const Request& request) const;
  // Ends it for the gateway that has it.
  void take_from_gateway(Request& request);
  // Forgets ended ones beyond the bounds, the oldest first.
  void trim_kept();

  // --- requests without progress (core_stalls.cc)
  void plan_look_for_stalls(TimePoint now);
  void look_for_stalls(TimePoint now);
  void forgive_stalls(Nanos late);
  struct Stall {
    Nanos time = 0;
    StallHop hop = StallHop::kTurn;
    std::string detail;
  };
  Stall stall_of(const Choice& choice, const Choice* head, TimePoint now) const;

  // Whether the queue has room for a request; else the bound, the numbers and when to try again.
  Status check_queue(const AcceptedRequest& request, TimePoint now) const;
  Status check_model(const Request& request) const;
  void admit(TimePoint now);
  struct Sibling {
    bool ready = true;  // false: another choice of the request computes the prompt, or will
    SeqId like;         // one that has
  };
  Sibling sibling_of(const Choice& choice) const;
  // Starts a choice on the best worker that is not held; false: none has room.
  bool start(Choice& choice, SeqId like, const std::set<Incarnation>& held, TimePoint now);
  // The worker with room on which the request costs least: tokens to compute, and what those that run there
  // take of it. Null: none.
  std::pair<const Incarnation, WorkerPlanner>* choose_worker(std::span<const TokenId> known, Room room,
                                                             const PrefixUse& prefix,
                                                             const std::set<Incarnation>& held);
  // Ends one choice, or all that have not ended; the request may be gone afterwards.
  void end_choice(Choice& choice, FinishReason reason, const std::string& error);
  void end_request(Request& request, FinishReason reason, const std::string& error);
  void stop_choice(Choice& choice, FinishReason reason, const std::string& error);
  // Sends what the gateway has not seen; forgets a request all of whose ends were sent: the reference may
  // dangle afterwards.
  void flush(Request& request);
  void send_prompt_logprobs(Request& request);
  void send_choice(Choice& choice);
  void publish_placements(TimePoint now);
  void publish(PlacementOut& out, TimePoint now);
  // The oldest placement that a worker still uses.
  Epoch oldest_epoch() const;
  // Whether there are workers that use a placement, and all of these use the active one.
  bool workers_follow() const;
  void show_placement(TimePoint now);
  void show_load(TimePoint now);
  void show_members();
  void update_fleet();
  Welcome welcome() const;
  template <class T>
  void emit(T action) {
    actions_.emplace_back(std::move(action));
  }

  const SchedulerOptions options_;
  const PlantedFaults faults_;
  Membership members_;
  PlacementPlanner placement_;
  RequestTable requests_;
  TimelineBook timelines_;
  std::map<Incarnation, WorkerPlanner> workers_;
  struct GatewayMember {
    Hello hello;
    TimePoint joined = 0;
  };
  std::map<SessionId, GatewayMember> gateways_;
  uint64_t next_seq_ = 1;
  uint32_t largest_pool_ = 0;  // blocks of the largest worker ever seen
  FleetInfo fleet_;
  ShardSet shard_set_;
  SchedulerMetrics counters_;
  TimePoint last_now_ = 0;
  TimePoint timer_due_ = kNever;    // what plan() asked to be woken for
  TimePoint owing_floor_ = kNever;  // no worker has owed its step for longer; kNever: none owed one lately
  // Workers that may have something to plan: whose results, admissions or ends came since the last plan(), or
  // all of them after a change of members or placement.
  std::vector<Incarnation> due_;
  bool all_due_ = true;
  TimePoint next_stall_look_ = kNever;
  TimePoint load_shown_ = kNever;                // when show_load last looked
  std::map<Incarnation, TimePoint> retired_at_;  // when each worker last reported a step
  uint32_t draining_ = 0;                        // members that drain and are not done
  bool epochs_changed_ = false;                  // of the workers, since publish_placements
  // The pools' gauges as last added to counters_, since a sum over all workers for each event would cost more
  // than the event.
  struct PoolSum {
    uint64_t total = 0, used = 0, cached = 0, promised = 0, evictions = 0;
  };
  std::map<Incarnation, PoolSum> shown_;
  EventLog events_;
  Actions actions_;
};

}  // namespace conclave::scheduler
