// Tokenizer files are written for regular-expression engines that know Unicode 16; Debian 12's PCRE2
// knows 14. For the character classes of a split pattern only a character's general category matters, so
// characters assigned since are stood in for by older ones of the same category and the same UTF-8 length
// while matching.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace conclave::text {

// When the valid UTF-8 `text` holds such characters, writes a copy of equal length with stand-ins to `shadow`
// and returns true; otherwise returns false and leaves `shadow` alone.
bool replace_unicode_additions(std::string_view text, std::string& shadow);

}  // namespace conclave::text
