// The levels of the modules of a process's log: configured at start (logging.level, logging.modules), and
// changed while it runs, for a time or for good. Any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/telemetry/log.h"

namespace conclave {

// A change lasts so long where nobody says how long, and at most kLongestLogChange.
inline constexpr Nanos kDefaultLogChange = 900 * kSecond;
inline constexpr Nanos kLongestLogChange = 7 * 86400 * kSecond;

// "requests=debug,transport=warn"; empty: none has a level of its own. INVALID_ARGUMENT names `field` and
// the word that is not understood; nothing has changed then.
Status configure_log_modules(std::string_view text, std::string_view field);
// What configure_log_modules would say.
Status check_log_modules(std::string_view text, std::string_view field);

struct LogChange {
  std::optional<LogModule> module;  // none: all of them
  std::optional<LogLevel> level;    // none: back to what is configured
  Nanos lasts = kDefaultLogChange;  // 0: until the process ends
};
void change_log_level(const LogChange& change, TimePoint now = steady_now());

struct LogModuleLevel {
  LogModule module = LogModule::kGeneral;
  LogLevel level = LogLevel::kInfo;       // in force now
  LogLevel configured = LogLevel::kInfo;  // without the change
  bool changed = false;
  Nanos left = 0;  // of a change; 0: it stays
};
// Of every module, in their order.
std::vector<LogModuleLevel> log_levels(TimePoint now = steady_now());

// The module's lines of that level are written at `now`; log_enabled() is this with the clock's time.
bool log_enabled_at(LogModule module, LogLevel level, TimePoint now);

// --- for operators, over HTTP (docs/operations.md)
// {"modules":[{"module","level","configured","changed","left_s"}]}; left_s is null where it stays.
std::string log_levels_json();
// The query of a PUT: "module=requests&level=debug&for_s=600". `module` may be all, `level` may be default;
// for_s 0 is until the process ends. INVALID_ARGUMENT names the parameter that is missing, unknown or wrong.
StatusOr<LogChange> parse_log_change(std::string_view query);

}  // namespace conclave
