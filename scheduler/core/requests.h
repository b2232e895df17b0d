// Every request that was accepted and has not ended towards its gateway: where it waits, where it runs, what
// it has generated, what its gateway has seen, and when its time is up.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
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
#include "scheduler/core/admission_queue.h"
#include "scheduler/core/events.h"

namespace conclave::scheduler {

struct Request;
class Timeline;

enum class ChoiceState : uint8_t {
  kWaiting,  // for a worker with room
  kRunning,  // a worker has a sequence of it
  kEnded,
};

// One of a request's n answers: a sequence of its own. What a token touches comes first, here and below.
struct Choice {
  Request* request = nullptr;
  std::vector<TokenId> generated;  // begins with what was delivered before
  uint32_t index = 0;
  uint32_t sent =
      0;  // generated tokens the gateway has; may run ahead of what is generated here after a replay
  ChoiceState state = ChoiceState::kWaiting;
  FinishReason finish = FinishReason::kNone;  // kEnded
  bool end_sent = false;
  bool parked = false;   // kWaiting: for another choice of the request, not for room
  bool started = false;  // before: its tenant was charged for the prompt
  SeqId seq;             // kRunning
  Incarnation worker;
  TimePoint progress_at = 0;  // its last token or start

  uint32_t preemptions = 0;
  std::vector<float> logprobs;  // as long as generated, where asked for
  std::vector<std::vector<TokenLogprob>> top_logprobs;
  std::string error;  // kEnded
};

struct Request {
  SessionId gateway;                          // none: detached
  AdmissionQueue::Tenant* account = nullptr;  // of its tenant, while it has choices that have not ended
  uint32_t parked = 0;                        // choices
  bool logprobs = false;                      // asked for
  AcceptedRequest accepted;
  uint64_t arrival = 0;  // order of acceptance, kept when it moves to another worker
  TimePoint accepted_at = 0;
  TimePoint deadline = kNever;
  bool checked = false;  // against the fleet's model
  TimePoint grace_until = kNever;
  std::vector<Choice> choices;               // as many for its whole life
  uint32_t live = 0;                         // choices that have not ended
  FinishReason worst = FinishReason::kNone;  // of the ends so far: the request's own, for counters

  // Prompt tokens that its first admission found in a prefix cache; nothing before. The gateway is told once.
  std::optional<uint32_t> cached_tokens;
  bool cached_sent = false;

  // Of the prompt's tokens, where asked for; the first entry is of position prompt_base.
  std::vector<PromptLogprob> prompt_logprobs;
  uint32_t prompt_base = 1;
  uint32_t prompt_sent = 0;  // how many prompt tokens' the gateway has

  // Which process has or had it. A resumable request is handed from one to the other; what an earlier one
  // still says about it does not count.
  Incarnation holder;
  bool incomplete = false;  // log-probabilities of delivered tokens went with another scheduler
  uint64_t kept_order = 0;  // ended and kept to be adopted: when that began; 0: it is not
  uint64_t kept_bytes = 0;
  std::optional<StallHop> stalled_at;  // as last reported
  std::shared_ptr<Timeline> timeline;  // null: not followed

  // All choices have ended: kept until that was sent, while no gateway is attached.
  bool ended() const { return live == 0; }
  // Another gateway can take it over.
  bool resumable() const { return !accepted.router_context.empty(); }
  uint32_t prompt_tokens() const { return static_cast<uint32_t>(accepted.prompt.size()); }
  // Positions a choice takes when it generates all it may.
  uint32_t max_positions() const { return prompt_tokens() + accepted.sampling.max_tokens; }
  // The prompt position whose log-probability is due next; prompt_tokens() when all are there.
  uint32_t prompt_next() const { return prompt_base + static_cast<uint32_t>(prompt_logprobs.size()); }
  // Numbers kept for its prompt log-probabilities at worst: what the scheduler's bound counts.
  uint64_t prompt_values() const { return prompt_logprob_values(accepted); }
  static uint64_t prompt_logprob_values(const AcceptedRequest& accepted) {
    return accepted.sampling.prompt_logprobs
               ? accepted.prompt.size() * (1ull + accepted.sampling.prompt_top_logprobs)
               : 0;
  }
  RequestId id() const { return accepted.id; }
};

class RequestTable {
 public:
  explicit RequestTable(QueueRules rules) : queue_(std::move(rules)) {}

  Request& add(AcceptedRequest accepted, SessionId gateway, TimePoint now);
  Request* find(RequestId id);
  Choice* find(SeqId seq);
  void erase(Request& request);

  void set_waiting(Choice& choice);
  void set_running(Choice& choice, Incarnation worker, SeqId seq);
  void set_ended(Choice& choice, FinishReason reason, std::string error);

  // A waiting choice waits until another one of its request samples, ends or waits again.
  void park(Choice& choice);

  void attach(Request& request, SessionId gateway, Incarnation holder);
  void detach(Request& request, TimePoint grace_until);
  // A resumable request that ended stays to be adopted; one whose gateway is attached is detached.
  void keep(Request& request, TimePoint grace_until);
  // It is resumable no more.
  void forget_context(Request& request);
  // The one kept for longest; null: none is.
  Request* oldest_kept();
  uint32_t kept() const { return static_cast<uint32_t>(kept_.size()); }
  uint64_t kept_bytes() const { return kept_bytes_; }
  uint64_t context_bytes() const { return context_bytes_; }
  // Adds a sampled token, which the tenant is charged for.
  void append(Choice& choice, SampledToken& token, TimePoint now);
  // In the order of their arrival.
  std::vector<Request*> all();

  // What waits. Choices enter and leave by their state only; accounts may be charged.
  AdmissionQueue& queue() { return queue_; }
  const AdmissionQueue& queue() const { return queue_; }
  // In the order in which they started.
  std::vector<Choice*> running_on(Incarnation worker);
  std::vector<Request*> of_gateway(SessionId gateway);
  // Deadline or grace is over.
  std::vector<Request*> expired(TimePoint now);
  TimePoint next_timer() const { return timers_.empty() ? kNever : timers_.begin()->first; }

  uint64_t prompt_values() const { return prompt_values_; }  // sum of Request::prompt_values
  uint32_t running() const { return static_cast<uint32_t>(by_seq_.size()); }
  uint32_t detached() const { return detached_ - kept(); }
  size_t size() const { return requests_.size(); }
  Status audit() const;

 private:
  void leave_state(Choice& choice);
  void unkeep(Request& request);
  void unpark(Request& request);
  void set_timer(Request& request);
  static TimePoint timer_of(const Request& request);

  std::unordered_map<RequestId, std::unique_ptr<Request>> requests_;
  AdmissionQueue queue_;
  std::unordered_map<SeqId, Choice*> by_seq_;
  std::set<std::pair<TimePoint, RequestId>> timers_;
  std::unordered_map<RequestId, TimePoint> timer_set_;
  uint64_t next_arrival_ = 1;
  uint64_t prompt_values_ = 0;
  uint32_t detached_ = 0;  // kept ones included
  std::map<uint64_t, RequestId> kept_;
  uint64_t next_kept_ = 1;
  uint64_t kept_bytes_ = 0;
  uint64_t context_bytes_ = 0;
};

}  // namespace conclave::scheduler
