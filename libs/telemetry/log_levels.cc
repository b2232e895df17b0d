#include "libs/telemetry/log_levels.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace conclave {
namespace {

constexpr std::array<std::string_view, 4> kLevelNames = {"debug", "info", "warn", "error"};
constexpr std::array<std::string_view, kLogModules> kModuleNames = {
    "general", "service",   "grpc",      "requests", "sessions",
    "members", "placement", "transport", "model",    "keys"};

std::atomic<LogLevel> threshold{LogLevel::kInfo};
std::atomic<bool> texts{false};

constexpr uint64_t kNoLevel = 0;  // else 1 + level

// A change and its end in one word, so that one that has just begun is never taken for the one before: the
// low two bits and one are 1 + level, the rest the end in ms of the steady clock (0: none).
struct Module {
  std::atomic<uint64_t> configured{kNoLevel};
  std::atomic<uint64_t> change{0};
};
std::array<Module, kLogModules> modules;

constexpr uint64_t kLevelBits = 3;
constexpr uint64_t kLevelMask = (1 << kLevelBits) - 1;

uint64_t pack(LogLevel level, TimePoint until) {
  const uint64_t end = until == kNever ? 0 : static_cast<uint64_t>(until / kMillisecond) + 1;
  return (end << kLevelBits) | (1 + static_cast<uint64_t>(level));
}
bool in_force(uint64_t change, TimePoint now) {
  const uint64_t end = change >> kLevelBits;
  return (change & kLevelMask) != kNoLevel && (end == 0 || static_cast<uint64_t>(now / kMillisecond) < end);
}
LogLevel level_in(uint64_t packed) { return static_cast<LogLevel>((packed & kLevelMask) - 1); }

Module& at(LogModule module) { return modules[static_cast<size_t>(module)]; }

LogLevel configured_level(const Module& module) {
  const uint64_t own = module.configured.load(std::memory_order_relaxed);
  return own == kNoLevel ? threshold.load(std::memory_order_relaxed) : level_in(own);
}

std::string listed(std::span<const std::string_view> names) {
  std::string out;
  for (const std::string_view name : names) {
    if (!out.empty()) out += ", ";
    out += name;
  }
  return out;
}

using Configured = std::array<uint64_t, kLogModules>;

StatusOr<Configured> parse_modules(std::string_view text, std::string_view field) {
  Configured out{};
  while (!text.empty()) {
    const size_t end = std::min(text.find(','), text.size());
    const std::string_view pair = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t equals = pair.find('=');
    if (equals == std::string_view::npos)
      return invalid_field(field, "'" + std::string(pair) + "': write module=level,module=level");
    ASSIGN_OR_RETURN(const LogModule module, parse_log_module(pair.substr(0, equals), field));
    ASSIGN_OR_RETURN(const LogLevel level, parse_log_level(pair.substr(equals + 1), field));
    uint64_t& own = out[static_cast<size_t>(module)];
    if (own != kNoLevel)
      return invalid_field(field, "names '" + std::string(pair.substr(0, equals)) + "' twice");
    own = 1 + static_cast<uint64_t>(level);
  }
  return out;
}

}  // namespace

std::string_view log_level_name(LogLevel level) { return kLevelNames[static_cast<size_t>(level)]; }
std::string_view log_module_name(LogModule module) { return kModuleNames[static_cast<size_t>(module)]; }

StatusOr<LogLevel> parse_log_level(std::string_view text, std::string_view field) {
  for (size_t i = 0; i < kLevelNames.size(); ++i)
    if (text == kLevelNames[i]) return static_cast<LogLevel>(i);
  return invalid_field(field, "must be debug, info, warn or error");
}

StatusOr<LogModule> parse_log_module(std::string_view text, std::string_view field) {
  for (size_t i = 0; i < kModuleNames.size(); ++i)
    if (text == kModuleNames[i]) return static_cast<LogModule>(i);
  return invalid_field(field, "'" + std::string(text.substr(0, 64)) +
                                  "' is no module of the log; there are " + listed(kModuleNames));
}

void log_threshold(LogLevel level) { threshold.store(level, std::memory_order_relaxed); }
void log_texts(bool allowed) { texts.store(allowed, std::memory_order_relaxed); }
bool log_texts() { return texts.load(std::memory_order_relaxed); }

bool log_enabled_at(LogModule module, LogLevel level, TimePoint now) {
  Module& own = at(module);
  uint64_t change = own.change.load(std::memory_order_relaxed);
  if (change != 0) {
    if (in_force(change, now)) return level >= level_in(change);
    own.change.compare_exchange_strong(change, 0);
  }
  return level >= configured_level(own);
}

