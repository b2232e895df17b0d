// How steps and requests went: the timing of a step, the timeline of a request.
#include <memory>

#include "libs/rpc/convert.h"
#include "libs/rpc/convert_checks.h"

namespace conclave::rpc {
namespace {

void step_to_proto(const TimelineStep& from, pb::TimelineStep* to) {
  to->set_choice(from.choice);
  to->set_step(from.step.value);
  to->set_worker(from.worker.value);
  to->set_planned_ns(from.planned);
  to->set_reported_ns(from.reported);
  to->set_start(from.start);
  to->set_count(from.count);
  to->set_sampled(from.sampled);
  to->set_compute_ns(from.compute_ns);
  to->set_expert_wait_ns(from.expert_wait_ns);
  to->set_plan_wait_ns(from.plan_wait_ns);
  if (from.timing != nullptr) to_proto(*from.timing, to->mutable_timing());
}

StatusOr<TimelineStep> step_from_proto(const pb::TimelineStep& from) {
  RETURN_IF_ERROR(check_at_most("steps.choice", from.choice(), kMaxChoices - 1));
  RETURN_IF_ERROR(check_at_most("steps.start", from.start(), kMaxPositions));
  RETURN_IF_ERROR(check_at_most("steps.count", from.count(), kMaxPlanRows));
  for (const int64_t duration : {from.planned_ns(), from.reported_ns(), from.compute_ns(),
                                 from.expert_wait_ns(), from.plan_wait_ns()}) {
    RETURN_IF_ERROR(check_duration("steps", duration, kMaxDuration));
  }
  TimelineStep to;
  to.choice = from.choice();
  to.step = StepId(from.step());
  to.worker = Incarnation(from.worker());
  to.planned = from.planned_ns();
  to.reported = from.reported_ns();
  to.start = from.start();
  to.count = from.count();
  to.sampled = from.sampled();
  to.compute_ns = from.compute_ns();
  to.expert_wait_ns = from.expert_wait_ns();
  to.plan_wait_ns = from.plan_wait_ns();
  if (from.has_timing()) {
    ASSIGN_OR_RETURN(StepTiming timing, from_proto(from.timing()));
    to.timing = std::make_shared<const StepTiming>(std::move(timing));
  }
  return to;
}

}  // namespace

void to_proto(const TraceContext& from, pb::TraceContext* to) {
  to->set_trace_hi(from.trace_hi);
  to->set_trace_lo(from.trace_lo);
  to->set_span(from.span);
  to->set_followed(from.followed);
}

TraceContext from_proto(const pb::TraceContext& from) {
  return {from.trace_hi(), from.trace_lo(), from.span(), from.followed()};
}

void to_proto(const StepTiming& from, pb::StepTiming* to) {
  to->set_queued_ns(from.queued_ns);
  to->set_wall_ns(from.wall_ns);
  to->set_attention_ns(from.attention_ns);
  to->set_dispatch_ns(from.dispatch_ns);
  to->set_combine_ns(from.combine_ns);
  to->set_head_ns(from.head_ns);
  to->set_hidden_ns(from.hidden_ns);
  to->set_rows(from.rows);
  to->set_micro_batches(from.micro_batches);
  to->set_retried_items(from.retried_items);
  to->set_deadlines(from.deadlines);
  for (const ShardTiming& shard : from.shards) {
    pb::ShardTiming* out = to->add_shards();
    out->set_shard(shard.shard.value);
    out->set_replies(shard.replies);
    out->set_items(shard.items);
    out->set_outstanding_ns(shard.outstanding_ns);
    out->set_slowest_ns(shard.slowest_ns);
    out->set_compute_ns(shard.compute_ns);
  }
}

StatusOr<StepTiming> from_proto(const pb::StepTiming& from) {
  for (const int64_t duration : {from.queued_ns(), from.wall_ns(), from.attention_ns(), from.dispatch_ns(),
                                 from.combine_ns(), from.head_ns(), from.hidden_ns()}) {
    RETURN_IF_ERROR(check_duration("result.timing", duration, kMaxDuration));
  }
  RETURN_IF_ERROR(check_count("result.timing.shards", from.shards_size(), kMaxTimedShards));
  StepTiming to;
  to.queued_ns = from.queued_ns();
  to.wall_ns = from.wall_ns();
  to.attention_ns = from.attention_ns();
  to.dispatch_ns = from.dispatch_ns();
  to.combine_ns = from.combine_ns();
  to.head_ns = from.head_ns();
  to.hidden_ns = from.hidden_ns();
  to.rows = from.rows();
  to.micro_batches = from.micro_batches();
  to.retried_items = from.retried_items();
  to.deadlines = from.deadlines();
  for (const pb::ShardTiming& shard : from.shards()) {
    for (const int64_t duration : {shard.outstanding_ns(), shard.slowest_ns(), shard.compute_ns()}) {
      RETURN_IF_ERROR(check_duration("result.timing.shards", duration, kMaxDuration));
    }
    to.shards.push_back({Incarnation(shard.shard()), shard.replies(), shard.items(), shard.outstanding_ns(),
                         shard.slowest_ns(), shard.compute_ns()});
  }
  return to;
}

void to_proto(const SchedulerTimeline& from, pb::TimelineReply* to) {
  to_proto(from.request, to->mutable_id());
  to_proto(from.trace, to->mutable_trace());
  to->set_age_ns(from.age);
  to->set_ended(from.ended);
  to->set_prompt_tokens(from.prompt_tokens);
  for (const TimelineMark& mark : from.marks) {
    pb::TimelineMark* out = to->add_marks();
    out->set_at_ns(mark.at);
    out->set_kind(static_cast<uint32_t>(mark.kind));
    out->set_choice(mark.choice);
    out->set_detail(wire_text(mark.detail, kMaxNameBytes));
  }
  to->set_dropped_marks(from.dropped_marks);
  for (const TimelineStep& step : from.steps) step_to_proto(step, to->add_steps());
  to->set_dropped_steps(from.dropped_steps);
  to->set_first_steps(from.first_steps);
  for (const TimelineMember& member : from.members) {
    pb::TimelineMember* out = to->add_members();
    out->set_member(member.member.value);
    out->set_name(wire_text(member.name, kMaxNameBytes));
  }
}

StatusOr<SchedulerTimeline> from_proto(const pb::TimelineReply& from) {
  SchedulerTimeline to;
  ASSIGN_OR_RETURN(to.request, from_proto(from.id()));
  to.trace = from_proto(from.trace());
  RETURN_IF_ERROR(check_duration("timeline.age_ns", from.age_ns(), kMaxDuration));
  to.age = from.age_ns();
  to.ended = from.ended();
  to.prompt_tokens = from.prompt_tokens();
  RETURN_IF_ERROR(check_count("timeline.marks", from.marks_size(), kMaxTimelineEntries));
  for (const pb::TimelineMark& mark : from.marks()) {
    RETURN_IF_ERROR(check_duration("marks.at_ns", mark.at_ns(), kMaxDuration));
    // One that a newer scheduler knows is left out.
    if (mark.kind() >= static_cast<uint32_t>(TimelineMarkKind::kCount)) continue;
    RETURN_IF_ERROR(check_text("marks.detail", mark.detail(), kMaxNameBytes));
    to.marks.push_back(
        {mark.at_ns(), static_cast<TimelineMarkKind>(mark.kind()), mark.choice(), mark.detail()});
  }
  to.dropped_marks = from.dropped_marks();
  RETURN_IF_ERROR(check_count("timeline.steps", from.steps_size(), kMaxTimelineEntries));
  for (const pb::TimelineStep& step : from.steps()) {
    ASSIGN_OR_RETURN(TimelineStep converted, step_from_proto(step));
    to.steps.push_back(std::move(converted));
  }
  to.dropped_steps = from.dropped_steps();
  to.first_steps = from.first_steps();
  RETURN_IF_ERROR(check_count("timeline.members", from.members_size(), kMaxTimelineEntries));
  for (const pb::TimelineMember& member : from.members()) {
    RETURN_IF_ERROR(check_text("members.name", member.name(), kMaxNameBytes));
    to.members.push_back({Incarnation(member.member()), member.name()});
  }
  return to;
}

}  // namespace conclave::rpc
