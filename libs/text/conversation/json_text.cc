#include "libs/text/conversation/json_text.h"

#include "libs/text/utf8.h"

namespace conclave::text {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

int hex_digit(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Reads values; `at` stands behind what was read. False: not JSON, and `at` is of no more use.
struct Reader {
  std::string_view text;
  size_t at = 0;

  bool more() const { return at < text.size(); }
  void spaces() {
    while (more() && is_json_space(text[at])) ++at;
  }
  bool word(std::string_view w) {
    if (text.substr(at, w.size()) != w) return false;
    at += w.size();
    return true;
  }
  bool string() {
    for (++at; more(); ++at) {
      const auto c = static_cast<unsigned char>(text[at]);
      if (c == '"') return ++at, true;
      if (c < 0x20) return false;
      if (c != '\\') continue;
      if (++at >= text.size()) return false;
      if (text[at] == 'u') {
        for (int k = 0; k < 4; ++k) {
          if (++at >= text.size() || hex_digit(text[at]) < 0) return false;
        }
      } else if (std::string_view("\"\\/bfnrt").find(text[at]) == std::string_view::npos) {
        return false;
      }
    }
    return false;
  }
  bool digits() {
    const size_t start = at;
    while (more() && is_digit(text[at])) ++at;
    return at > start;
  }
  bool number() {
    if (text[at] == '-') ++at;
    if (more() && text[at] == '0') {
      ++at;
    } else if (!digits()) {
      return false;
    }
    if (more() && text[at] == '.') {
      ++at;
      if (!digits()) return false;
    }
    if (more() && (text[at] == 'e' || text[at] == 'E')) {
      ++at;
      if (more() && (text[at] == '+' || text[at] == '-')) ++at;
      if (!digits()) return false;
    }
    return true;
  }
  bool object(int depth) {
    ++at;
    spaces();
    if (more() && text[at] == '}') return ++at, true;
    for (;;) {
      spaces();
      if (!more() || text[at] != '"' || !string()) return false;
      spaces();
      if (!more() || text[at] != ':') return false;
      ++at;
      JsonSlice ignored;
      if (!value(depth, ignored)) return false;
      spaces();
      if (!more()) return false;
      if (text[at] == '}') return ++at, true;
      if (text[at++] != ',') return false;
    }
  }
  bool array(int depth) {
    ++at;
    spaces();
    if (more() && text[at] == ']') return ++at, true;
    for (;;) {
      JsonSlice ignored;
      if (!value(depth, ignored)) return false;
      spaces();
      if (!more()) return false;
      if (text[at] == ']') return ++at, true;
      if (text[at++] != ',') return false;
    }
  }
  // `depth`: how many levels may still open.
  bool value(int depth, JsonSlice& out) {
    spaces();
    if (!more()) return false;
    const size_t start = at;
    bool good = false;
    switch (text[at]) {
      case '{':
        out.kind = JsonKind::kObject;
        good = depth > 0 && object(depth - 1);
        break;
      case '[':
        out.kind = JsonKind::kArray;
        good = depth > 0 && array(depth - 1);
        break;
      case '"':
        out.kind = JsonKind::kString;
        good = string();
        break;
      case 't':
        out.kind = JsonKind::kBoolean;
        good = word("true");
        break;
      case 'f':
        out.kind = JsonKind::kBoolean;
        good = word("false");
        break;
      case 'n':
        out.kind = JsonKind::kNull;
        good = word("null");
        break;
      default:
        out.kind = JsonKind::kNumber;
        good = number();
    }
    if (good) out.text = text.substr(start, at - start);
    return good;
  }
};

uint32_t four_hex(std::string_view text, size_t at) {
  uint32_t code = 0;
  for (size_t k = 0; k < 4; ++k) code = code * 16 + static_cast<uint32_t>(hex_digit(text[at + k]));
  return code;
}

}  // namespace

bool is_json_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

std::string_view trim_json_space(std::string_view text) {
  while (!text.empty() && is_json_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_json_space(text.back())) text.remove_suffix(1);
  return text;
}

std::string_view json_kind_name(JsonKind kind) {
  switch (kind) {
    case JsonKind::kNull:
      return "null";
    case JsonKind::kBoolean:
      return "a boolean";
    case JsonKind::kNumber:
      return "a number";
    case JsonKind::kString:
      return "a string";
    case JsonKind::kArray:
      return "an array";
    case JsonKind::kObject:
      return "an object";
  }
  return "unknown";
}

std::optional<JsonSlice> read_json(std::string_view text, int max_depth) {
  Reader reader{text};
  JsonSlice out;
  if (!reader.value(max_depth, out)) return std::nullopt;
  reader.spaces();
  if (reader.more()) return std::nullopt;
  return out;
}

// The slices were checked when they were read, so what follows only walks.
std::vector<JsonMember> json_members(const JsonSlice& object) {
  std::vector<JsonMember> out;
  if (object.kind != JsonKind::kObject) return out;
  Reader reader{object.text, 1};
  for (;;) {
    reader.spaces();
    if (reader.text[reader.at] == '}') return out;
    if (reader.text[reader.at] == ',') {
      ++reader.at;
      continue;
    }
    JsonMember member;
    const size_t start = reader.at;
    reader.string();
    member.name = object.text.substr(start, reader.at - start);
    member.key = json_string({JsonKind::kString, member.name});
    reader.spaces();
    ++reader.at;  // the colon
    reader.value(kMaxJsonDepth, member.value);
    out.push_back(std::move(member));
  }
}

std::vector<JsonSlice> json_elements(const JsonSlice& array) {
  std::vector<JsonSlice> out;
  if (array.kind != JsonKind::kArray) return out;
  Reader reader{array.text, 1};
  for (;;) {
    reader.spaces();
    if (reader.text[reader.at] == ']') return out;
    if (reader.text[reader.at] == ',') {
      ++reader.at;
      continue;
    }
    JsonSlice element;
    reader.value(kMaxJsonDepth, element);
    out.push_back(element);
  }
}

std::string json_string(const JsonSlice& string) {
  std::string out;
  const std::string_view text = string.text.substr(1, string.text.size() - 2);
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] != '\\') {
      out.push_back(text[at]);
      continue;
    }
    switch (text[++at]) {
      case 'b':
        out.push_back('\b');
        break;
      case 'f':
        out.push_back('\f');
        break;
      case 'n':
        out.push_back('\n');
        break;
      case 'r':
        out.push_back('\r');
        break;
      case 't':
        out.push_back('\t');
        break;
      case 'u': {
        uint32_t code = four_hex(text, at + 1);
        at += 4;
        if (code >= 0xd800 && code < 0xe000) {
          const bool low_follows = code < 0xdc00 && text.substr(at + 1, 2) == "\\u" && at + 6 < text.size();
          const uint32_t low = low_follows ? four_hex(text, at + 3) : 0;
          if (low >= 0xdc00 && low < 0xe000) {
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
            at += 6;
          } else {
            code = 0xfffd;
          }
        }
        append_utf8(out, code);
        break;
      }
      default:
        out.push_back(text[at]);
    }
  }
  return out;
}

}  // namespace conclave::text
