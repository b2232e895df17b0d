#include "router_service/timeline_json.h"

#include <algorithm>
#include <boost/json.hpp>
#include <map>
#include <string_view>
#include <utility>

#include "libs/base/id_text.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

using gateway::RouterMark;
using gateway::RouterMarkKind;
using gateway::RouterTimelineView;
using gateway::TokenArrival;

double ms(Nanos time) { return static_cast<double>(time / 1000) / 1000; }

std::string trace_id(const TraceContext& trace) { return id_text({trace.trace_hi, trace.trace_lo}); }

json::string_view view(std::string_view text) { return {text.data(), text.size()}; }

std::optional<Nanos> first_mark(const RouterTimelineView& router, RouterMarkKind kind) {
  for (const RouterMark& mark : router.marks)
    if (mark.kind == kind) return mark.at;
  return std::nullopt;
}

std::string_view state(const RouterTimelineView& router) { return router.ended ? "ended" : "open"; }

std::string name_of(const SchedulerTimeline& timeline, Incarnation member) {
  for (const TimelineMember& one : timeline.members)
    if (one.member == member) return one.name;
  return "member " + std::to_string(member.value);
}

// Of StepResult::compute_ns, what is none of the named parts.
Nanos other_of(const TimelineStep& step, const StepTiming& timing) {
  return std::max<Nanos>(
      0, step.compute_ns - timing.attention_ns - timing.dispatch_ns - timing.combine_ns - timing.head_ns);
}

// Neither in the worker's queue nor in the step itself: the two ways between scheduler and worker, and what
// waited in their loops.
Nanos way_of(const TimelineStep& step, const StepTiming& timing) {
  return std::max<Nanos>(0, step.reported - step.planned - timing.queued_ns - timing.wall_ns);
}

json::object router_json(const RouterTimelineView& router) {
  json::array marks;
  for (const RouterMark& mark : router.marks) {
    json::object one = {{"at_ms", ms(mark.at)}, {"what", view(router_mark_name(mark.kind))}};
    if (!mark.detail.empty()) one["detail"] = mark.detail;
    marks.push_back(std::move(one));
  }
  json::array tokens;
  for (const TokenArrival& arrival : router.tokens) {
    json::object one = {{"at_ms", ms(arrival.at)},
                        {"choice", arrival.choice},
                        {"index", arrival.index},
                        {"count", arrival.count}};
    if (arrival.taken >= 0) one["taken_ms"] = ms(arrival.taken);
    tokens.push_back(std::move(one));
  }
  json::object out = {{"marks", std::move(marks)}, {"tokens", std::move(tokens)}};
  if (router.dropped_tokens > 0) {
    out["left_out"] = router.dropped_tokens;
    out["left_out_after"] = router.first_tokens;
  }
  return out;
}

json::object step_json(const SchedulerTimeline& timeline, const TimelineStep& step, Nanos offset) {
  json::object out = {{"choice", step.choice},
                      {"worker", name_of(timeline, step.worker)},
                      {"step", step.step.value},
                      {"what", step.start + step.count <= timeline.prompt_tokens && !step.sampled ? "prefill"
                               : step.count > 1 ? "last prefill"
                                                : "decode"},
                      {"start", step.start},
                      {"count", step.count},
                      {"sampled", step.sampled},
                      {"planned_ms", ms(offset + step.planned)},
                      {"reported_ms", ms(offset + step.reported)},
                      {"plan_wait_ms", ms(step.plan_wait_ns)},
                      {"compute_ms", ms(step.compute_ns)},
                      {"expert_wait_ms", ms(step.expert_wait_ns)}};
  if (step.timing == nullptr) return out;
  const StepTiming& timing = *step.timing;
  out["queued_ms"] = ms(timing.queued_ns);
  out["wall_ms"] = ms(timing.wall_ns);
  out["on_the_way_ms"] = ms(way_of(step, timing));
  out["attention_ms"] = ms(timing.attention_ns);
  out["dispatch_ms"] = ms(timing.dispatch_ns);
  out["combine_ms"] = ms(timing.combine_ns);
  out["sampling_ms"] = ms(timing.head_ns);
  out["other_ms"] = ms(other_of(step, timing));
  out["hidden_ms"] = ms(timing.hidden_ns);
  out["rows"] = timing.rows;
  out["micro_batches"] = timing.micro_batches;
  if (timing.retried_items > 0) out["rows_sent_again"] = timing.retried_items;
  if (timing.deadlines > 0) out["dispatch_deadlines"] = timing.deadlines;
  json::array shards;
  for (const ShardTiming& shard : timing.shards) {
    shards.push_back(json::object{{"shard", name_of(timeline, shard.shard)},
                                  {"replies", shard.replies},
                                  {"rows", shard.items},
                                  {"outstanding_ms", ms(shard.outstanding_ns)},
                                  {"slowest_ms", ms(shard.slowest_ns)},
                                  {"compute_ms", ms(shard.compute_ns)}});
  }
  out["shards"] = std::move(shards);
  return out;
}

