// The header x-request-timeout: the client's own deadline, in seconds.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>

#include "libs/base/clock.h"
#include "libs/base/status.h"

namespace conclave::router {

inline constexpr char kTimeoutHeader[] = "x-request-timeout";
inline constexpr double kMaxTimeoutHeaderSeconds = 7 * 86400;

// Seconds, as a decimal number; absent where there is no such header.
inline StatusOr<std::optional<Nanos>> parse_timeout_header(std::string_view text) {
  if (text.empty()) return std::optional<Nanos>();
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() ||
      !(seconds > 0 && seconds <= kMaxTimeoutHeaderSeconds))
    return invalid_field(kTimeoutHeader, "must be a number of seconds above 0, at most a week");
  return std::optional<Nanos>(static_cast<Nanos>(seconds * kSecond));
}

}  // namespace conclave::router
