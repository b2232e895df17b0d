// A timeline as JSON and as a Chrome trace, and the routes that serve both.
#include "router_service/timeline_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <map>
#include <set>

#include "router_service/admin_server.h"
#include "tests/router/raw_http.h"

namespace conclave::router {
namespace {

namespace json = boost::json;
using gateway::RouterMarkKind;
using gateway::RouterTimelineView;
using ::testing::HasSubstr;
using testing::http_call;

constexpr Nanos kMs = kMillisecond;

RouterTimelineView router_part() {
  RouterTimelineView view;
  view.id = {1, 2};
  view.request_id = "mine/1";
  view.route = "/v1/completions";
  view.trace = {3, 4, 5, true};
  view.age = 200 * kMs;
  view.ended = true;
  view.marks = {{RouterMarkKind::kReceived, 0, ""},
                {RouterMarkKind::kText, 1 * kMs, ""},
                {RouterMarkKind::kTokenized, 2 * kMs, "20 tokens"},
                {RouterMarkKind::kSubmitted, 3 * kMs, ""},
                {RouterMarkKind::kAccepted, 5 * kMs, ""},
                {RouterMarkKind::kEnded, 100 * kMs, "stop"}};
  view.tokens = {{50 * kMs, 51 * kMs, 0, 0, 1}, {90 * kMs, -1, 0, 1, 1}};
  view.first_tokens = 2;
  view.usage.prompt_tokens = 20;
  view.usage.completion_tokens = 2;
  return view;
}

SchedulerTimeline scheduler_part() {
  SchedulerTimeline out;
  out.request = {1, 2};
  out.trace = {3, 4, 5, true};
  out.ended = true;
  out.prompt_tokens = 20;
  out.marks = {{0, TimelineMarkKind::kAccepted, 0, ""},
               {10 * kMs, TimelineMarkKind::kStarted, 0, "on attention-0"},
               {30 * kMs, TimelineMarkKind::kPreempted, 0, ""},
               {40 * kMs, TimelineMarkKind::kStarted, 0, "on attention-0"},
               {95 * kMs, TimelineMarkKind::kEnded, 0, "stop"}};
  StepTiming timing;
  timing.queued_ns = 1 * kMs;
  timing.wall_ns = 8 * kMs;
  timing.attention_ns = 2 * kMs;
  timing.dispatch_ns = 1 * kMs;
  timing.combine_ns = 1 * kMs;
  timing.head_ns = 500 * kMicrosecond;
  timing.rows = 21;
  timing.micro_batches = 2;
  timing.shards = {{Incarnation(7), 4, 80, 3 * kMs, 2 * kMs, 1 * kMs}};
  TimelineStep prefill;
  prefill.step = StepId(11);
  prefill.worker = Incarnation(6);
  prefill.planned = 10 * kMs;
  prefill.reported = 20 * kMs;
  prefill.start = 0;
  prefill.count = 16;
  prefill.compute_ns = 5 * kMs;
  prefill.expert_wait_ns = 3 * kMs;
  prefill.timing = std::make_shared<const StepTiming>(timing);
  TimelineStep last = prefill;
  last.start = 16;
  last.count = 4;
  last.sampled = true;
  last.planned = 40 * kMs;
  last.reported = 49 * kMs;
  last.timing = nullptr;
  out.steps = {prefill, last};
  out.first_steps = 1;
  out.dropped_steps = 3;
  out.members = {{Incarnation(6), "attention-0"}, {Incarnation(7), "expert-0"}};
  return out;
}

WholeTimeline whole() { return {router_part(), scheduler_part()}; }

TEST(TimelineJson, TheSchedulersZeroLiesBetweenSubmissionAndAcceptance) {
  const SchedulerOffset offset = scheduler_offset(whole());
  EXPECT_EQ(offset.at, 4 * kMs);
  EXPECT_EQ(offset.error, 1 * kMs);
  WholeTimeline resumed = whole();
  resumed.router->resumed = true;
  resumed.scheduler->marks.insert(resumed.scheduler->marks.end() - 1,
                                  {60 * kMs, TimelineMarkKind::kAdopted, 0, ""});
  EXPECT_EQ(scheduler_offset(resumed).at, 4 * kMs - 60 * kMs) << "both saw the stream being taken over";
  EXPECT_EQ(scheduler_offset({std::nullopt, scheduler_part()}).at, 0);
  EXPECT_EQ(scheduler_offset({router_part(), unavailable("x")}).at, 0);
}

TEST(TimelineJson, HasAllThatIsKnown) {
  const json::value v = json::parse(timeline_json(whole()));
  EXPECT_EQ(v.at("id"), "00000000000000010000000000000002");
  EXPECT_EQ(v.at("request_id"), "mine/1");
  EXPECT_EQ(v.at("trace_id"), "00000000000000030000000000000004");
  EXPECT_EQ(v.at("state"), "ended");
  EXPECT_EQ(v.at("outcome"), "stop");
  EXPECT_EQ(v.at("total_ms").to_number<double>(), 100);
  const json::array& tokens = v.at("router").at("tokens").as_array();
  ASSERT_EQ(tokens.size(), 2u);
  EXPECT_EQ(tokens[0].at("taken_ms").to_number<double>(), 51);
  EXPECT_FALSE(tokens[1].as_object().contains("taken_ms"));
  const json::value& scheduler = v.at("scheduler");
  EXPECT_EQ(scheduler.at("marks").as_array()[1].at("at_ms").to_number<double>(), 14);
  EXPECT_EQ(scheduler.at("left_out").to_number<int>(), 3);
  const json::value& step = scheduler.at("steps").as_array()[0];
  EXPECT_EQ(step.at("what"), "prefill");
  EXPECT_EQ(step.at("worker"), "attention-0");
  EXPECT_EQ(step.at("planned_ms").to_number<double>(), 14);
  EXPECT_EQ(step.at("on_the_way_ms").to_number<double>(), 1);  // 10 - 1 queued - 8
  EXPECT_EQ(step.at("other_ms").to_number<double>(), 0.5);     // 5 - 2 - 1 - 1 - 0.5
  EXPECT_EQ(step.at("shards").as_array()[0].at("shard"), "expert-0");
  EXPECT_EQ(scheduler.at("steps").as_array()[1].at("what"), "last prefill");
  EXPECT_FALSE(scheduler.at("steps").as_array()[1].as_object().contains("wall_ms"));
}

TEST(TimelineJson, OneSideAloneIsATimelineToo) {
  EXPECT_FALSE(json::parse(timeline_json(whole())).as_object().contains("namesakes"));
  WholeTimeline shared = whole();
  shared.namesakes = {{1, 3}};
  EXPECT_EQ(json::parse(timeline_json(shared)).at("namesakes").at(0).as_string(), "00000000000000010000000000000003");
  json::value v = json::parse(timeline_json({router_part(), unavailable("no scheduler")}));
  EXPECT_EQ(v.at("scheduler_error"), "no scheduler");
  EXPECT_FALSE(v.as_object().contains("scheduler"));
  v = json::parse(timeline_json({std::nullopt, scheduler_part()}));
  EXPECT_EQ(v.at("trace_id"), "00000000000000030000000000000004");
  EXPECT_FALSE(v.as_object().contains("router"));
  json::parse(chrome_trace({router_part(), unavailable("no scheduler")}));
  json::parse(chrome_trace({std::nullopt, scheduler_part()}));
}

// What the Trace Event Format asks for, and that spans of one row lie in each other or apart.
void check_trace(const std::string& text) {
  const json::value v = json::parse(text);
  struct Span {
    double from, to;
  };
  std::map<std::pair<int64_t, int64_t>, std::vector<Span>> rows;
  std::set<int64_t> named, used;
  for (const json::value& event : v.at("traceEvents").as_array()) {
    const std::string ph(event.at("ph").as_string());
    const auto pid = event.at("pid").to_number<int64_t>(), tid = event.at("tid").to_number<int64_t>();
    EXPECT_FALSE(event.at("name").as_string().empty());
    if (ph == "M") {
      if (event.at("name") == "process_name") named.insert(pid);
      continue;
    }
    used.insert(pid);
    ASSERT_TRUE(ph == "X" || ph == "i") << ph;
    const double ts = event.at("ts").to_number<double>();
    if (ph == "i") continue;
    const double dur = event.at("dur").to_number<double>();
    EXPECT_GE(dur, 0);
    rows[{pid, tid}].push_back({ts, ts + dur});
  }
  for (const int64_t pid : used) EXPECT_TRUE(named.contains(pid)) << pid;
  for (const auto& [row, spans] : rows) {
    for (const Span& a : spans) {
      for (const Span& b : spans) {
        const bool apart = a.to <= b.from + 0.01 || b.to <= a.from + 0.01;
        const bool inside = (a.from >= b.from - 0.01 && a.to <= b.to + 0.01) ||
                            (b.from >= a.from - 0.01 && b.to <= a.to + 0.01);
        EXPECT_TRUE(apart || inside) << "row " << row.first << "/" << row.second << ": " << a.from << ".."
                                     << a.to << " and " << b.from << ".." << b.to;
      }
    }
  }
}

TEST(TimelineJson, ChromeTraceIsOne) {
  const std::string text = chrome_trace(whole());
  check_trace(text);
  for (const char* part : {"attention-0", "expert-0", "waiting for experts", "sampling", "queued", "token 0",
                           "template and tokens", "preempted", "4 replies"})
    EXPECT_THAT(text, HasSubstr("\"" + std::string(part) + "\""));
  const json::value v = json::parse(text);
  EXPECT_EQ(v.at("otherData").at("scheduler_offset_error_ms").to_number<double>(), 1);
  double worker_begin = -1;
  for (const json::value& event : v.at("traceEvents").as_array())
    if (event.at("ph") == "X" && event.at("name") == "prefill" && event.at("pid").to_number<int>() >= 10)
      worker_begin = event.at("ts").to_number<double>();
  EXPECT_EQ(worker_begin, (4 + 20 - 8) * 1000.0) << "its end is the result's arrival";
}

class TimelineRoutes : public ::testing::Test {
 protected:
  TimelineRoutes() {
    AdminServer::Hooks hooks;
    hooks.open_requests = [](size_t) { return std::vector<gateway::OpenRequest>{}; };
    hooks.timelines = [](size_t max) {
      std::vector<RouterTimelineView> all(3, router_part());
      all.resize(std::min(max, all.size()));
      return all;
    };
    hooks.timeline = [this](std::string_view name) -> StatusOr<WholeTimeline> {
      asked = name;
      if (name == "none") return not_found("no timeline");
      return whole();
    };
    auto started = AdminServer::start("127.0.0.1:0", std::move(hooks));
    EXPECT_TRUE(started.ok()) << started.status();
    server = std::move(started).value();
  }
  std::string asked;
  std::unique_ptr<AdminServer> server;
};

TEST_F(TimelineRoutes, ListAndOne) {
  auto r = http_call(server->port(), "GET", "/debug/requests");
  ASSERT_EQ(r.status, 200);
  EXPECT_EQ(json::parse(r.body).at("requests").as_array().size(), 3u);
  r = http_call(server->port(), "GET", "/debug/requests?limit=2");
  EXPECT_EQ(json::parse(r.body).at("requests").as_array().size(), 2u);
  EXPECT_EQ(http_call(server->port(), "GET", "/debug/requests?limit=x").status, 400);
  r = http_call(server->port(), "GET", "/debug/requests/mine%2F1");
  EXPECT_EQ(r.status, 200);
  EXPECT_EQ(asked, "mine/1");
  EXPECT_EQ(json::parse(r.body).at("state"), "ended");
  r = http_call(server->port(), "GET", "/debug/requests/mine%2F1?format=chrome");
  EXPECT_EQ(r.status, 200);
  check_trace(r.body);
  EXPECT_EQ(http_call(server->port(), "GET", "/debug/requests/mine?format=svg").status, 400);
  EXPECT_EQ(http_call(server->port(), "GET", "/debug/requests/none").status, 404);
  EXPECT_EQ(http_call(server->port(), "POST", "/debug/requests/mine").status, 405);
  EXPECT_EQ(http_call(server->port(), "POST", "/debug/requests").status, 405);
  EXPECT_EQ(http_call(server->port(), "GET", "/debug/requestsx").status, 404);
  EXPECT_EQ(http_call(server->port(), "GET", "/debug/requests", "", "origin: http://evil.example\r\n").status,
            403);
}

}  // namespace
}  // namespace conclave::router
