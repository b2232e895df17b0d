// Small checks shared by the from_proto functions. Internal to libs/rpc.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "libs/base/status.h"

namespace conclave::rpc {

inline Status check_at_most(std::string_view field, uint64_t value, uint64_t limit) {
  if (value <= limit) return OkStatus();
  return invalid_field(field, std::string(field) + " is " + std::to_string(value) + "; at most " +
                                  std::to_string(limit) + " is accepted");
}

inline Status check_count(std::string_view field, int64_t count, uint64_t limit) {
  if (static_cast<uint64_t>(count) <= limit) return OkStatus();
  return invalid_field(field, std::string(field) + " has " + std::to_string(count) + " entries; at most " +
                                  std::to_string(limit) + " are accepted");
}

inline Status check_text(std::string_view field, const std::string& text, size_t limit) {
  if (text.size() <= limit) return OkStatus();
  return invalid_field(field, std::string(field) + " has " + std::to_string(text.size()) +
                                  " bytes; at most " + std::to_string(limit) + " are accepted");
}

inline Status check_nonzero(std::string_view field, uint64_t value) {
  return value != 0 ? OkStatus() : invalid_field(field, std::string(field) + " is 0 or missing");
}

inline Status check_finite(std::string_view field, float value, float low, float high) {
  if (std::isfinite(value) && value >= low && value <= high) return OkStatus();
  return invalid_field(field, std::string(field) + " is not a number between " + std::to_string(low) +
                                  " and " + std::to_string(high));
}

// A column of a table that has `rows` rows.
inline Status check_column(std::string_view field, int size, int rows) {
  if (size == rows) return OkStatus();
  return invalid_field(field, std::string(field) + " has " + std::to_string(size) + " entries where " +
                                  std::to_string(rows) + " are due");
}

// Of every entry of a repeated field of numbers; one pass without branches, since a plan has hundreds.
template <class Column>
Status check_all_at_most(std::string_view field, const Column& column, uint64_t limit) {
  uint64_t largest = 0;
  for (const auto value : column) largest = largest > value ? largest : value;
  return check_at_most(field, largest, limit);
}
template <class Column>
Status check_all_nonzero(std::string_view field, const Column& column) {
  bool zero = false;
  for (const auto value : column) zero |= value == 0;
  return check_nonzero(field, zero ? 0 : 1);
}

// A log-probability: no NaN, not above 0 by more than rounding; minus infinity is a value.
inline bool is_logprob(float value) { return !std::isnan(value) && value <= 1e-3f; }
inline Status check_logprob(std::string_view field, float value) {
  if (is_logprob(value)) return OkStatus();
  return invalid_field(field, std::string(field) + " is no log-probability");
}

inline Status check_duration(std::string_view field, int64_t ns, int64_t limit) {
  if (ns >= 0 && ns <= limit) return OkStatus();
  return invalid_field(field, std::string(field) + " is " + std::to_string(ns) + " ns, out of range");
}

inline Status check_enum(std::string_view field, int value, int low, int high) {
  if (value >= low && value <= high) return OkStatus();
  return invalid_field(field, std::string(field) + " has the unknown value " + std::to_string(value));
}

}  // namespace conclave::rpc
