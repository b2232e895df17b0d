// What is noted of requests that are followed.
#include <algorithm>
#include <memory>
#include <utility>

#include "scheduler/core/core.h"

namespace conclave::scheduler {

void SchedulerCore::mark(const Request& request, TimelineMarkKind kind, uint32_t choice,
                         std::string_view detail) {
  if (request.timeline != nullptr) request.timeline->mark(kind, choice, detail, last_now_);
}

StatusOr<SchedulerTimeline> SchedulerCore::timeline(RequestId request) const {
  const Timeline* const found = timelines_.find(request);
  if (found == nullptr) return not_found("no timeline of this request is kept here");
  return found->snapshot(last_now_);
}

void SchedulerCore::note_steps(const Member& worker, StepResult& result, const StepOutcome& outcome,
                               TimePoint now) {
  TimelineStep step;
  step.step = result.step;
  step.worker = worker.hello.incarnation;
  step.compute_ns = std::max<Nanos>(0, result.compute_ns);
  step.expert_wait_ns = std::max<Nanos>(0, result.expert_wait_ns);
  step.plan_wait_ns = std::max<Nanos>(0, result.plan_wait_ns);
  if (result.timing) step.timing = std::make_shared<const StepTiming>(*std::move(result.timing));
  for (const StepOutcome::Timed& slice : outcome.timed) {
    Timeline& timeline = *slice.owner->request->timeline;
    timeline.name(step.worker, worker.hello.name);
    if (step.timing != nullptr) {
      for (const ShardTiming& shard : step.timing->shards) {
        if (timeline.names(shard.shard)) continue;
        const Member* const member = members_.find(shard.shard);
        if (member != nullptr) timeline.name(shard.shard, member->hello.name);
      }
    }
    step.choice = slice.owner->index;
    step.start = slice.start;
    step.count = slice.count;
    step.sampled = slice.sampled;
    timeline.add(step, outcome.planned, now);
  }
}

}  // namespace conclave::scheduler
