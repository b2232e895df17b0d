// Every request that was accepted and has not ended towards its gateway: where it waits, where it runs, what
// it has generated, what its gateway has seen, and when its time is up.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/model/plan.h"
#include "libs/model/request.h"
#include "scheduler/core/events.h"

namespace conclave::scheduler {

enum class RequestState : uint8_t {
  kWaiting,  // for a worker with room
  kRunning,  // a worker has a sequence of it
  kEnded,    // its end has yet to be sent; only while no gateway is attached
};

struct Request {
  AcceptedRequest accepted;
  uint64_t arrival = 0;  // order of acceptance, kept when it moves to another worker
  TimePoint deadline = kNever;
  bool checked = false;  // against the fleet's model
  RequestState state = RequestState::kWaiting;
  SessionId gateway;  // none: detached
  TimePoint grace_until = kNever;

  std::vector<TokenId> generated;  // begins with what was delivered before
  std::vector<float> logprobs;     // as long as generated, where asked for
  std::vector<std::vector<TokenLogprob>> top_logprobs;
  uint32_t sent =
      0;  // generated tokens the gateway has; may run ahead of what is generated here after a replay

  SeqId seq;  // kRunning
  Incarnation worker;

  FinishReason finish = FinishReason::kNone;  // kEnded
  std::string error;

  uint32_t prompt_tokens() const { return static_cast<uint32_t>(accepted.prompt.size()); }
  // Positions it takes when it generates all it may.
  uint32_t max_positions() const { return prompt_tokens() + accepted.sampling.max_tokens; }
  RequestId id() const { return accepted.id; }
};

class RequestTable {
 public:
  Request& add(AcceptedRequest accepted, SessionId gateway, TimePoint now);
  Request* find(RequestId id);
  Request* find(SeqId seq);
  void erase(Request& request);

  void set_waiting(Request& request);
  void set_running(Request& request, Incarnation worker, SeqId seq);
  void set_ended(Request& request, FinishReason reason, std::string error);

  void attach(Request& request, SessionId gateway);
  void detach(Request& request, TimePoint grace_until);
  // Adds a sampled token.
  void append(Request& request, const SampledToken& token);

  // In order of arrival.
  const std::map<uint64_t, Request*>& waiting() const { return waiting_; }
  std::vector<Request*> running_on(Incarnation worker);
  std::vector<Request*> of_gateway(SessionId gateway);
  // Deadline or grace is over.
  std::vector<Request*> expired(TimePoint now);
  TimePoint next_timer() const { return timers_.empty() ? kNever : timers_.begin()->first; }

  uint64_t waiting_tokens() const { return waiting_tokens_; }
  uint32_t running() const { return static_cast<uint32_t>(by_seq_.size()); }
  uint32_t detached() const { return detached_; }
  size_t size() const { return requests_.size(); }
  Status audit() const;

 private:
  void leave_state(Request& request);
  void set_timer(Request& request);
  static TimePoint timer_of(const Request& request);

  std::unordered_map<RequestId, std::unique_ptr<Request>> requests_;
  std::map<uint64_t, Request*> waiting_;
  std::map<SeqId, Request*> by_seq_;
  std::set<std::pair<TimePoint, RequestId>> timers_;
  std::unordered_map<RequestId, TimePoint> timer_set_;
  uint64_t next_arrival_ = 1;
  uint64_t waiting_tokens_ = 0;
  uint32_t detached_ = 0;
};

}  // namespace conclave::scheduler
