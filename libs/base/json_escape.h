// Text as JSON strings: the one place that escapes.
#pragma once

#include <string>
#include <string_view>

namespace conclave {

// Appends `text` as the inside of a JSON string. Any cut of the text gives the same bytes. Bytes above 0x7f
// stay as they are: that they are UTF-8 is the caller's business.
void append_json_escaped(std::string& out, std::string_view text);
// The whole string, with its quotes.
std::string json_quoted(std::string_view text);

}  // namespace conclave
