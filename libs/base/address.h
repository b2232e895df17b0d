// "host:port" as it appears in config files and flags.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "libs/base/status.h"

namespace conclave {

struct HostPort {
  std::string host;   // a name, an IPv4 address, or an IPv6 address without its brackets
  uint16_t port = 0;  // 0: chosen by the kernel when listening

  // "host:port", an IPv6 host in brackets.
  std::string text() const;
};

// Accepts "host:port", "[v6]:port" and ":port" (every interface). INVALID_ARGUMENT says what is wrong.
StatusOr<HostPort> parse_host_port(std::string_view text);

}  // namespace conclave
