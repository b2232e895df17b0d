// A request's timeline as people and tools read it: JSON of our own, and the trace format of chrome://tracing
// and Perfetto (the "Trace Event Format").
//
// Times of the router are on its own clock since the request's arrival. The scheduler's are on its clock
// since it accepted the request; that moment lies, for the router, between its submission and the
// acknowledgement, and is put in the middle, wrong by half of that time at most. A step's parts are durations
// that its worker measured; the step is drawn to end when its result was at the scheduler.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "libs/base/status.h"
#include "libs/model/timeline.h"
#include "router_service/gateway/timeline.h"

namespace conclave::router {

struct WholeTimeline {
  std::optional<gateway::RouterTimelineView> router;  // none: another router had it
  StatusOr<SchedulerTimeline> scheduler = not_found("not asked");
  std::vector<RequestId> namesakes{};  // other requests that are called as this one was asked for
};

// Each is one JSON document and a newline.
std::string timeline_json(const WholeTimeline& timeline);
std::string chrome_trace(const WholeTimeline& timeline);
std::string list_json(const std::vector<gateway::RouterTimelineView>& timelines);

// Where the scheduler's zero lies on the router's clock, and how wrong that may be.
struct SchedulerOffset {
  Nanos at = 0;
  Nanos error = 0;
};
SchedulerOffset scheduler_offset(const WholeTimeline& timeline);

}  // namespace conclave::router
