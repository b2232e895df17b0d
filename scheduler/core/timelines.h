// How the requests went that are followed (TraceContext::followed): one bounded account each, for the open
// ones and the last that ended. Those that are not followed cost a null pointer.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/model/timeline.h"

namespace conclave::scheduler {

struct TimelineLimits {
  uint32_t requests = 256;  // open and ended together; 0: nobody is followed
  uint32_t steps = 256;     // of one request: the first half and the last half of so many
};
inline constexpr size_t kMaxTimelineMarks = 128;   // of one request; the last place is the end's
inline constexpr size_t kMaxTimelineDetail = 200;  // bytes of one mark
inline constexpr size_t kMaxTimelineMembers = 64;  // whose names one request keeps

class Timeline {
 public:
  Timeline(RequestId request, const TraceContext& trace, uint32_t prompt_tokens, uint32_t max_steps,
           TimePoint accepted);

  void mark(TimelineMarkKind kind, uint32_t choice, std::string_view detail, TimePoint now);
  // `planned` and `now` are the scheduler's times; step.planned and step.reported are set here.
  void add(TimelineStep step, TimePoint planned, TimePoint now);
  void name(Incarnation member, std::string_view name);
  bool names(Incarnation member) const;
  void end() { shown_.ended = true; }

  bool ended() const { return shown_.ended; }
  RequestId request() const { return shown_.request; }
  SchedulerTimeline snapshot(TimePoint now) const;

 private:
  const TimePoint accepted_;
  const uint32_t max_steps_;
  SchedulerTimeline shown_;        // with the first steps
  std::deque<TimelineStep> last_;  // and the last ones
};

class TimelineBook {
 public:
  explicit TimelineBook(TimelineLimits limits) : limits_(limits) {}

  // Null, which is counted, when as many open ones are followed as there may be. The oldest that ended makes
  // room.
  std::shared_ptr<Timeline> open(RequestId request, const TraceContext& trace, uint32_t prompt_tokens,
                                 TimePoint now);
  // Null: it is not followed, or forgotten.
  const Timeline* find(RequestId request) const;
  size_t size() const { return order_.size(); }
  uint64_t opened() const { return opened_; }
  uint64_t refused() const { return refused_; }

 private:
  const TimelineLimits limits_;
  std::deque<std::shared_ptr<Timeline>> order_;  // as they were opened
  std::unordered_map<RequestId, std::shared_ptr<Timeline>> by_id_;
  uint64_t opened_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace conclave::scheduler
