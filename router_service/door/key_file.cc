#include "router_service/door/key_file.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <set>

#include "libs/base/check.h"

namespace conclave::door {
namespace {

constexpr std::string_view kHashPrefix = "sha256:";
constexpr uint64_t kMaxPerMinute = 1'000'000'000'000;

std::string hex(const uint8_t* bytes, size_t count) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < count; ++i) {
    out += kDigits[bytes[i] >> 4];
    out += kDigits[bytes[i] & 15];
  }
  return out;
}

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// The next word of the line; empty at its end.
std::string_view next_word(std::string_view& rest) {
  constexpr std::string_view kSpace = " \t\r";
  const size_t begin = rest.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) {
    rest = {};
    return {};
  }
  const size_t end = std::min(rest.find_first_of(kSpace, begin), rest.size());
  const std::string_view word = rest.substr(begin, end - begin);
  rest.remove_prefix(end);
  return word;
}

Status parse_hash(std::string_view word, KeyHash& out) {
  const std::string rule = "must begin with sha256: and 64 hex digits";
  if (!word.starts_with(kHashPrefix)) return invalid_argument(rule);
  word.remove_prefix(kHashPrefix.size());
  if (word.size() != 2 * out.size()) return invalid_argument(rule);
  for (size_t i = 0; i < out.size(); ++i) {
    const int high = hex_value(word[2 * i]), low = hex_value(word[2 * i + 1]);
    if (high < 0 || low < 0) return invalid_argument(rule);
    out[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return OkStatus();
}

Status parse_count(std::string_view key, std::string_view value, uint64_t& out) {
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out);
  if (error != std::errc() || end != value.data() + value.size() || out < 1 || out > kMaxPerMinute)
    return invalid_argument(std::string(key) + " must be a whole number from 1 to " +
                            std::to_string(kMaxPerMinute));
  return OkStatus();
}

StatusOr<KeyLine> parse_line(std::string_view rest) {
  KeyLine line;
  RETURN_IF_ERROR(parse_hash(next_word(rest), line.hash));
  std::set<std::string_view> seen;
  for (std::string_view word = next_word(rest); !word.empty(); word = next_word(rest)) {
    const size_t equals = word.find('=');
    const std::string_view key = word.substr(0, equals);
    const bool has_value = equals != std::string_view::npos;
    const std::string_view value = has_value ? word.substr(equals + 1) : std::string_view();
    if (!seen.insert(key).second) return invalid_argument("has " + std::string(key.substr(0, 64)) + " twice");
    if (key == "name" && has_value) {
      line.name = value;
    } else if (key == "requests_per_minute" && has_value) {
      RETURN_IF_ERROR(parse_count(key, value, line.grant.requests_per_minute));
    } else if (key == "tokens_per_minute" && has_value) {
      RETURN_IF_ERROR(parse_count(key, value, line.grant.tokens_per_minute));
    } else if (word == "trusted") {
      line.grant.trusted = true;
    } else {
      return invalid_argument("has \"" + std::string(word.substr(0, 64)) +
                              "\"; there are name=, requests_per_minute=, tokens_per_minute= and trusted");
    }
  }
  RETURN_IF_ERROR(check_name(line.name));
  return line;
}

}  // namespace

StatusOr<std::string> make_key() {
  uint8_t bytes[24];
  if (RAND_bytes(bytes, sizeof bytes) != 1) return internal_error("the system gave no random bytes");
  return "ck-" + hex(bytes, sizeof bytes);
}

KeyHash hash_key(std::string_view key) {
  KeyHash out{};
  unsigned size = 0;
  const int done = EVP_Digest(key.data(), key.size(), out.data(), &size, EVP_sha256(), nullptr);
  CONCLAVE_CHECK(done == 1 && size == out.size());
  return out;
}

bool same_hash(const KeyHash& a, const KeyHash& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Status check_name(std::string_view name) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-' || c == '@';
  };
  if (name.empty() || name.size() > kMaxNameBytes || !std::all_of(name.begin(), name.end(), fits))
    return invalid_argument("needs a name of 1 to 64 letters, digits and ._-@ (name=alice)");
  return OkStatus();
}

std::string format_key_line(const KeyLine& line) {
  std::string out = std::string(kHashPrefix) + hex(line.hash.data(), line.hash.size()) + " name=" + line.name;
  if (line.grant.requests_per_minute > 0)
    out += " requests_per_minute=" + std::to_string(line.grant.requests_per_minute);
  if (line.grant.tokens_per_minute > 0)
    out += " tokens_per_minute=" + std::to_string(line.grant.tokens_per_minute);
  if (line.grant.trusted) out += " trusted";
  return out;
}

StatusOr<std::vector<KeyLine>> parse_key_file(std::string_view text, size_t max_keys) {
  std::vector<KeyLine> lines;
  std::map<std::string, KeyGrant> grants;
  std::set<KeyHash> hashes;
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string_view::npos || line[first] == '#') continue;
    const std::string where = "line " + std::to_string(number);
    auto parsed = parse_line(line);
    if (!parsed.ok()) return invalid_argument(where + " " + message_of(parsed.status()));
    if (!hashes.insert(parsed->hash).second) return invalid_argument(where + " repeats a key");
    const auto [at, fresh] = grants.emplace(parsed->name, parsed->grant);
    if (!fresh && at->second != parsed->grant)
      return invalid_argument(where + " gives \"" + parsed->name +
                              "\" other limits than an earlier line does; one tenant has one allowance");
    if (lines.size() >= max_keys)
      return resource_exhausted(where + ": there are more than " + std::to_string(max_keys) + " keys");
    lines.push_back(*std::move(parsed));
  }
  return lines;
}

}  // namespace conclave::door
