#include "scheduler/core/timelines.h"

#include <algorithm>
#include <utility>

namespace conclave::scheduler {

Timeline::Timeline(RequestId request, const TraceContext& trace, uint32_t prompt_tokens, uint32_t max_steps,
                   TimePoint accepted)
    : accepted_(accepted), max_steps_(std::max(max_steps, 2u)) {
  shown_.request = request;
  shown_.trace = trace;
  shown_.prompt_tokens = prompt_tokens;
}

void Timeline::mark(TimelineMarkKind kind, uint32_t choice, std::string_view detail, TimePoint now) {
  // How it ended is worth more than what came just before.
  if (shown_.marks.size() >= kMaxTimelineMarks && kind == TimelineMarkKind::kEnded) {
    ++shown_.dropped_marks;
    shown_.marks.pop_back();
  }
  if (shown_.marks.size() >= kMaxTimelineMarks) {
    ++shown_.dropped_marks;
    return;
  }
  shown_.marks.push_back({now - accepted_, kind, choice, std::string(detail.substr(0, kMaxTimelineDetail))});
}

void Timeline::add(TimelineStep step, TimePoint planned, TimePoint now) {
  step.planned = std::max<Nanos>(planned - accepted_, 0);
  step.reported = now - accepted_;
  if (shown_.steps.size() < max_steps_ / 2) {
    shown_.steps.push_back(std::move(step));
    return;
  }
  if (last_.size() >= max_steps_ - max_steps_ / 2) {
    last_.pop_front();
    ++shown_.dropped_steps;
  }
  last_.push_back(std::move(step));
}

bool Timeline::names(Incarnation member) const {
  return std::any_of(shown_.members.begin(), shown_.members.end(),
                     [&](const TimelineMember& one) { return one.member == member; });
}

void Timeline::name(Incarnation member, std::string_view name) {
  if (shown_.members.size() >= kMaxTimelineMembers || names(member)) return;
  shown_.members.push_back({member, std::string(name)});
}

SchedulerTimeline Timeline::snapshot(TimePoint now) const {
  SchedulerTimeline out = shown_;
  out.age = now - accepted_;
  out.first_steps = out.steps.size();
  out.steps.insert(out.steps.end(), last_.begin(), last_.end());
  return out;
}

std::shared_ptr<Timeline> TimelineBook::open(RequestId request, const TraceContext& trace,
                                             uint32_t prompt_tokens, TimePoint now) {
  // The same id again is a request that this scheduler had forgotten.
  if (const auto known = by_id_.find(request); known != by_id_.end()) {
    std::erase(order_, known->second);
    by_id_.erase(known);
  }
  if (order_.size() >= limits_.requests) {
    const auto oldest =
        std::find_if(order_.begin(), order_.end(), [](const auto& one) { return one->ended(); });
    if (oldest == order_.end()) {
      ++refused_;
      return nullptr;
    }
    by_id_.erase((*oldest)->request());
    order_.erase(oldest);
  }
  ++opened_;
  auto made = std::make_shared<Timeline>(request, trace, prompt_tokens, limits_.steps, now);
  order_.push_back(made);
  by_id_.emplace(request, made);
  return made;
}

const Timeline* TimelineBook::find(RequestId request) const {
  const auto it = by_id_.find(request);
  return it == by_id_.end() ? nullptr : it->second.get();
}

}  // namespace conclave::scheduler
