#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "libs/base/time_histogram.h"
#include "libs/telemetry/log.h"
#include "libs/telemetry/metrics.h"
#include "libs/telemetry/ops_server.h"
#include "libs/telemetry/process_metrics.h"
#include "tests/router/raw_http.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;
using testing::http_call;
using ::testing::Not;

TEST(Log, OneJsonObjectALineWithEscapedValues) {
  const std::string line = format_log_line(LogLevel::kWarn, "peer \"lost\"",
                                           {{"cause", "line one\nline two\x01"},
                                            {"bytes", 7},
                                            {"big", uint64_t{1} << 63},
                                            {"ratio", 0.5},
                                            {"ok", false}});
  EXPECT_THAT(line, HasSubstr("\"level\":\"warn\""));
  EXPECT_THAT(line, HasSubstr("\"msg\":\"peer \\\"lost\\\"\""));
  EXPECT_THAT(line, HasSubstr("\"cause\":\"line one\\nline two\\u0001\""));
  EXPECT_THAT(line, HasSubstr("\"bytes\":7,\"big\":9223372036854775808,\"ratio\":0.5,\"ok\":false}"));
  EXPECT_THAT(line, Not(HasSubstr("\n")));
}

TEST(Log, InvalidUtf8AndNumbersThatJsonLacksAreReplaced) {
  const std::string line = format_log_line(
      LogLevel::kInfo, "x", {{"bad", std::string_view("a\xff\xc3z\xc3\xa9")}, {"nan", 0.0 / 0.0}});
  EXPECT_THAT(line, HasSubstr("\"bad\":\"a\xef\xbf\xbd\xef\xbf\xbdz\xc3\xa9\""));
  EXPECT_THAT(line, HasSubstr("\"nan\":\"nan\""));
}

TEST(Log, IdentityIsInEveryLine) {
  log_identity("router", "r1", Incarnation(0xabc));
  EXPECT_THAT(
      format_log_line(LogLevel::kInfo, "hello", {}),
      HasSubstr(
          "\"role\":\"router\",\"name\":\"r1\",\"incarnation\":\"0000000000000abc\",\"msg\":\"hello\"}"));
}

TEST(Log, StatusFieldsAndLevels) {
  EXPECT_THAT(format_log_line(LogLevel::kError, "x", {{"cause", unavailable("no peer")}}),
              HasSubstr("\"cause\":\"UNAVAILABLE: no peer\""));
  EXPECT_EQ(parse_log_level("debug", "log.level").value(), LogLevel::kDebug);
  EXPECT_EQ(field_of(parse_log_level("loud", "log.level").status()), "log.level");
  log_threshold(LogLevel::kError);
  EXPECT_FALSE(log_enabled(LogLevel::kWarn));
  log_threshold(LogLevel::kInfo);
  EXPECT_TRUE(log_enabled(LogLevel::kWarn));
}

TEST(Metrics, NamesFollowTheRule) {
  EXPECT_TRUE(valid_metric_name("conclave_http_requests_total", true));
  EXPECT_TRUE(valid_metric_name("conclave_time_to_first_token_seconds", false));
  EXPECT_TRUE(valid_metric_name("conclave_kv_used_ratio", false));
  EXPECT_FALSE(valid_metric_name("conclave_http_requests", true));         // a counter ends in _total
  EXPECT_FALSE(valid_metric_name("conclave_http_requests_total", false));  // and nothing else does
  EXPECT_FALSE(valid_metric_name("http_requests_total", true));
  EXPECT_FALSE(valid_metric_name("conclave_step_milliseconds", false));
  EXPECT_FALSE(valid_metric_name("conclave_step_time", false));
  EXPECT_FALSE(valid_metric_name("conclave_seconds_count", false));
  EXPECT_FALSE(valid_metric_name("conclave_Bytes", false));
  EXPECT_FALSE(valid_metric_name("conclave__bytes", false));
  EXPECT_FALSE(valid_metric_name("conclave_total", true));
  EXPECT_FALSE(valid_metric_name("process_total", true));
  EXPECT_TRUE(valid_metric_name("process_cpu_seconds_total", true));
}

double value_of(const std::string& text, const std::string& name) {
  const size_t at = text.find("\n" + name + " ");
  return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size() + 2));
}

