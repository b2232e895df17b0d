#include "bench/scheduler/replay.h"

#include <algorithm>
#include <deque>
#include <queue>
#include <unordered_map>
#include <utility>
#include <variant>

#include "bench/scheduler/fleet.h"
#include "libs/base/check.h"
#include "scheduler/core/core.h"

namespace conclave::bench {
namespace {

using scheduler::Action;
using scheduler::SessionId;

constexpr Nanos kHeartbeat = 100 * kMillisecond;
constexpr Nanos kRetryLeast = kSecond;
constexpr uint32_t kMaxRetries = 20;

class Replay {
 public:
  Replay(const std::vector<TraceRequest>& trace, const ReplayOptions& options)
      : trace_(trace), options_(options), core_(options.scheduler), workers_(options.workers) {
    result_.requests.resize(trace.size());
    followers_.resize(trace.size());
    retries_.resize(trace.size());
    FleetShape shape;
    shape.workers = options.workers;
    shape.kv_blocks = options.kv_blocks;
    shape.vocab_size = options.vocab_size;
    fleet_ = join_fleet(core_, options.scheduler, shape, now_);
    for (uint32_t i = 0; i < options.workers; ++i) worker_of_[fleet_.workers[i]] = i;
    result_.start = now_;
    for (uint32_t i = 0; i < trace.size(); ++i) {
      if (!options.only_tenant.empty() && trace[i].tenant != options.only_tenant) continue;
      if (trace[i].after >= 0) {
        followers_[static_cast<size_t>(trace[i].after)].push_back(i);
      } else {
        ++due_;
        at(result_.start + trace[i].at, Arrival{i});
      }
    }
    at(now_, Beat{});
  }

  ReplayResult run() {
    while (due_ + open_ > 0) {
      const TimePoint timer = core_.next_timer();
      CONCLAVE_CHECK(!queue_.empty());
      if (timer < queue_.top().time) {
        now_ = std::max(now_, timer);
        feed(scheduler::Tick{});
        continue;
      }
      Item item = std::move(const_cast<Item&>(queue_.top()));  // popped next
      queue_.pop();
      now_ = item.time;
      std::visit([this](auto& what) { happen(what); }, item.what);
    }
    result_.end = last_end_;
    result_.metrics = core_.metrics();
    const Status audit = core_.audit();
    CONCLAVE_CHECK(audit.ok());
    CONCLAVE_CHECK(result_.metrics.protocol_violations == 0 && result_.metrics.members_lost == 0);
    return std::move(result_);
  }

 private:
  struct Arrival {
    uint32_t request;
  };
  struct PlanArrives {
    uint32_t worker;
    BatchPlan plan;
  };
  struct StepDone {
    uint32_t worker;
    StepResult result;
  };
  struct ResultArrives {
    uint32_t worker;
    StepResult result;
  };
  struct Beat {};
  using What = std::variant<Arrival, PlanArrives, StepDone, ResultArrives, Beat>;
  struct Item {
    TimePoint time;
    uint64_t order;
    What what;
    bool operator<(const Item& other) const {
      return std::pair(time, order) > std::pair(other.time, other.order);
    }
  };
  struct Sequence {
    uint32_t request = 0;
    uint32_t prompt = 0;
  };
  struct WorkerState {
    std::deque<BatchPlan> plans;
    bool busy = false;
    std::unordered_map<SeqId, Sequence> sequences;
  };

  void at(TimePoint time, What what) { queue_.push({time, next_order_++, std::move(what)}); }

  void feed(scheduler::Event event) {
    take(core_.on_event(std::move(event), now_));
    take(core_.plan(now_));
  }

  void take(scheduler::Actions actions) {
    for (Action& action : actions) std::visit([this](auto& a) { on(a); }, action);
  }
  void on(scheduler::SendMember& action) {
    auto* plan = std::get_if<BatchPlan>(&action.message);
    if (plan == nullptr) return;
    at(now_ + options_.link, PlanArrives{worker_of_.at(action.session), std::move(*plan)});
  }
  void on(scheduler::ReplySubmit& action) {
    const uint32_t index = static_cast<uint32_t>(action.request.lo - 1);
    if (action.status.ok()) return;
    --open_;
    if (++retries_[index] > kMaxRetries) {
      result_.requests[index].refused = true;
      return;
    }
    ++due_;
    at(now_ + std::max(kRetryLeast, retry_after_of(action.status)), Arrival{index});
  }
  void on(scheduler::SendTokens& action) {
    const uint32_t index = static_cast<uint32_t>(action.event.request.lo - 1);
    RequestRecord& record = result_.requests[index];
    CONCLAVE_CHECK(record.sent && record.ended == 0);
    if (!action.event.tokens.empty()) {
      if (record.first_token == 0) {
        record.first_token = now_;
      } else {
        record.gaps.push_back(now_ - last_token_.at(index));
      }
      last_token_[index] = now_;
    }
    if (action.event.finish == FinishReason::kNone) return;
    record.ended = last_end_ = now_;
    record.finished = action.event.finish == FinishReason::kLength;
    last_token_.erase(index);
    --open_;
    // A client whose request failed goes away.
    if (!record.finished) return;
    for (const uint32_t next : followers_[index]) {
      ++due_;
      at(now_ + trace_[next].delay, Arrival{next});
    }
  }
  template <class Other>
  void on(Other&) {}

