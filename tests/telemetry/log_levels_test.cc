// Levels of the log's modules: configured, changed for a time, changed for good; and over HTTP.
#include "libs/telemetry/log_levels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "libs/telemetry/ops_server.h"
#include "tests/router/raw_http.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;
using testing::http_call;

constexpr TimePoint kNow = 1000 * kSecond;

class LogLevels : public ::testing::Test {
 protected:
  void SetUp() override { reset(); }
  void TearDown() override { reset(); }
  static void reset() {
    log_threshold(LogLevel::kInfo);
    ASSERT_TRUE(configure_log_modules("", "logging.modules").ok());
    change_log_level({});
  }
  static LogModuleLevel of(LogModule module, TimePoint now = kNow) {
    return log_levels(now)[static_cast<size_t>(module)];
  }
};

TEST_F(LogLevels, NamesAndNumbersAgree) {
  const auto all = log_levels();
  ASSERT_EQ(all.size(), kLogModules);
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(static_cast<size_t>(all[i].module), i);
    EXPECT_EQ(parse_log_module(log_module_name(all[i].module), "m").value(), all[i].module);
  }
  for (const auto level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarn, LogLevel::kError})
    EXPECT_EQ(parse_log_level(log_level_name(level), "l").value(), level);
}

TEST_F(LogLevels, AModuleFollowsTheThresholdUnlessItHasItsOwn) {
  log_threshold(LogLevel::kWarn);
  ASSERT_TRUE(configure_log_modules("requests=debug,keys=error", "logging.modules").ok());
  EXPECT_TRUE(log_enabled(LogModule::kRequests, LogLevel::kDebug));
  EXPECT_FALSE(log_enabled(LogModule::kKeys, LogLevel::kWarn));
  EXPECT_FALSE(log_enabled(LogModule::kModel, LogLevel::kInfo));
  EXPECT_TRUE(log_enabled(LogModule::kModel, LogLevel::kWarn));
  log_threshold(LogLevel::kDebug);
  EXPECT_TRUE(log_enabled(LogModule::kModel, LogLevel::kDebug));
  EXPECT_FALSE(log_enabled(LogModule::kKeys, LogLevel::kWarn));
}

TEST_F(LogLevels, AChangeEndsByItself) {
  change_log_level({LogModule::kTransport, LogLevel::kDebug, 10 * kSecond}, kNow);
  EXPECT_TRUE(log_enabled_at(LogModule::kTransport, LogLevel::kDebug, kNow));
  EXPECT_TRUE(log_enabled_at(LogModule::kTransport, LogLevel::kDebug, kNow + 9 * kSecond));
  EXPECT_FALSE(log_enabled_at(LogModule::kModel, LogLevel::kDebug, kNow));
  const LogModuleLevel seen = of(LogModule::kTransport, kNow + 4 * kSecond);
  EXPECT_TRUE(seen.changed);
  EXPECT_EQ(seen.level, LogLevel::kDebug);
  EXPECT_EQ(seen.configured, LogLevel::kInfo);
  EXPECT_NEAR(static_cast<double>(seen.left), 6.0 * kSecond, 0.01 * kSecond);
  EXPECT_FALSE(log_enabled_at(LogModule::kTransport, LogLevel::kDebug, kNow + 11 * kSecond));
  EXPECT_FALSE(of(LogModule::kTransport, kNow + 11 * kSecond).changed);
  // A change to a less verbose level, too.
  change_log_level({LogModule::kTransport, LogLevel::kError, kSecond}, kNow);
  EXPECT_FALSE(log_enabled_at(LogModule::kTransport, LogLevel::kWarn, kNow));
  EXPECT_TRUE(log_enabled_at(LogModule::kTransport, LogLevel::kWarn, kNow + 2 * kSecond));
}

TEST_F(LogLevels, WithoutAnEndItStaysUntilItIsTakenBack) {
  change_log_level({std::nullopt, LogLevel::kDebug, 0}, kNow);
  for (const LogModuleLevel& one : log_levels(kNow + 365 * 86400 * kSecond)) {
    EXPECT_TRUE(one.changed);
    EXPECT_EQ(one.level, LogLevel::kDebug);
    EXPECT_EQ(one.left, 0);
  }
  change_log_level({LogModule::kKeys, std::nullopt, 0}, kNow);
  EXPECT_FALSE(of(LogModule::kKeys).changed);
  EXPECT_TRUE(of(LogModule::kModel).changed);
}

