// Lines to the scheduler between simulated processes: ordered, with delays and reconnects, as the gRPC ones
// behave. What is under way when a process dies is lost with it, and a scheduler that comes back knows
// nobody.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libs/ports/member_link.h"
#include "libs/runtime/sim_executor.h"
#include "scheduler/loop.h"

namespace conclave::scheduler {

// Where the scheduler runs at present.
struct SchedulerPlace {
  SimExecutor* process = nullptr;
  SchedulerLoop* loop = nullptr;  // null while it is down
  uint64_t life = 0;              // a session is of one life; its number may come again in another
  // Told when the scheduler ends a member's session: it is dead to it.
  std::function<void(Incarnation, const Status& cause)> on_closed;
};

// One direction of a connection. Each timer delivers the front message, so a stopped sender keeps their
// order.
class SimPipe : public std::enable_shared_from_this<SimPipe> {
 public:
  explicit SimPipe(SimWorld& world) : world_(world) {}
  void carry(SimExecutor& sender, std::function<void()> deliver);
  // What is sent from now on arrives after `until`.
  void block(TimePoint until) { blocked_until_ = std::max(blocked_until_, until); }
  // What is under way is lost, and so are the timers: the sender is dead.
  void clear() { queue_.clear(); }

 private:
  SimWorld& world_;
  TimePoint blocked_until_ = 0;
  std::deque<std::function<void()>> queue_;
};

// A member's line, with heartbeats.
class SimLink : public MemberLink {
 public:
  using Beat = std::function<Heartbeat()>;
  // All borrowed. Connects in a task of the member.
  SimLink(SimWorld& world, SchedulerPlace& place, SimExecutor& member, MemberHandler& handler, Beat beat);
  ~SimLink() override;
  void send(FromMember message) override;
  // The session as the scheduler knows it; none while down.
  SessionId session() const;
  // The scheduler died.
  void reset();
  // Nothing passes until then; both ends think that the line stands.
  void block(TimePoint until);

 private:
  struct State;
  class Session;
  std::shared_ptr<State> state_;
};

// A request and what its client saw of it.
struct Stream {
  struct Choice {
    std::vector<TokenId> tokens;
    std::vector<float> logprobs;
    FinishReason finish = FinishReason::kNone;
    bool cancelled = false;
  };
  AcceptedRequest request;
  bool accepted = false;
  bool cancelled = false;
  std::vector<Choice> choices;
  std::vector<float> prompt_logprobs;  // from position 1
  std::string fault;                   // the first thing that must not happen

  bool ended() const {
    return std::all_of(choices.begin(), choices.end(),
                       [](const Choice& c) { return c.finish != FinishReason::kNone; });
  }
};

using Streams = std::map<RequestId, Stream>;

// A router's line: keeps its open requests and submits them again, with what was delivered, to a new
// scheduler.
class SimGateway {
 public:
  // `streams`: those whose clients come back to this router after theirs died, with what they have got.
  SimGateway(SimWorld& world, SchedulerPlace& place, SimExecutor& process, Streams streams = {});
  ~SimGateway();
  Stream& submit(AcceptedRequest request);
  void cancel(Stream& stream);
  void cancel_choice(Stream& stream, uint32_t choice);
  void reset();
  const Streams& streams() const;
  // Of a router that died: what its clients have. References to streams stay valid.
  Streams release();
  // As the scheduler knows it; none while down.
  SessionId session() const;
  // The first thing that must not happen to any stream.
  const std::string& fault() const;
  uint64_t resubmitted() const;

 private:
  struct State;
  class Session;
  std::shared_ptr<State> state_;
};

}  // namespace conclave::scheduler
