// The file of API keys: one key a line, as its SHA-256, so that reading the file gives nobody a key.
//
//   sha256:<64 hex digits> name=<tenant> [requests_per_minute=N] [tokens_per_minute=N] [trusted]
//
// Empty lines and lines that begin with '#' are skipped. Several keys may carry one name (a key is replaced
// by adding the new one first); their limits must agree, and they share one allowance.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"

namespace conclave::door {

using KeyHash = std::array<uint8_t, 32>;

struct KeyGrant {
  uint64_t requests_per_minute = 0;  // 0: no limit
  uint64_t tokens_per_minute = 0;    // prompt and completion; 0: no limit
  bool trusted = false;              // may let control tokens in a prompt's text be control tokens

  bool operator==(const KeyGrant&) const = default;
};

struct KeyLine {
  KeyHash hash{};
  std::string name;
  KeyGrant grant;
};

inline constexpr size_t kMaxKeyBytes = 512;
inline constexpr size_t kMaxNameBytes = 64;

// A new key: "ck-" and 192 bits from the operating system in hex. A random key of that length needs no slow
// hash: there is nothing to guess.
StatusOr<std::string> make_key();
KeyHash hash_key(std::string_view key);
// Takes the same time wherever the two differ.
bool same_hash(const KeyHash& a, const KeyHash& b);

// INVALID_ARGUMENT unless it is 1..64 letters, digits and "._-@".
Status check_name(std::string_view name);
// The line of the file, without its end.
std::string format_key_line(const KeyLine& line);
// Every fault names its line. RESOURCE_EXHAUSTED past max_keys.
StatusOr<std::vector<KeyLine>> parse_key_file(std::string_view text, size_t max_keys);

}  // namespace conclave::door
