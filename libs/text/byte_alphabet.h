// The byte-level alphabet of GPT-2 style vocabularies: each of the 256 bytes has a printable character, so
// that any byte string can be a JSON key.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::text {

// The bytes that `token` (UTF-8 of alphabet characters) stands for; nullopt when a character is not of the
// alphabet.
std::optional<std::string> bytes_of_alphabet(std::string_view token);
// The alphabet's characters for `bytes`, as UTF-8.
std::string alphabet_of_bytes(std::string_view bytes);

}  // namespace conclave::text