json::object scheduler_json(const SchedulerTimeline& timeline, const SchedulerOffset& offset) {
  json::array marks;
  for (const TimelineMark& mark : timeline.marks) {
    json::object one = {{"at_ms", ms(offset.at + mark.at)},
                        {"what", view(timeline_mark_name(mark.kind))},
                        {"choice", mark.choice}};
    if (!mark.detail.empty()) one["detail"] = mark.detail;
    marks.push_back(std::move(one));
  }
  json::array steps;
  for (const TimelineStep& step : timeline.steps) steps.push_back(step_json(timeline, step, offset.at));
  json::object out = {{"offset_ms", ms(offset.at)},
                      {"offset_error_ms", ms(offset.error)},
                      {"prompt_tokens", timeline.prompt_tokens},
                      {"marks", std::move(marks)},
                      {"steps", std::move(steps)}};
  if (timeline.dropped_marks > 0) out["left_out_marks"] = timeline.dropped_marks;
  if (timeline.dropped_steps > 0) {
    out["left_out"] = timeline.dropped_steps;
    out["left_out_after"] = timeline.first_steps;
  }
  return out;
}

json::object head_json(const RouterTimelineView& router) {
  json::object out = {
      {"id", id_text(router.id)}, {"request_id", router.request_id}, {"trace_id", trace_id(router.trace)},
      {"route", router.route},    {"tenant", router.tenant},         {"state", view(state(router))},
      {"age_ms", ms(router.age)}};
  if (router.resumed) out["resumed"] = true;
  if (router.ended) {
    out["outcome"] = router.marks.back().detail;
    out["total_ms"] = ms(router.marks.back().at);
    out["prompt_tokens"] = router.usage.prompt_tokens;
    out["completion_tokens"] = router.usage.completion_tokens;
    if (router.usage.cached_tokens) out["cached_tokens"] = *router.usage.cached_tokens;
  }
  return out;
}

json::array namesakes_json(const std::vector<RequestId>& ids) {
  json::array out;
  for (const RequestId id : ids) out.emplace_back(id_text(id));
  return out;
}

// --- Chrome trace

// Rows of the picture: a process each for the router, the scheduler, and every worker and shard.
class ChromeTrace {
 public:
  static constexpr int kRouter = 1;
  static constexpr int kScheduler = 2;
  static constexpr int kFirstMember = 10;

  void process(int pid, const std::string& name, int place) {
    events_.push_back(json::object{
        {"ph", "M"}, {"name", "process_name"}, {"pid", pid}, {"tid", 0}, {"args", {{"name", name}}}});
    events_.push_back(json::object{{"ph", "M"},
                                   {"name", "process_sort_index"},
                                   {"pid", pid},
                                   {"tid", 0},
                                   {"args", {{"sort_index", place}}}});
  }
  void thread(int pid, int tid, const std::string& name) {
    events_.push_back(json::object{
        {"ph", "M"}, {"name", "thread_name"}, {"pid", pid}, {"tid", tid}, {"args", {{"name", name}}}});
  }
  void span(int pid, int tid, std::string_view name, Nanos from, Nanos duration, json::object args = {}) {
    events_.push_back(json::object{{"ph", "X"},
                                   {"name", view(name)},
                                   {"cat", "conclave"},
                                   {"pid", pid},
                                   {"tid", tid},
                                   {"ts", micros(from)},
                                   {"dur", micros(std::max<Nanos>(duration, 0))},
                                   {"args", std::move(args)}});
  }
  void instant(int pid, int tid, std::string_view name, Nanos at, json::object args = {}) {
    events_.push_back(json::object{{"ph", "i"},
                                   {"s", "t"},
                                   {"name", view(name)},
                                   {"cat", "conclave"},
                                   {"pid", pid},
                                   {"tid", tid},
                                   {"ts", micros(at)},
                                   {"args", std::move(args)}});
  }
  int member(const std::string& name) {
    const auto [it, fresh] = members_.emplace(name, kFirstMember + static_cast<int>(members_.size()));
    if (fresh) process(it->second, name, it->second);
    return it->second;
  }
  std::string text(json::object about) {
    json::object out = {
        {"displayTimeUnit", "ms"}, {"otherData", std::move(about)}, {"traceEvents", std::move(events_)}};
    return json::serialize(out) + "\n";
  }