TEST(Metrics, TheProcessSaysWhatItIsAndUses) {
  MetricsRegistry registry;
  const auto exported = export_process(registry, "1.2.3", "tester");
  const std::string text = registry.expose();
  EXPECT_THAT(text, HasSubstr("role=\"tester\""));
  EXPECT_THAT(text, HasSubstr("version=\"1.2.3\""));
  EXPECT_GE(value_of(text, "process_threads"), 1);
  EXPECT_GT(value_of(text, "process_resident_memory_bytes"), 100'000);
  EXPECT_GT(value_of(text, "process_virtual_memory_bytes"), value_of(text, "process_resident_memory_bytes"));
  EXPECT_GE(value_of(text, "process_open_fds"), 0);
  EXPECT_GT(value_of(text, "process_max_fds"), value_of(text, "process_open_fds"));
  const double now = static_cast<double>(time(nullptr));
  EXPECT_LE(value_of(text, "process_start_time_seconds"), now + 60);
  EXPECT_GT(value_of(text, "process_start_time_seconds"), now - 24 * 3600);
  EXPECT_EQ(value_of(registry.expose(), "process_start_time_seconds"),
            value_of(text, "process_start_time_seconds"));
  // Work shows in the processor's time.
  const double used = value_of(text, "process_cpu_seconds_total");
  EXPECT_GE(used, 0);
  volatile uint64_t sum = 0;
  const clock_t end = clock() + CLOCKS_PER_SEC / 20;
  while (clock() < end) sum = sum + 1;
  EXPECT_GT(value_of(registry.expose(), "process_cpu_seconds_total"), used);
}

TEST(Metrics, ExposesWhatWasCounted) {
  MetricsRegistry registry;
  registry.counter("conclave_test_requests_total", "Requests", {{"code", "200"}}).add(3);
  registry.counter("conclave_test_requests_total", "Requests", {{"code", "200"}}).add(-1);  // ignored
  registry.counter("conclave_test_requests_total", "Requests", {{"code", "400"}}).add();
  registry.gauge("conclave_test_streams", "Open streams").set(5);
  registry.histogram("conclave_test_wait_seconds", "Wait", {}, {0.1, 1}).observe(0.5);
  const std::string text = registry.expose();
  EXPECT_THAT(text, HasSubstr("# TYPE conclave_test_requests_total counter"));
  EXPECT_THAT(text, HasSubstr("conclave_test_requests_total{code=\"200\"} 3"));
  EXPECT_THAT(text, HasSubstr("conclave_test_requests_total{code=\"400\"} 1"));
  EXPECT_THAT(text, HasSubstr("conclave_test_streams 5"));
  EXPECT_THAT(text, HasSubstr("conclave_test_wait_seconds_bucket{le=\"0.1\"} 0"));
  EXPECT_THAT(text, HasSubstr("conclave_test_wait_seconds_bucket{le=\"1\"} 1"));
}

TEST(Metrics, CollectorsAreReadAtScrapeAndEndWithTheirHandle) {
  MetricsRegistry registry;
  double value = 1;
  auto handle = registry.add_collector([&](MetricSink& sink) {
    sink.counter("conclave_core_steps_total", "Steps", value, {{"worker", "a"}});
    sink.counter("conclave_core_steps_total", "Steps", value + 1, {{"worker", "b"}});
    sink.gauge("conclave_core_free_blocks", "Free", 9);
  });
  value = 10;
  const std::string text = registry.expose();
  EXPECT_THAT(text, HasSubstr("conclave_core_steps_total{worker=\"a\"} 10"));
  EXPECT_THAT(text, HasSubstr("conclave_core_steps_total{worker=\"b\"} 11"));
  EXPECT_EQ(text.find("# TYPE conclave_core_steps_total"), text.rfind("# TYPE conclave_core_steps_total"));
  handle.reset();
  EXPECT_THAT(registry.expose(), Not(HasSubstr("conclave_core")));
}

TEST(Metrics, TimesOfACoreAreAHistogramInSeconds) {
  MetricsRegistry registry;
  MessageTimeHistogram times;
  for (const Nanos time :
       {Nanos{-5}, Nanos{0}, 20 * kMicrosecond, 20 * kMicrosecond + 1, 3 * kMillisecond, 1000 * kSecond})
    times.observe(time);
  EXPECT_EQ(times.count(), 6u);
  const auto handle = registry.add_collector([&](MetricSink& sink) {
    sink.histogram("conclave_test_reply_seconds", "Replies", times, {{"shard", "a"}});
    sink.histogram("conclave_test_queue_seconds", "Queue", RequestTimeHistogram());
  });
  const std::string text = registry.expose();
  const auto bucket = [&](const char* le) {
    return value_of(text, std::string("conclave_test_reply_seconds_bucket{shard=\"a\",le=\"") + le + "\"}");
  };
  EXPECT_THAT(text, HasSubstr("# TYPE conclave_test_reply_seconds histogram"));
  EXPECT_EQ(bucket("2e-05"), 3) << text;  // a bound is inclusive, what is negative counts as nothing
  EXPECT_EQ(bucket("5e-05"), 4);
  EXPECT_EQ(bucket("0.002"), 4);
  EXPECT_EQ(bucket("0.005"), 5);
  EXPECT_EQ(bucket("20"), 5);
  EXPECT_EQ(bucket("+Inf"), 6);
  EXPECT_EQ(value_of(text, "conclave_test_reply_seconds_count{shard=\"a\"}"), 6);
  EXPECT_NEAR(value_of(text, "conclave_test_reply_seconds_sum{shard=\"a\"}"), 1000.00304, 1e-5);
  // Those of requests begin at 1 ms, and are those of the registry's own.
  std::vector<double> bounds;
  for (const Nanos bound : RequestTimeHistogram::bounds())
    bounds.push_back(static_cast<double>(bound) / kSecond);
  EXPECT_EQ(bounds, MetricsRegistry::latency_buckets());
  EXPECT_EQ(value_of(text, "conclave_test_queue_seconds_bucket{le=\"0.001\"}"), 0);
  EXPECT_TRUE(std::is_sorted(kMessageTimes.begin(), kMessageTimes.end()));
}

TEST(Metrics, AStartShowsItsPhaseAndFraction) {
  MetricsRegistry registry;
  StartupProgress startup;
  const auto handle = export_startup(registry, startup);
  EXPECT_THAT(registry.expose(), HasSubstr("conclave_start_phase_info{phase=\"starting\"} 1"));
  EXPECT_THAT(registry.expose(), Not(HasSubstr("conclave_start_fraction_ratio"))) << "unknown";
  startup.set("binding", "layer 3 of 62", 0.25);
  std::string text = registry.expose();
  EXPECT_THAT(text, HasSubstr("conclave_start_phase_info{phase=\"binding\"} 1"));
  EXPECT_THAT(text, Not(HasSubstr("starting"))) << "one phase at a time";
  EXPECT_THAT(text, Not(HasSubstr("layer 3"))) << "no label without a bound";
  EXPECT_EQ(value_of(text, "conclave_start_fraction_ratio"), 0.25);
  startup.follow([](StartupProgress& progress) { progress.set("warming", "", 0.5); });
  EXPECT_EQ(value_of(registry.expose(), "conclave_start_fraction_ratio"), 0.5) << "a scrape looks";
  startup.follow(nullptr);
  startup.done();
  text = registry.expose();
  EXPECT_THAT(text, HasSubstr("conclave_start_phase_info{phase=\"done\"} 1"));
  EXPECT_EQ(value_of(text, "conclave_start_fraction_ratio"), 1);
}

TEST(OpsServer, AnswersItsFourPathsAndRefusesOthers) {
  MetricsRegistry registry;
  registry.gauge("conclave_test_streams", "Open streams").set(2);
  StartupProgress startup;
  startup.set("binding", "layer 3 of 62", 0.25);
  std::vector<std::string> reasons = {"no worker has joined", "say \"when\""};
  std::mutex mutex;
  OpsServer::Hooks hooks;
  hooks.readiness = [&] {
    std::lock_guard lock(mutex);
    return Readiness{reasons};
  };
  hooks.metrics = &registry;
  hooks.startup = &startup;
  auto server = OpsServer::start("127.0.0.1:0", hooks);
  ASSERT_TRUE(server.ok()) << server.status();
  const uint16_t port = (*server)->port();
  ASSERT_NE(port, 0);
  EXPECT_EQ((*server)->address(), "127.0.0.1:" + std::to_string(port));

  EXPECT_THAT(http_call(port, "GET", "/metrics").body, HasSubstr("conclave_test_streams 2"));
  EXPECT_EQ(http_call(port, "GET", "/livez").status, 200);
  auto ready = http_call(port, "GET", "/readyz");
  EXPECT_EQ(ready.status, 503);
  EXPECT_EQ(ready.body, "{\"ready\":false,\"reasons\":[\"no worker has joined\",\"say \\\"when\\\"\"]}\n");
  {
    std::lock_guard lock(mutex);
    reasons.clear();
  }
  EXPECT_EQ(http_call(port, "GET", "/readyz").status, 200);
  auto starting = http_call(port, "GET", "/startupz");
  EXPECT_EQ(starting.status, 503);
  EXPECT_THAT(starting.body,
              HasSubstr("\"phase\":\"binding\",\"detail\":\"layer 3 of 62\",\"fraction\":0.2500"));
  // What goes on by itself is asked when somebody looks.
  double fraction = 0.5;
  startup.follow([&fraction](StartupProgress& progress) {
    if (fraction >= 1) return progress.done();
    progress.set("warming", "experts", fraction);
  });
  starting = http_call(port, "GET", "/startupz");
  EXPECT_EQ(starting.status, 503);
  EXPECT_NE(starting.body.find("\"phase\":\"warming\",\"detail\":\"experts\",\"fraction\":0.5000"),
            std::string::npos)
      << starting.body;
  fraction = 1;
  EXPECT_EQ(http_call(port, "GET", "/startupz").status, 200);
  startup.follow(nullptr);
  EXPECT_EQ(http_call(port, "GET", "/nothing").status, 404);
  EXPECT_EQ(http_call(port, "DELETE", "/metrics").status, 405);
  const auto head = http_call(port, "HEAD", "/livez");
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.headers.at("content-length"), "14");
}

TEST(OpsServer, APortInUseIsOneLineThatSaysWhatToDo) {
  auto first = OpsServer::start("127.0.0.1:0", {});
  ASSERT_TRUE(first.ok());
  auto second = OpsServer::start((*first)->address(), {});
  ASSERT_EQ(second.status().code(), StatusCode::kUnavailable);
  const std::string message = message_of(second.status());
  EXPECT_THAT(message, HasSubstr((*first)->address()));
  EXPECT_THAT(message, HasSubstr("choose another port"));
  EXPECT_THAT(message, Not(HasSubstr("\n")));
  EXPECT_EQ(OpsServer::start("nonsense", {}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(OpsServer::start("127.0.0.1:99999", {}).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace conclave
