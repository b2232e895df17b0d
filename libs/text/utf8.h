// UTF-8: lossy decoding as the WHATWG Encoding Standard defines it (each maximal ill-formed subpart becomes
// one U+FFFD), in one go and incrementally.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace conclave::text {

inline constexpr std::string_view kReplacement = "\xef\xbf\xbd";

// True when `text` is well-formed UTF-8.
bool is_valid_utf8(std::string_view text);
// `text` with every maximal ill-formed subpart replaced by U+FFFD.
std::string replace_invalid_utf8(std::string_view text);

// The code point that starts at `at` in well-formed UTF-8.
inline uint32_t decode_utf8(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<uint8_t>(text[i])); };
  const uint32_t lead = byte(at);
  if (lead < 0x80) return lead;
  if (lead < 0xe0) return ((lead & 0x1f) << 6) | (byte(at + 1) & 0x3f);
  if (lead < 0xf0) return ((lead & 0x0f) << 12) | ((byte(at + 1) & 0x3f) << 6) | (byte(at + 2) & 0x3f);
  return ((lead & 0x07) << 18) | ((byte(at + 1) & 0x3f) << 12) | ((byte(at + 2) & 0x3f) << 6) |
         (byte(at + 3) & 0x3f);
}
// Bytes of the character whose first byte is `lead`, in well-formed UTF-8.
inline size_t utf8_length(char lead) {
  const auto b = static_cast<uint8_t>(lead);
  return b < 0x80 ? 1 : b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4;
}
void append_utf8(std::string& out, uint32_t code);

// Decodes a byte stream that arrives in pieces. The concatenation of all output equals replace_invalid_utf8
// of the concatenated input, for every way to cut it. Holds at most three bytes.
class Utf8Stream {
 public:
  // Appends to `out` what the bytes so far decide.
  void push(std::string_view bytes, std::string& out);
  // Ends the stream: an unfinished character becomes U+FFFD. The object is then as new.
  void flush(std::string& out);
  size_t held() const { return held_; }

 private:
  uint8_t pending_[4] = {};
  size_t held_ = 0;
  size_t need_ = 0;
};

}  // namespace conclave::text
