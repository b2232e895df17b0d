#include "libs/base/address.h"

namespace conclave {
namespace {

constexpr size_t kMaxHostLength = 253;  // of a DNS name

bool host_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' ||
         c == '_';
}

bool v6_char(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F') || c == ':' || c == '.' ||
         c == '%';
}

}  // namespace

std::string HostPort::text() const {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

StatusOr<HostPort> parse_host_port(std::string_view text) {
  const std::string shown = "'" + std::string(text) + "'";
  HostPort out;
  std::string_view rest = text;
  if (!rest.empty() && rest.front() == '[') {
    const size_t close = rest.find(']');
    if (close == std::string_view::npos) return invalid_argument(shown + " lacks the ']' of an IPv6 address");
    out.host = std::string(rest.substr(1, close - 1));
    rest.remove_prefix(close + 1);
    if (out.host.empty()) return invalid_argument(shown + " has an empty address in brackets");
    for (char c : out.host) {
      if (!v6_char(c)) return invalid_argument(shown + " is not an IPv6 address in brackets");
    }
  } else {
    const size_t colon = rest.find(':');
    if (colon == std::string_view::npos) return invalid_argument(shown + " lacks a port; write host:port");
    if (rest.find(':', colon + 1) != std::string_view::npos) {
      return invalid_argument(shown + " has several colons; write an IPv6 address as [address]:port");
    }
    out.host = std::string(rest.substr(0, colon));
    rest.remove_prefix(colon);
    if (out.host.size() > kMaxHostLength) return invalid_argument(shown + " has an overlong host name");
    for (char c : out.host) {
      if (!host_char(c)) return invalid_argument(shown + " has a character that no host name has");
    }
    if (out.host.empty()) out.host = "0.0.0.0";
  }
  if (rest.empty() || rest.front() != ':') return invalid_argument(shown + " lacks a port; write host:port");
  rest.remove_prefix(1);
  if (rest.empty() || rest.size() > 5) return invalid_argument(shown + " has no port between 0 and 65535");
  uint32_t port = 0;
  for (char c : rest) {
    if (c < '0' || c > '9') return invalid_argument(shown + " has no port between 0 and 65535");
    port = port * 10 + static_cast<uint32_t>(c - '0');
  }
  if (port > 65535) return invalid_argument(shown + " has no port between 0 and 65535");
  out.port = static_cast<uint16_t>(port);
  return out;
}

}  // namespace conclave
