// The processes and connections of the scheduler simulation. Private to scheduler_sim*.cc.
#pragma once

#include "tests/sim/scheduler_sim.h"

namespace conclave::scheduler {

struct SchedulerSim::Session {
  bool alive = true;  // both ends are connected
  Node* node = nullptr;
  Gateway* gateway = nullptr;
  TimePoint up_at = 0;  // messages of one direction keep their order
  TimePoint down_at = 0;
};

struct SchedulerSim::Node {
  Role role = Role::kAttention;
  std::string name;
  uint32_t kv_blocks = 0;
  uint64_t life = 0;  // of the process; what an earlier life scheduled is void
  Incarnation incarnation;
  SessionId session;
  TimePoint hung_until = 0;
  ModelWorker model{1};
  std::deque<ToMember> inbox;  // arrived while it hung
  std::deque<BatchPlan> plans;
  bool busy = false;
  Epoch epoch;
  PlacementTable table;  // workers: the last one given
};

struct SchedulerSim::Client {
  enum State { kSubmitted, kAccepted, kEnded, kRefused };
  struct Choice {
    std::vector<TokenId> answer;  // the oracle's
    std::vector<TokenId> got;
    bool ended = false;
    bool cancelled = false;
  };
  AcceptedRequest request;
  State state = kSubmitted;
  std::vector<Choice> choices;
  uint32_t prompt_got = 0;  // prompt log-probabilities
  TimePoint deadline = 0;
  bool cancelled = false;
};

struct SchedulerSim::Gateway {
  std::string name;
  SessionId session;
  bool closed = false;
  std::map<RequestId, Client> clients;
};

}  // namespace conclave::scheduler
