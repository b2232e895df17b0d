// Structured logs: one JSON object a line on stderr,
// {"ts","level","module","role","name","incarnation","msg",...fields}. Lines about a request carry its
// "stream" (the id that processes know it by) or its "request_id" (the client's). Never log prompt or answer
// text, token ids, or secrets: log sizes and identifiers; the one exception is behind log_texts(). Any
// thread. A line is written whole, so lines of several threads never mix.
//
// Each line belongs to a module, whose level can be changed while the process runs: log_levels.h.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "libs/base/ids.h"
#include "libs/base/status.h"

namespace conclave {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarn, kError };
std::string_view log_level_name(LogLevel level);

// "debug", "info", "warn" or "error"; INVALID_ARGUMENT names `field` otherwise.
StatusOr<LogLevel> parse_log_level(std::string_view text, std::string_view field);

// A part of a process with a level of its own. Every process knows all of them, whichever it has.
enum class LogModule : uint8_t {
  kGeneral,    // what belongs to no other
  kService,    // start, stop, signals, configuration
  kGrpc,       // what the gRPC library says
  kRequests,   // requests: their begin, their end, what holds them up
  kSessions,   // connections between scheduler, members and routers
  kMembers,    // joining, draining, leaving, being refused
  kPlacement,  // which shard has which experts
  kTransport,  // the data plane
  kModel,      // checkpoint, tokenizer, chat template
  kKeys,       // API keys
  kCount
};
inline constexpr size_t kLogModules = static_cast<size_t>(LogModule::kCount);
std::string_view log_module_name(LogModule module);
// "requests"; INVALID_ARGUMENT names `field` and lists the modules.
StatusOr<LogModule> parse_log_module(std::string_view text, std::string_view field);

// One key and its value. Keys are ours (snake_case); values may be anything and are escaped.
struct LogField {
  std::string key;
  std::variant<std::string, int64_t, uint64_t, double, bool> value;

  LogField(std::string_view k, std::string_view v) : key(k), value(std::string(v)) {}
  LogField(std::string_view k, const char* v) : key(k), value(std::string(v)) {}
  LogField(std::string_view k, const std::string& v) : key(k), value(v) {}
  LogField(std::string_view k, bool v) : key(k), value(v) {}
  LogField(std::string_view k, std::floating_point auto v) : key(k), value(static_cast<double>(v)) {}
  LogField(std::string_view k, std::signed_integral auto v) : key(k), value(static_cast<int64_t>(v)) {}
  LogField(std::string_view k, std::unsigned_integral auto v) : key(k), value(static_cast<uint64_t>(v)) {}
  // The status's code and message (and the field it names), as one string.
  LogField(std::string_view k, const Status& v);
};

// Who writes; set once at start, before other threads log. Lines written earlier lack these fields.
void log_identity(std::string_view role, std::string_view name, Incarnation incarnation);
// Lines below `level` are dropped, where their module has no level of its own; kInfo until set.
void log_threshold(LogLevel level);
bool log_enabled(LogModule module, LogLevel level);
inline bool log_enabled(LogLevel level) { return log_enabled(LogModule::kGeneral, level); }

// Whether debug lines may hold the text of prompts (logging.texts). False until set; set once at start.
void log_texts(bool allowed);
bool log_texts();

void log(LogModule module, LogLevel level, std::string_view message, std::span<const LogField> fields);
inline void log_debug(LogModule module, std::string_view m, std::initializer_list<LogField> f = {}) {
  log(module, LogLevel::kDebug, m, std::span(f.begin(), f.size()));
}
inline void log_info(LogModule module, std::string_view m, std::initializer_list<LogField> f = {}) {
  log(module, LogLevel::kInfo, m, std::span(f.begin(), f.size()));
}
inline void log_warn(LogModule module, std::string_view m, std::initializer_list<LogField> f = {}) {
  log(module, LogLevel::kWarn, m, std::span(f.begin(), f.size()));
}
inline void log_error(LogModule module, std::string_view m, std::initializer_list<LogField> f = {}) {
  log(module, LogLevel::kError, m, std::span(f.begin(), f.size()));
}
// Of the module kGeneral.
inline void log_debug(std::string_view m, std::initializer_list<LogField> f = {}) {
  log_debug(LogModule::kGeneral, m, f);
}
inline void log_info(std::string_view m, std::initializer_list<LogField> f = {}) {
  log_info(LogModule::kGeneral, m, f);
}
inline void log_warn(std::string_view m, std::initializer_list<LogField> f = {}) {
  log_warn(LogModule::kGeneral, m, f);
}
inline void log_error(std::string_view m, std::initializer_list<LogField> f = {}) {
  log_error(LogModule::kGeneral, m, f);
}

// The line that log() would write, without the newline; for tests.
std::string format_log_line(LogModule module, LogLevel level, std::string_view message,
                            std::span<const LogField> fields);
inline std::string format_log_line(LogLevel level, std::string_view message,
                                   std::initializer_list<LogField> fields) {
  return format_log_line(LogModule::kGeneral, level, message, std::span(fields.begin(), fields.size()));
}

}  // namespace conclave
