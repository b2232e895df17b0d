// How one request went, as the scheduler tells it: what happened to it, and each step that computed something
// for it. Durations of a step are those of the process that measured them; clocks of two machines are never
// compared.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/model/plan.h"
#include "libs/model/request.h"

namespace conclave {

// What happened to a request or to one of its choices.
enum class TimelineMarkKind : uint8_t {
  kAccepted,    // now its time counts; with the tokens that a resubmission has delivered
  kStarted,     // on a worker: out of the queue
  kPreempted,   // gave its pages to a more important one; waits again
  kReplayed,    // its worker was lost; waits again
  kMoved,       // off a draining worker; waits again
  kStalled,     // no progress, by hop
  kDetached,    // its router is away
  kReattached,  // and back
  kAdopted,     // another connection took the stream over
  kReleased,    // its client left, or its text had ended
  kEnded,       // a choice, with the reason
  kCount
};
constexpr std::string_view timeline_mark_name(TimelineMarkKind kind) {
  constexpr std::string_view kNames[] = {"accepted", "started",  "preempted", "replayed",
                                         "moved",    "stalled",  "detached",  "reattached",
                                         "adopted",  "released", "ended"};
  return kNames[static_cast<size_t>(kind)];
}

// Times are nanoseconds since the request was accepted, on the scheduler's clock.
struct TimelineMark {
  Nanos at = 0;
  TimelineMarkKind kind = TimelineMarkKind::kAccepted;
  uint32_t choice = 0;
  std::string detail;  // for people
};

struct TimelineStep {
  uint32_t choice = 0;
  StepId step;  // of its worker
  Incarnation worker;
  Nanos planned = 0;   // the plan was sent
  Nanos reported = 0;  // its result was here
  uint32_t start = 0;  // positions [start, start + count) of the sequence were computed
  uint32_t count = 0;
  bool sampled = false;  // and a token drawn
  // Of the whole step, which computes other requests too.
  Nanos compute_ns = 0;
  Nanos expert_wait_ns = 0;
  Nanos plan_wait_ns = 0;                    // the worker stood still before it for want of a plan
  std::shared_ptr<const StepTiming> timing;  // null: its worker does not know how
};

struct TimelineMember {
  Incarnation member;
  std::string name;
};

struct SchedulerTimeline {
  RequestId request;
  TraceContext trace;
  Nanos age = 0;  // since it was accepted
  bool ended = false;
  uint32_t prompt_tokens = 0;
  std::vector<TimelineMark> marks;      // in order, the oldest ones first
  uint64_t dropped_marks = 0;           // later ones, beyond the bound
  std::vector<TimelineStep> steps;      // the first ones, then the last ones
  uint64_t dropped_steps = 0;           // between those two
  uint64_t first_steps = 0;             // how many of `steps` come before what was dropped
  std::vector<TimelineMember> members;  // workers and shards that the steps name
};

}  // namespace conclave