bool log_enabled(LogModule module, LogLevel level) {
  // The clock is read only where a change may have ended.
  const Module& own = at(module);
  if (own.change.load(std::memory_order_relaxed) == 0) return level >= configured_level(own);
  return log_enabled_at(module, level, steady_now());
}

Status check_log_modules(std::string_view text, std::string_view field) {
  return parse_modules(text, field).status();
}

Status configure_log_modules(std::string_view text, std::string_view field) {
  ASSIGN_OR_RETURN(const Configured configured, parse_modules(text, field));
  for (size_t i = 0; i < kLogModules; ++i) modules[i].configured.store(configured[i]);
  return OkStatus();
}

void change_log_level(const LogChange& change, TimePoint now) {
  const TimePoint until = change.lasts == 0 ? kNever : now + change.lasts;
  const uint64_t packed = change.level ? pack(*change.level, until) : 0;
  for (size_t i = 0; i < kLogModules; ++i)
    if (!change.module || static_cast<size_t>(*change.module) == i) modules[i].change.store(packed);
}

std::vector<LogModuleLevel> log_levels(TimePoint now) {
  std::vector<LogModuleLevel> out;
  for (size_t i = 0; i < kLogModules; ++i) {
    LogModuleLevel one;
    one.module = static_cast<LogModule>(i);
    one.configured = one.level = configured_level(modules[i]);
    const uint64_t change = modules[i].change.load();
    if (in_force(change, now)) {
      one.changed = true;
      one.level = level_in(change);
      const uint64_t end = change >> kLevelBits;
      if (end != 0) one.left = static_cast<Nanos>(end) * kMillisecond - now;
    }
    out.push_back(one);
  }
  return out;
}

std::string log_levels_json() {
  std::string out = "{\"modules\":[";
  for (const LogModuleLevel& one : log_levels()) {
    if (out.back() != '[') out += ',';
    // Names and levels are ours: nothing in them needs an escape.
    out += "{\"module\":\"" + std::string(log_module_name(one.module)) + "\",\"level\":\"" +
           std::string(log_level_name(one.level)) + "\",\"configured\":\"" +
           std::string(log_level_name(one.configured)) +
           "\",\"changed\":" + (one.changed ? "true" : "false") + ",\"left_s\":";
    char left[32] = "null";
    if (one.left > 0) std::snprintf(left, sizeof left, "%.1f", static_cast<double>(one.left) / kSecond);
    out += left;
    out += '}';
  }
  return out + "]}";
}

StatusOr<LogChange> parse_log_change(std::string_view query) {
  LogChange change;
  bool has_module = false, has_level = false;
  while (!query.empty()) {
    const size_t end = std::min(query.find('&'), query.size());
    const std::string_view pair = query.substr(0, end);
    query.remove_prefix(std::min(end + 1, query.size()));
    const size_t equals = std::min(pair.find('='), pair.size());
    const std::string_view name = pair.substr(0, equals);
    const std::string_view value = pair.substr(std::min(equals + 1, pair.size()));
    if (name == "module") {
      has_module = true;
      if (value == "all") continue;
      ASSIGN_OR_RETURN(change.module, parse_log_module(value, "module"));
    } else if (name == "level") {
      has_level = true;
      if (value == "default") continue;
      auto level = parse_log_level(value, "level");
      if (!level.ok()) return invalid_field("level", "must be debug, info, warn, error or default");
      change.level = *level;
    } else if (name == "for_s") {
      double seconds = 0;
      const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), seconds);
      if (error != std::errc() || stop != value.data() + value.size() || !std::isfinite(seconds) ||
          seconds < 0 || seconds > static_cast<double>(kLongestLogChange / kSecond)) {
        return invalid_field("for_s", "must be seconds from 0 (until the process ends) to " +
                                          std::to_string(kLongestLogChange / kSecond));
      }
      change.lasts = static_cast<Nanos>(std::ceil(seconds * 1000)) * kMillisecond;
    } else {
      return invalid_field(name.empty() ? "query" : name.substr(0, 64),
                           "is no parameter; there are module, level and for_s");
    }
  }
  if (!has_module) return invalid_field("module", "is missing: name a module, or all");
  if (!has_level) return invalid_field("level", "is missing: debug, info, warn, error or default");
  return change;
}

}  // namespace conclave