  void happen(Arrival& arrival) {
    const TraceRequest& from = trace_[arrival.request];
    RequestRecord& record = result_.requests[arrival.request];
    --due_;
    ++open_;
    if (!record.sent) record.arrived = now_;
    record.sent = true;
    AcceptedRequest request;
    request.id = RequestId{1, arrival.request + 1};
    request.prompt = prompt_tokens(from, options_.vocab_size);
    request.sampling.max_tokens = from.output;
    request.sampling.seed = from.answer;
    request.priority = from.priority;
    request.tenant = from.tenant;
    request.time_left = from.deadline;
    feed(scheduler::Submit{fleet_.gateway, std::move(request)});
  }

  void happen(PlanArrives& arrival) {
    WorkerState& worker = workers_[arrival.worker];
    worker.plans.push_back(std::move(arrival.plan));
    if (!worker.busy) start(arrival.worker);
  }

  void start(uint32_t index) {
    WorkerState& worker = workers_[index];
    const BatchPlan plan = std::move(worker.plans.front());
    worker.plans.pop_front();
    worker.busy = true;
    StepResult result;
    result.step = plan.step;
    for (const SequenceStart& start : plan.starts) {
      worker.sequences[start.seq] = {static_cast<uint32_t>(start.request.lo - 1), start.prompt_tokens};
    }
    double us = plan.slices.empty() ? 0 : options_.cost.step;
    for (const PlanSlice& slice : plan.slices) {
      const Sequence& sequence = worker.sequences.at(slice.seq);
      const bool decode = slice.count == 1 && slice.sample && slice.start >= sequence.prompt;
      us += slice.count * (decode ? options_.cost.decode_row : options_.cost.prefill_row);
      us += options_.cost.context_1k * slice.count * (slice.start + 0.5 * slice.count) / 1000;
      if (!slice.sample) continue;
      SampledToken token;
      token.seq = slice.seq;
      token.position = slice.start + slice.count;
      token.token = segment_token(trace_[sequence.request].answer, token.position - sequence.prompt,
                                  options_.vocab_size);
      result.sampled.push_back(std::move(token));
    }
    for (const SeqId seq : plan.ends) worker.sequences.erase(seq);
    const Nanos time = static_cast<Nanos>(us * 1000);
    result.compute_ns = time;
    result_.busy += time;
    result_.longest_step = std::max(result_.longest_step, time);
    at(now_ + time, StepDone{index, std::move(result)});
  }

  void happen(StepDone& done) {
    at(now_ + options_.link, ResultArrives{done.worker, std::move(done.result)});
    WorkerState& worker = workers_[done.worker];
    worker.busy = false;
    if (!worker.plans.empty()) start(done.worker);
  }

  void happen(ResultArrives& arrival) {
    feed(scheduler::MemberMessage{fleet_.workers[arrival.worker], std::move(arrival.result)});
  }

  void happen(Beat&) {
    feed(scheduler::MemberMessage{fleet_.shard, Heartbeat{}});
    for (const SessionId worker : fleet_.workers) feed(scheduler::MemberMessage{worker, Heartbeat{}});
    at(now_ + kHeartbeat, Beat{});
  }

  const std::vector<TraceRequest>& trace_;
  const ReplayOptions& options_;
  scheduler::SchedulerCore core_;
  Fleet fleet_;
  TimePoint now_ = kSecond;
  TimePoint last_end_ = 0;
  std::priority_queue<Item> queue_;
  uint64_t next_order_ = 0;
  std::vector<WorkerState> workers_;
  std::map<SessionId, uint32_t> worker_of_;
  std::vector<std::vector<uint32_t>> followers_;
  std::vector<uint32_t> retries_;
  std::unordered_map<uint32_t, TimePoint> last_token_;
  uint64_t due_ = 0;   // arrivals to come
  uint64_t open_ = 0;  // submitted and not ended
  ReplayResult result_;
};

}  // namespace

ReplayResult replay(const std::vector<TraceRequest>& trace, const ReplayOptions& options) {
  return Replay(trace, options).run();
}

}  // namespace conclave::bench
