#include "libs/text/byte_alphabet.h"

#include <array>

#include "libs/text/utf8.h"

namespace conclave::text {
namespace {

// Printable Latin-1 stands for itself; the other 68 bytes, in order, for U+0100 onwards.
bool stands_for_itself(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
}

struct Tables {
  std::array<uint16_t, 256> code_of_byte{};
  std::array<int16_t, 512> byte_of_code{};
  Tables() {
    byte_of_code.fill(-1);
    uint16_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const uint16_t code = stands_for_itself(b) ? static_cast<uint16_t>(b) : next++;
      code_of_byte[static_cast<size_t>(b)] = code;
      byte_of_code[code] = static_cast<int16_t>(b);
    }
  }
};

const Tables& tables() {
  static const Tables instance;
  return instance;
}

}  // namespace

std::optional<std::string> bytes_of_alphabet(std::string_view token) {
  const Tables& t = tables();
  std::string out;
  out.reserve(token.size());
  for (size_t i = 0; i < token.size(); i += utf8_length(token[i])) {
    const uint32_t code = decode_utf8(token, i);
    if (code >= t.byte_of_code.size() || t.byte_of_code[code] < 0) return std::nullopt;
    out.push_back(static_cast<char>(t.byte_of_code[code]));
  }
  return out;
}

std::string alphabet_of_bytes(std::string_view bytes) {
  std::string out;
  for (char b : bytes) append_utf8(out, tables().code_of_byte[static_cast<uint8_t>(b)]);
  return out;
}

}  // namespace conclave::text
