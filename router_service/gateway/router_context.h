// What travels with a resumable request so that another router can go on with its answer: what this router
// knows beyond the request itself, and what the protocol's adapter needs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::gateway {

struct RouterContext {
  bool starts_in_reasoning = false;
  std::string_view echoed;  // the prompt as text, for echo
  std::string_view adapter;
};

inline constexpr char kRouterContextVersion = 1;

// version, flags, the length of `echoed` (little-endian), `echoed`, `adapter`.
inline std::string write_router_context(const RouterContext& context) {
  std::string out;
  out.reserve(6 + context.echoed.size() + context.adapter.size());
  out.push_back(kRouterContextVersion);
  out.push_back(context.starts_in_reasoning ? 1 : 0);
  const auto length = static_cast<uint32_t>(context.echoed.size());
  for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<char>(length >> shift & 255));
  out += context.echoed;
  out += context.adapter;
  return out;
}

// Views into `bytes`; nullopt for bytes of another version, or none of ours.
inline std::optional<RouterContext> read_router_context(std::string_view bytes) {
  if (bytes.size() < 6 || bytes[0] != kRouterContextVersion || (bytes[1] != 0 && bytes[1] != 1))
    return std::nullopt;
  uint32_t length = 0;
  for (size_t i = 0; i < 4; ++i) length |= static_cast<uint32_t>(static_cast<uint8_t>(bytes[2 + i])) << 8 * i;
  if (length > bytes.size() - 6) return std::nullopt;
  return RouterContext{bytes[1] == 1, bytes.substr(6, length), bytes.substr(6 + length)};
}

}  // namespace conclave::gateway
