// Why a TLS connection was refused, as metrics and logs have it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace conclave::tls {

enum class Refusal : uint8_t {
  kNotTls,          // what came was no TLS: a peer that speaks in clear, or something else entirely
  kNoCertificate,   // the peer showed none
  kUnknownCa,       // it comes from none of our authorities
  kExpired,         // it, or one on its way to the authority, is past its time
  kNotYetValid,     // ... before its time
  kWrongName,       // it is sound, and of somebody else
  kBadCertificate,  // anything else is wrong with it: its usage, its signature, its form
  kOther,           // the handshake failed for another reason
};
inline constexpr size_t kRefusals = 8;

inline std::string_view refusal_name(Refusal refusal) {
  constexpr std::array<std::string_view, kRefusals> kNames = {
      "not_tls",       "no_certificate", "unknown_ca",      "expired",
      "not_yet_valid", "wrong_name",     "bad_certificate", "other"};
  return kNames[static_cast<size_t>(refusal)];
}

}  // namespace conclave::tls
