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

// A log-probability: no NaN, not above 0 by more than rounding; minus infinity is a value.
inline Status check_logprob(std::string_view field, float value) {
  if (!std::isnan(value) && value <= 1e-3f) return OkStatus();
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
