// Normalization form C as the reference tokenizer applies it.
#pragma once

#include <string>
#include <string_view>

namespace conclave::text {

// When the valid UTF-8 `text` is not in NFC, writes its NFC to `out` and returns true; otherwise returns
// false and leaves `out` alone. Characters assigned after Unicode 9 are left as they are, as the reference's
// tables do; for all others NFC is the same in every version. Thread-safe.
bool to_nfc(std::string_view text, std::string& out);

}  // namespace conclave::text
