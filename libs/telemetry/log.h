// Structured logs: one JSON object a line on stderr,
// {"ts","level","role","name","incarnation","msg",...fields}. Never log prompt or answer text, token ids, or
// secrets: log sizes and identifiers. Any thread. A line is written whole, so lines of several threads never
// mix.
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

// "debug", "info", "warn" or "error"; INVALID_ARGUMENT names `field` otherwise.
StatusOr<LogLevel> parse_log_level(std::string_view text, std::string_view field);

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
// Lines below `level` are dropped; kInfo until set.
void log_threshold(LogLevel level);
bool log_enabled(LogLevel level);

void log(LogLevel level, std::string_view message, std::span<const LogField> fields);
inline void log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields = {}) {
  log(level, message, std::span(fields.begin(), fields.size()));
}
inline void log_debug(std::string_view m, std::initializer_list<LogField> f = {}) {
  log(LogLevel::kDebug, m, f);
}
inline void log_info(std::string_view m, std::initializer_list<LogField> f = {}) {
  log(LogLevel::kInfo, m, f);
}
inline void log_warn(std::string_view m, std::initializer_list<LogField> f = {}) {
  log(LogLevel::kWarn, m, f);
}
inline void log_error(std::string_view m, std::initializer_list<LogField> f = {}) {
  log(LogLevel::kError, m, f);
}

// The line that log() would write, without the newline; for tests.
std::string format_log_line(LogLevel level, std::string_view message, std::span<const LogField> fields);
inline std::string format_log_line(LogLevel level, std::string_view message,
                                   std::initializer_list<LogField> fields) {
  return format_log_line(level, message, std::span(fields.begin(), fields.size()));
}

}  // namespace conclave
