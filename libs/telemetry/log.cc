#include "libs/telemetry/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cmath>
#include <cstdio>
#include <ctime>
#include <mutex>

#include "libs/base/clock.h"
#include "libs/base/json_escape.h"

namespace conclave {
namespace {

std::mutex identity_mutex;
// ,"role":...,"name":...,"incarnation":... ready to paste.
std::string& identity_fields() {
  static std::string* fields = new std::string;
  return *fields;
}

spdlog::logger& logger() {
  // Never destroyed: threads may log while statics are torn down.
  static spdlog::logger* instance = [] {
    auto* made = new spdlog::logger("conclave", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%v");
    made->set_level(spdlog::level::trace);
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *instance;
}

// Length of the valid UTF-8 sequence at `s`, 0 when there is none.
size_t utf8_length(std::string_view s) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(s[i]); };
  const auto tail = [&](size_t i) { return i < s.size() && (at(i) & 0xc0) == 0x80; };
  const unsigned char c = at(0);
  if (c < 0x80) return 1;
  if (c >= 0xc2 && c <= 0xdf) return tail(1) ? 2 : 0;
  if (c >= 0xe0 && c <= 0xef) {
    if (!tail(1) || !tail(2)) return 0;
    if ((c == 0xe0 && at(1) < 0xa0) || (c == 0xed && at(1) > 0x9f)) return 0;
    return 3;
  }
  if (c >= 0xf0 && c <= 0xf4) {
    if (!tail(1) || !tail(2) || !tail(3)) return 0;
    if ((c == 0xf0 && at(1) < 0x90) || (c == 0xf4 && at(1) > 0x8f)) return 0;
    return 4;
  }
  return 0;
}

// Whatever bytes: what is no UTF-8 becomes U+FFFD.
void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  while (!text.empty()) {
    size_t valid = 0;
    size_t n = 0;
    while (valid < text.size() && (n = utf8_length(text.substr(valid))) > 0) valid += n;
    append_json_escaped(out, text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) break;
    out += "\xef\xbf\xbd";
    text.remove_prefix(1);
  }
  out += '"';
}

void append_field(std::string& out, std::string_view key, std::string_view value) {
  out += ',';
  append_json_string(out, key);
  out += ':';
  append_json_string(out, value);
}

struct AppendValue {
  std::string& out;
  void operator()(const std::string& v) const { append_json_string(out, v); }
  void operator()(int64_t v) const { out += std::to_string(v); }
  void operator()(uint64_t v) const { out += std::to_string(v); }
  void operator()(bool v) const { out += v ? "true" : "false"; }
  void operator()(double v) const {
    if (!std::isfinite(v)) {  // JSON has no such numbers
      append_json_string(out, std::isnan(v) ? "nan" : v > 0 ? "inf" : "-inf");
      return;
    }
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, "%.9g", v);
    out += buffer;
  }
};

std::string status_text(const Status& status) {
  std::string text(absl::StatusCodeToString(status.code()));
  if (!status.ok()) text += ": " + message_of(status);
  return text;
}

}  // namespace

LogField::LogField(std::string_view k, const Status& v) : key(k), value(status_text(v)) {}

void log_identity(std::string_view role, std::string_view name, Incarnation incarnation) {
  std::string fields;
  append_field(fields, "role", role);
  append_field(fields, "name", name);
  char hex[20];
  std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(incarnation.value));
  append_field(fields, "incarnation", hex);
  std::lock_guard lock(identity_mutex);
  identity_fields() = fields;
}

std::string format_log_line(LogModule module, LogLevel level, std::string_view message,
                            std::span<const LogField> fields) {
  const int64_t ms = wall_now_ms();
  const time_t seconds = static_cast<time_t>(ms / 1000);
  tm utc{};
  gmtime_r(&seconds, &utc);
  char stamp[64];
  std::snprintf(stamp, sizeof stamp, "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ", utc.tm_year + 1900,
                utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec,
                static_cast<int>(ms % 1000));
  std::string line = "{\"ts\":\"";
  line += stamp;
  line += "\",\"level\":\"";
  line += log_level_name(level);
  line += "\",\"module\":\"";
  line += log_module_name(module);
  line += '"';
  {
    std::lock_guard lock(identity_mutex);
    line += identity_fields();
  }
  append_field(line, "msg", message);
  for (const LogField& field : fields) {
    line += ',';
    append_json_string(line, field.key);
    line += ':';
    std::visit(AppendValue{line}, field.value);
  }
  line += '}';
  return line;
}

void log(LogModule module, LogLevel level, std::string_view message, std::span<const LogField> fields) {
  if (!log_enabled(module, level)) return;
  logger().log(spdlog::level::info, spdlog::string_view_t(format_log_line(module, level, message, fields)));
}

}  // namespace conclave
