// The scheduler core under seeded virtual time with model workers, shards and gateways around it: delays,
// crashes, hangs, lost connections, restarts of the scheduler itself. Every rule of design §7 that concerns
// it is checked after every event. A run is a function of its seed.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "libs/base/random.h"
#include "scheduler/core/core.h"
#include "tests/scheduler/model_worker.h"

namespace conclave::scheduler {

struct SimConfig {
  uint64_t seed = 1;
  PlantedFaults faults;
  bool lose_a_token_event = false;  // planted in the harness: an event vanishes on a healthy connection
  bool lose_a_step_result = false;  // the same with a worker's result: the core must notice
  // Nobody fails, and of two tenants one asks for far more than there is: who asks for little must not wait
  // for it. The gap between what both were given while both had something waiting is bounded.
  bool flood = false;
  bool checks = true;            // false: the same run, faster
  Nanos chaos = 4 * kSecond;     // requests and faults happen until then
  Nanos settle = 120 * kSecond;  // then everything must end within this
};

struct SimOutcome {
  std::string violation;  // empty: every check held
  uint64_t trace_hash = 0;
  uint64_t events = 0;
  std::map<std::string, uint64_t> coverage;
};

class SchedulerSim {
 public:
  explicit SchedulerSim(const SimConfig& config);
  ~SchedulerSim();
  SimOutcome run();

 private:
  struct Node;     // a worker or shard process
  struct Gateway;  // a router process
  struct Session;
  struct Client;  // a request as its gateway knows it

  // --- time
  void at(TimePoint when, std::function<void()> task);
  void after(Nanos delay, std::function<void()> task) { at(now_ + delay, std::move(task)); }
  Nanos between(Nanos low, Nanos high) {
    return low + static_cast<Nanos>(random_.below(static_cast<uint64_t>(high - low + 1)));
  }

  // --- the core and its driver
  void start_scheduler();
  void restart_scheduler();
  void to_core(Event event);
  void drain();
  void stall(TimePoint until);
  void feed(Event event);
  void perform(Actions actions);
  void do_action(SendMember& action);
  void do_action(CloseMember& action);
  void do_action(SendWelcome& action);
  void do_action(CloseGateway& action);
  void do_action(ReplySubmit& action);
  void do_action(ReplyDrain& action);
  void do_action(SendTokens& action);
  void do_action(SendFleet& action);
  void do_action(ReplyAdopt& action);
  void do_action(ReportStall& action);
  void do_action(ReplyRebalance&) {}
  void do_action(Note& action);
  void check_core();

  // --- members
  Node& add_node(Role role, const std::string& name);
  void check_release(const Node& shard, const PlacementTable& released);
  void connect(Node& node);
  void disconnect(Node& node);
  void crash(Node& node);
  void heartbeat(Node& node, uint64_t life);
  void drain(Node& node);
  void hang(Node& node, TimePoint until);
  void node_receives(Node& node, ToMember message);
  void run_next_plan(Node& node);
  void send_up(Node& node, FromMember message);
  void node_later(Node& node, Nanos delay, std::function<void()> task);

  // --- gateways
  void connect(Gateway& gateway);
  void drop(Gateway& gateway);
  void submit_new(Gateway& gateway);
  void send_submit(Gateway& gateway, Client& client);
  void send_cancel(Gateway& gateway, RequestId id, std::optional<uint32_t> choice);
  void gateway_replies(Gateway& gateway, RequestId id, const Status& status);
  void gateway_tokens(Gateway& gateway, const TokenEvent& event);

  void chaos();
  void check_service(const BatchPlan& plan);
  void violate(const std::string& what);
  void note(uint64_t value) { trace_ = internal::mix64(trace_ ^ (value + 0x9e3779b97f4a7c15ull)); }
  void count(const std::string& what, uint64_t by = 1) { outcome_.coverage[what] += by; }
  void absorb_metrics();
  bool quiet() const;

  const SimConfig config_;
  SplitMix64 random_;
  SchedulerOptions options_;
  TimePoint now_ = 1 * kSecond;
  TimePoint end_of_chaos_ = 0;
  TimePoint stalled_until_ = 0;  // the scheduler does not run before
  uint64_t serial_ = 0;
  std::map<std::pair<TimePoint, uint64_t>, std::function<void()>> queue_;
  std::unique_ptr<SchedulerCore> core_;
  uint64_t scheduler_life_ = 0;
  std::deque<Event> inbox_;
  bool plan_pending_ = false;
  uint64_t next_session_ = 1;
  uint64_t next_incarnation_ = 1;
  uint64_t next_request_ = 1;
  std::vector<std::vector<TokenId>>
      said_;  // some past prompts with their answers: what conversations go on from
  std::map<SessionId, Session> sessions_;
  std::deque<Node> nodes_;
  std::deque<Gateway> gateways_;
  // Tokens of a choice that this scheduler has told anybody of.
  std::map<std::pair<RequestId, uint32_t>, uint32_t> emitted_;
  bool lost_one_ = false;
  // In a flood: accepted requests of the modest tenant that have not started, its sequences, and how many
  // rows the other one was given more than it, since it has had something waiting.
  std::set<RequestId> modest_waiting_;
  std::set<RequestId> modest_;
  std::set<SeqId> modest_running_;
  int64_t gap_ = 0;
  uint64_t trace_ = 0;
  SimOutcome outcome_;
};

}  // namespace conclave::scheduler