 private:
  static double micros(Nanos time) { return static_cast<double>(time) / 1000; }

  json::array events_;
  std::map<std::string, int> members_;
};

void draw_router(ChromeTrace& trace, const RouterTimelineView& router) {
  const int pid = ChromeTrace::kRouter;
  trace.process(pid, "router", pid);
  trace.thread(pid, 1, "request");
  const Nanos end = router.ended ? router.marks.back().at : router.age;
  trace.span(pid, 1, router.route.empty() ? "request" : router.route, 0, end, head_json(router));
  const auto between = [&](std::string_view name, RouterMarkKind from, RouterMarkKind to) {
    const auto begin = first_mark(router, from), until = first_mark(router, to);
    if (begin && until) trace.span(pid, 1, name, *begin, *until - *begin);
  };
  between("waiting for a text thread", RouterMarkKind::kReceived, RouterMarkKind::kText);
  between("template and tokens", RouterMarkKind::kText, RouterMarkKind::kTokenized);
  between("submission", RouterMarkKind::kSubmitted, RouterMarkKind::kAccepted);
  const auto accepted = first_mark(router, RouterMarkKind::kAccepted);
  if (accepted && !router.tokens.empty())
    trace.span(pid, 1, "until the first token", *accepted, router.tokens.front().at - *accepted);
  for (const TokenArrival& arrival : router.tokens) {
    const int tid = 10 + static_cast<int>(arrival.choice);
    if (arrival.index == 0) trace.thread(pid, tid, "tokens of choice " + std::to_string(arrival.choice));
    json::object args = {{"index", arrival.index}, {"count", arrival.count}};
    if (arrival.taken >= 0)
      trace.span(pid, tid, "token " + std::to_string(arrival.index), arrival.at, arrival.taken - arrival.at,
                 std::move(args));
    else
      trace.instant(pid, tid, "token " + std::to_string(arrival.index), arrival.at, std::move(args));
  }
}

void draw_step(ChromeTrace& trace, const SchedulerTimeline& timeline, const TimelineStep& step,
               Nanos offset) {
  json::object args = step_json(timeline, step, offset);
  const std::string what(args["what"].as_string());
  const int choice_row = 10 + static_cast<int>(step.choice);
  trace.span(ChromeTrace::kScheduler, choice_row, what, offset + step.planned, step.reported - step.planned,
             args);
  if (step.timing == nullptr) return;
  const StepTiming& timing = *step.timing;
  const int worker = trace.member(name_of(timeline, step.worker));
  const Nanos begin = offset + step.reported - timing.wall_ns;
  if (timing.queued_ns > 0) trace.span(worker, 1, "plan waits", begin - timing.queued_ns, timing.queued_ns);
  trace.span(worker, 2, what, begin, timing.wall_ns, std::move(args));
  // Sums over the layers and micro-batches of the step, one after the other.
  Nanos at = begin;
  const std::pair<const char*, Nanos> parts[] = {{"embedding and copies", other_of(step, timing)},
                                                 {"attention", timing.attention_ns},
                                                 {"dispatch", timing.dispatch_ns},
                                                 {"waiting for experts", step.expert_wait_ns},
                                                 {"combine", timing.combine_ns},
                                                 {"sampling", timing.head_ns}};
  for (const auto& [name, duration] : parts) {
    const Nanos room = std::min(duration, begin + timing.wall_ns - at);
    if (room <= 0) continue;
    trace.span(worker, 2, name, at, room, {{"sum_over_layers", true}});
    at += room;
  }
  for (const ShardTiming& shard : timing.shards) {
    const int pid = trace.member(name_of(timeline, shard.shard));
    trace.span(pid, 1, std::to_string(shard.replies) + " replies", begin,
               std::min(shard.outstanding_ns, timing.wall_ns),
               {{"rows", shard.items},
                {"slowest_ms", ms(shard.slowest_ns)},
                {"compute_ms", ms(shard.compute_ns)},
                {"sum_over_layers", true}});
  }
}

