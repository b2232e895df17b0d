#include "scheduler/peer_address.h"

#include "libs/base/address.h"

namespace conclave::scheduler {
namespace {

// gRPC writes brackets as %5B and %5D.
std::string without_percent(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i, 3) == "%5B" || text.substr(i, 3) == "%5D") {
      out += text[i + 2] == 'B' ? '[' : ']';
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

// Empty: not an address of a network.
std::string host_of_peer(std::string_view peer) {
  const size_t colon = peer.find(':');
  if (colon == std::string_view::npos) return "";
  const std::string_view scheme = peer.substr(0, colon);
  if (scheme != "ipv4" && scheme != "ipv6") return "";
  const auto parsed = parse_host_port(without_percent(peer.substr(colon + 1)));
  return parsed.ok() ? parsed->host : "";
}

}  // namespace

std::string reachable_from(std::string_view announced, std::string_view peer) {
  auto address = parse_host_port(announced);
  if (!address.ok()) return "";
  const bool everywhere = address->host.empty() || address->host == "0.0.0.0" || address->host == "::";
  if (!everywhere) return address->text();
  address->host = host_of_peer(peer);
  return address->host.empty() ? "" : address->text();
}

}  // namespace conclave::scheduler
