#include "libs/text/utf8.h"

namespace conclave::text {
namespace {

// The bytes that may follow: Unicode Standard, table 3-7. Length of the character that `lead` starts; 0 when
// none.
size_t sequence_length(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return 2;
  if (lead >= 0xe0 && lead <= 0xef) return 3;
  if (lead >= 0xf0 && lead <= 0xf4) return 4;
  return 0;
}

bool is_continuation(uint8_t lead, size_t index, uint8_t byte) {
  if (index == 1) {
    if (lead == 0xe0) return byte >= 0xa0 && byte <= 0xbf;
    if (lead == 0xed) return byte >= 0x80 && byte <= 0x9f;
    if (lead == 0xf0) return byte >= 0x90 && byte <= 0xbf;
    if (lead == 0xf4) return byte >= 0x80 && byte <= 0x8f;
  }
  return (byte & 0xc0) == 0x80;
}

// Length of the well-formed character at `at`, or 0.
size_t well_formed_at(std::string_view text, size_t at) {
  const auto lead = static_cast<uint8_t>(text[at]);
  const size_t length = sequence_length(lead);
  if (length == 0 || at + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (!is_continuation(lead, i, static_cast<uint8_t>(text[at + i]))) return 0;
  }
  return length;
}

}  // namespace

bool is_valid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    if (static_cast<uint8_t>(text[i]) < 0x80) {
      ++i;
      continue;
    }
    const size_t length = well_formed_at(text, i);
    if (length == 0) return false;
    i += length;
  }
  return true;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  Utf8Stream stream;
  stream.push(text, out);
  stream.flush(out);
  return out;
}

void append_utf8(std::string& out, uint32_t code) {
  const auto put = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0 | (code >> 6));
    put(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    put(0xe0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3f));
    put(0x80 | (code & 0x3f));
  } else {
    put(0xf0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3f));
    put(0x80 | ((code >> 6) & 0x3f));
    put(0x80 | (code & 0x3f));
  }
}

void Utf8Stream::push(std::string_view bytes, std::string& out) {
  for (char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    if (held_ > 0) {
      if (is_continuation(pending_[0], held_, byte)) {
        pending_[held_++] = byte;
        if (held_ == need_) {
          out.append(reinterpret_cast<const char*>(pending_), held_);
          held_ = 0;
        }
        continue;
      }
      // What was held can never become a character; the byte at hand starts afresh.
      out.append(kReplacement);
      held_ = 0;
    }
    need_ = sequence_length(byte);
    if (need_ == 1) {
      out.push_back(c);
    } else if (need_ == 0) {
      out.append(kReplacement);
    } else {
      pending_[held_++] = byte;
    }
  }
}

void Utf8Stream::flush(std::string& out) {
  if (held_ > 0) out.append(kReplacement);
  held_ = 0;
}

}  // namespace conclave::text