void draw_scheduler(ChromeTrace& trace, const SchedulerTimeline& timeline, Nanos offset) {
  const int pid = ChromeTrace::kScheduler;
  trace.process(pid, "scheduler", pid);
  trace.thread(pid, 1, "request");
  std::map<uint32_t, Nanos> waiting;  // by choice, since when
  for (const TimelineMark& mark : timeline.marks) {
    json::object args = {{"choice", mark.choice}};
    if (!mark.detail.empty()) args["detail"] = mark.detail;
    trace.instant(pid, 1, timeline_mark_name(mark.kind), offset + mark.at, std::move(args));
    const int row = 10 + static_cast<int>(mark.choice);
    switch (mark.kind) {
      case TimelineMarkKind::kPreempted:
      case TimelineMarkKind::kReplayed:
      case TimelineMarkKind::kMoved:
        waiting[mark.choice] = mark.at;
        break;
      case TimelineMarkKind::kStarted: {
        const Nanos since = waiting.contains(mark.choice) ? waiting[mark.choice] : 0;
        trace.thread(pid, row, "choice " + std::to_string(mark.choice));
        trace.span(pid, row, "queued", offset + since, mark.at - since);
        break;
      }
      default:
        break;
    }
  }
  for (const TimelineStep& step : timeline.steps) draw_step(trace, timeline, step, offset);
}

}  // namespace

SchedulerOffset scheduler_offset(const WholeTimeline& timeline) {
  if (!timeline.router || !timeline.scheduler.ok()) return {};
  const auto submitted = first_mark(*timeline.router, RouterMarkKind::kSubmitted);
  const auto accepted = first_mark(*timeline.router, RouterMarkKind::kAccepted);
  if (!submitted) return {};
  const Nanos there = accepted ? *accepted - *submitted : 0;
  // The moment that both saw: the acceptance, or of a resumed stream the last time it was taken over.
  Nanos seen = 0;
  if (timeline.router->resumed) {
    for (const TimelineMark& mark : timeline.scheduler->marks)
      if (mark.kind == TimelineMarkKind::kAdopted) seen = mark.at;
  }
  return {*submitted + there / 2 - seen, there / 2};
}

std::string timeline_json(const WholeTimeline& timeline) {
  const SchedulerOffset offset = scheduler_offset(timeline);
  json::object out;
  if (timeline.router) {
    out = head_json(*timeline.router);
    out["router"] = router_json(*timeline.router);
  } else {
    out["id"] = id_text(timeline.scheduler->request);
    out["trace_id"] = trace_id(timeline.scheduler->trace);
    out["state"] = timeline.scheduler->ended ? "ended" : "open";
  }
  if (!timeline.namesakes.empty()) out["namesakes"] = namesakes_json(timeline.namesakes);
  if (timeline.scheduler.ok())
    out["scheduler"] = scheduler_json(*timeline.scheduler, offset);
  else
    out["scheduler_error"] = message_of(timeline.scheduler.status());
  return json::serialize(out) + "\n";
}

std::string chrome_trace(const WholeTimeline& timeline) {
  const SchedulerOffset offset = scheduler_offset(timeline);
  ChromeTrace trace;
  json::object about = timeline.router ? head_json(*timeline.router)
                                       : json::object{{"id", id_text(timeline.scheduler->request)},
                                                      {"trace_id", trace_id(timeline.scheduler->trace)}};
  if (!timeline.namesakes.empty()) about["namesakes"] = namesakes_json(timeline.namesakes);
  about["scheduler_offset_error_ms"] = ms(offset.error);
  if (timeline.router) draw_router(trace, *timeline.router);
  if (timeline.scheduler.ok())
    draw_scheduler(trace, *timeline.scheduler, offset.at);
  else
    about["scheduler_error"] = message_of(timeline.scheduler.status());
  return trace.text(std::move(about));
}

std::string list_json(const std::vector<RouterTimelineView>& timelines) {
  json::array out;
  for (const RouterTimelineView& one : timelines) out.push_back(head_json(one));
  return json::serialize(json::object{{"requests", std::move(out)}}) + "\n";
}

}  // namespace conclave::router
