#include "cli/status_view.h"

#include <boost/json.hpp>
#include <cmath>

namespace conclave::cli {
namespace {

namespace json = boost::json;

json::value number(double value) { return std::isfinite(value) ? json::value(value) : json::value(nullptr); }

const char* kind_name(MemberView::Kind kind) {
  switch (kind) {
    case MemberView::Kind::kRouter:
      return "router";
    case MemberView::Kind::kAttention:
      return "attention";
    case MemberView::Kind::kExpert:
      return "expert";
    case MemberView::Kind::kOther:
      break;
  }
  return "unknown";
}

json::object percentiles(const Percentiles& p) {
  return {{"p50", number(p.p50)}, {"p90", number(p.p90)}, {"p99", number(p.p99)}, {"count", number(p.count)}};
}

json::object member(const MemberView& m) {
  json::object out{{"role", kind_name(m.kind)},
                   {"name", m.name},
                   {"incarnation", std::to_string(m.incarnation)},  // 64 bits do not fit a JSON number
                   {"state", m.state},
                   {"age_s", number(m.age_s)},
                   {"threads", m.threads},
                   {"ops_address", m.ops_address},
                   {"version", m.version},
                   {"numerics_id", m.numerics_id},
                   {"kv_blocks_total", m.kv_total},
                   {"kv_blocks_used", m.kv_used},
                   {"kv_blocks_cached", m.kv_cached},
                   {"sequences", m.sequences},
                   {"experts_held", m.homes},
                   {"expert_load", number(m.load)},
                   {"assigned_load", number(m.assigned_load)}};
  return out;
}

}  // namespace

std::string status_json(const StatusView& view) {
  json::object out{{"scheduler", view.scheduler}, {"wall_ns", view.wall_ns}, {"reachable", view.reachable}};
  if (!view.reachable) {
    out["error"] = view.problem;
    out["unreachable_s"] = number(view.unreachable_s);
    return json::serialize(out);
  }
  json::array members, events;
  for (const MemberView& m : view.members) members.push_back(member(m));
  for (const EventView& e : view.events) {
    events.push_back(json::object{{"number", e.number},
                                  {"kind", e.kind},
                                  {"who", e.who},
                                  {"detail", e.detail},
                                  {"age_s", number(e.age_s)},
                                  {"times", e.times},
                                  {"fault", e.fault()}});
  }
  const Totals& t = view.totals;
  const Rates& r = view.rates;
  const json::object rest{{"scheduler_incarnation", std::to_string(view.incarnation)},
                          {"age_s", number(view.age_s)},
                          {"version", view.version},
                          {"ops_address", view.ops_address},
                          {"ready", view.ready},
                          {"not_ready", view.not_ready},
                          {"numerics_id", view.numerics_id},
                          {"epoch", view.epoch},
                          {"preparing_epoch", view.preparing_epoch},
                          {"layers", view.layers},
                          {"experts", view.experts},
                          {"busiest_over_mean", number(view.busiest)},
                          {"requests_waiting", view.waiting},
                          {"requests_running", view.running},
                          {"requests_stalled", view.stalled},
                          {"members", std::move(members)},
                          {"rates", json::object{{"generated_tokens", number(r.generated)},
                                                 {"prompt_tokens", number(r.prompt)},
                                                 {"cached_tokens", number(r.cached)},
                                                 {"steps", number(r.steps)},
                                                 {"accepted_requests", number(r.accepted)},
                                                 {"refused_requests", number(r.refused)},
                                                 {"ended_requests", number(r.ended)},
                                                 {"failed_requests", number(r.failed)}}},
                          {"latency_s", json::object{{"window_s", number(view.latency_window_s)},
                                                     {"queue", percentiles(view.queue)},
                                                     {"time_to_first_token", percentiles(view.first_token)},
                                                     {"time_per_output_token", percentiles(view.per_token)},
                                                     {"inter_token", percentiles(view.token_gap)},
                                                     {"request_duration", percentiles(view.whole)},
                                                     {"problem", view.latency_problem}}},
                          {"totals", json::object{{"generated_tokens", t.generated},
                                                  {"prompt_tokens", t.prompt},
                                                  {"cached_tokens", t.cached},
                                                  {"steps", t.steps},
                                                  {"accepted_requests", t.accepted},
                                                  {"refused_requests", t.refused},
                                                  {"ended_requests", t.ended},
                                                  {"failed_requests", t.failed},
                                                  {"replayed_sequences", t.replayed},
                                                  {"preempted_sequences", t.preempted},
                                                  {"lost_members", t.lost},
                                                  {"stalls", t.stalls},
                                                  {"placement_changes", t.placement_changes},
                                                  {"added_homes", t.homes_added},
                                                  {"removed_homes", t.homes_removed}}},
                          {"events", std::move(events)}};
  for (const auto& field : rest) out.insert(field);
  return json::serialize(out);
}

}  // namespace conclave::cli
