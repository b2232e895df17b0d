// Builds the list of ConfigFields: each method binds one key to a member. Internal to libs/config.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "libs/base/clock.h"
#include "libs/config/schema.h"

namespace conclave {

// "4096", "64KiB", "1.5GiB" and the like; whole bytes.
StatusOr<uint64_t> parse_bytes(std::string_view text);
std::string format_bytes(uint64_t bytes);
StatusOr<uint64_t> parse_unsigned(std::string_view text);
StatusOr<double> parse_real(std::string_view text);
std::string format_real(double value);

class FieldList {
 public:
  void section(std::string name) { section_ = std::move(name); }

  void text(std::string key, std::string& member, std::string doc);
  // host:port; `optional` allows an empty value.
  void address(std::string key, std::string& member, bool optional, std::string doc);
  // "alice=3,bob=2": whole numbers by name.
  void weights(std::string key, std::map<std::string, uint32_t>& member, uint32_t low, uint32_t high,
               std::string doc);
  void boolean(std::string key, bool& member, std::string doc);
  void real(std::string key, double& member, double low, double high, std::string unit, std::string doc);
  void bytes(std::string key, uint64_t& member, uint64_t low, uint64_t high, std::string doc);
  // A duration kept in nanoseconds and written in `unit_ns`; the key's suffix and `unit` say which.
  void duration(std::string key, Nanos& member, Nanos unit_ns, std::string unit, double low, double high,
                std::string doc);

  template <class T>
  void integer(std::string key, T& member, T low, T high, std::string unit, std::string doc) {
    ConfigField& field =
        add(std::move(key), FieldKind::kNumber, "an integer", std::move(unit), std::move(doc));
    field.range = std::to_string(low) + " .. " + std::to_string(high);
    field.set = [&member, low, high](const std::string& text) -> Status {
      ASSIGN_OR_RETURN(const uint64_t value, parse_unsigned(text));
      if (value < low || value > high) return out_of_range(text, std::to_string(low), std::to_string(high));
      member = static_cast<T>(value);
      return OkStatus();
    };
    field.get = [&member] { return std::to_string(member); };
  }

  template <class E>
  void choice(std::string key, E& member, std::vector<std::pair<std::string, E>> choices, std::string doc) {
    ConfigField& field = add(std::move(key), FieldKind::kText, "a word", "", std::move(doc));
    for (const auto& [word, value] : choices) field.range += (field.range.empty() ? "" : ", ") + word;
    const std::string range = field.range;
    field.set = [&member, choices, range](const std::string& text) -> Status {
      for (const auto& [word, value] : choices) {
        if (word == text) {
          member = value;
          return OkStatus();
        }
      }
      return invalid_argument("'" + text + "' is none of: " + range);
    };
    field.get = [&member, choices]() -> std::string {
      for (const auto& [word, value] : choices) {
        if (value == member) return word;
      }
      return "";
    };
  }

  std::vector<ConfigField> take() { return std::move(fields_); }

 private:
  ConfigField& add(std::string key, FieldKind kind, std::string type, std::string unit, std::string doc);
  static Status out_of_range(const std::string& text, const std::string& low, const std::string& high);

  std::string section_;
  std::vector<ConfigField> fields_;
};

}  // namespace conclave
