// JSON read where it lies, as slices of its text: numbers keep their digits and strings their escapes, which
// a document tree with doubles would not. For what passes through us: arguments of tool calls, histories.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/json_escape.h"

namespace conclave::text {

enum class JsonKind : uint8_t { kNull, kBoolean, kNumber, kString, kArray, kObject };

inline constexpr int kMaxJsonDepth = 64;

// A well-formed value; `text` has no white space around it. It lives as long as what it was read from.
struct JsonSlice {
  JsonKind kind = JsonKind::kNull;
  std::string_view text;
};
struct JsonMember {
  std::string key;        // decoded
  std::string_view name;  // as written, quotes included
  JsonSlice value;
};

// The one value that `text` holds, with nothing but white space around it; nullopt when that is not so, or it
// is nested deeper than `max_depth`. Strict as RFC 8259, except that bytes above 0x7f are not checked.
std::optional<JsonSlice> read_json(std::string_view text, int max_depth = kMaxJsonDepth);
// Members of an object in their order, repeated names included; elements of an array. Empty for other kinds.
std::vector<JsonMember> json_members(const JsonSlice& object);
std::vector<JsonSlice> json_elements(const JsonSlice& array);
// What a string slice says; a lone surrogate becomes U+FFFD.
std::string json_string(const JsonSlice& string);

bool is_json_space(char c);
std::string_view trim_json_space(std::string_view text);
// "a string", for messages.
std::string_view json_kind_name(JsonKind kind);

}  // namespace conclave::text