TEST_F(LogLevels, WhatIsWrongIsNamedAndChangesNothing) {
  for (const char* text : {"requests", "requests=loud", "nobody=info", "=info",
                           "requests=", "requests=info,requests=debug", ",", "requests = info"}) {
    EXPECT_EQ(field_of(configure_log_modules(text, "logging.modules")), "logging.modules") << text;
    EXPECT_FALSE(check_log_modules(text, "logging.modules").ok()) << text;
  }
  EXPECT_THAT(message_of(configure_log_modules("nobody=info", "logging.modules")), HasSubstr("requests"));
  EXPECT_EQ(of(LogModule::kRequests).level, LogLevel::kInfo);

  const std::pair<const char*, const char*> queries[] = {{"", "module"},
                                                         {"module=requests", "level"},
                                                         {"level=debug", "module"},
                                                         {"module=nobody&level=debug", "module"},
                                                         {"module=requests&level=loud", "level"},
                                                         {"module=requests&level=debug&for_s=-1", "for_s"},
                                                         {"module=requests&level=debug&for_s=nan", "for_s"},
                                                         {"module=requests&level=debug&for_s=inf", "for_s"},
                                                         {"module=requests&level=debug&for_s=1e9", "for_s"},
                                                         {"module=requests&level=debug&for_s=", "for_s"},
                                                         {"module=requests&level=debug&for=1", "for"},
                                                         {"&", "query"}};
  for (const auto& [query, field] : queries)
    EXPECT_EQ(field_of(parse_log_change(query).status()), field) << query;
  const auto change = parse_log_change("module=all&level=default&for_s=0.5");
  ASSERT_TRUE(change.ok()) << change.status();
  EXPECT_FALSE(change->module.has_value());
  EXPECT_FALSE(change->level.has_value());
  EXPECT_EQ(change->lasts, kSecond / 2);
}

TEST_F(LogLevels, ChangesWhileManyThreadsAskLoseNothing) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> askers;
  for (int i = 0; i < 3; ++i) {
    askers.emplace_back([&stop] {
      while (!stop) {
        for (size_t m = 0; m < kLogModules; ++m) log_enabled(static_cast<LogModule>(m), LogLevel::kDebug);
      }
    });
  }
  for (int i = 0; i < 2000; ++i) {
    // The one before has always ended; what the askers clear must be that one, never this.
    change_log_level({LogModule::kRequests, LogLevel::kError, kMillisecond}, steady_now() - kSecond);
    change_log_level({LogModule::kRequests, LogLevel::kDebug, 0});
    ASSERT_TRUE(log_enabled(LogModule::kRequests, LogLevel::kDebug));
  }
  stop = true;
  for (std::thread& asker : askers) asker.join();
}

TEST_F(LogLevels, TheOperationsPortShowsAndChangesThem) {
  auto server = OpsServer::start("127.0.0.1:0", {});
  ASSERT_TRUE(server.ok()) << server.status();
  const uint16_t port = (*server)->port();
  auto seen = http_call(port, "GET", "/debug/log");
  EXPECT_EQ(seen.status, 200);
  EXPECT_THAT(seen.body, HasSubstr("{\"module\":\"requests\",\"level\":\"info\",\"configured\":\"info\","
                                   "\"changed\":false,\"left_s\":null}"));
  EXPECT_EQ(http_call(port, "PUT", "/debug/log?module=requests&level=debug&for_s=0").status, 200);
  EXPECT_TRUE(log_enabled(LogModule::kRequests, LogLevel::kDebug));
  const auto wrong = http_call(port, "PUT", "/debug/log?module=nobody&level=debug");
  EXPECT_EQ(wrong.status, 400);
  EXPECT_THAT(wrong.body, HasSubstr("\"field\":\"module\""));
  EXPECT_EQ(http_call(port, "POST", "/debug/log?module=requests&level=debug").status, 405);
  EXPECT_EQ(http_call(port, "PUT", "/metrics").status, 405);
  EXPECT_EQ(http_call(port, "GET", "/debug/process").status, 404);  // nobody reports here
}

TEST_F(LogLevels, LinesNameTheirModule) {
  EXPECT_THAT(format_log_line(LogModule::kTransport, LogLevel::kInfo, "x", {}),
              HasSubstr("\"level\":\"info\",\"module\":\"transport\""));
}

}  // namespace
}  // namespace conclave
