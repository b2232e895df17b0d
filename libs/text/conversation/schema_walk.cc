#include "libs/text/conversation/schema_walk.h"

#include <algorithm>
#include <charconv>

#include "libs/text/json_reader.h"

namespace conclave::text {
namespace {

namespace json = boost::json;

const json::value* find(const json::value* node, std::string_view key) {
  return node != nullptr && node->is_object() ? node->get_object().if_contains(boost_view(key)) : nullptr;
}
const json::array* find_list(const json::value* node, std::string_view key) {
  const json::value* value = find(node, key);
  return value != nullptr && value->is_array() ? &value->get_array() : nullptr;
}

// Names of types, those that people write by habit included; kAny for others, which then say nothing.
uint32_t kinds_of_name(std::string_view name) {
  struct Entry {
    std::string_view name;
    uint32_t kinds;
  };
  constexpr Entry entries[] = {{"string", kString},   {"integer", kInteger}, {"number", kNumber},
                               {"boolean", kBoolean}, {"object", kObject},   {"array", kArray},
                               {"null", kNull},       {"str", kString},      {"text", kString},
                               {"int", kInteger},     {"float", kNumber},    {"double", kNumber},
                               {"bool", kBoolean},    {"dict", kObject},     {"list", kArray}};
  for (const Entry& entry : entries) {
    if (entry.name == name) return entry.kinds;
  }
  return kAny;
}

uint32_t kind_of(const json::value& value) {
  switch (value.kind()) {
    case json::kind::null:
      return kNull;
    case json::kind::bool_:
      return kBoolean;
    case json::kind::int64:
    case json::kind::uint64:
      return kInteger;
    case json::kind::double_: {
      const double d = value.get_double();
      return d == static_cast<double>(static_cast<int64_t>(std::clamp(d, -9e18, 9e18))) ? kInteger
                                                                                        : kFraction;
    }
    case json::kind::string:
      return kString;
    case json::kind::array:
      return kArray;
    case json::kind::object:
      return kObject;
  }
  return kAny;
}

bool all_digits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

uint32_t kinds_of_type(const json::value& type) {
  if (type.is_string()) return kinds_of_name(view(type.get_string()));
  uint32_t out = 0;
  if (type.is_array()) {
    for (const json::value& name : type.get_array()) {
      if (name.is_string()) out |= kinds_of_name(view(name.get_string()));
    }
  }
  return out == 0 ? uint32_t{kAny} : out;
}

// Contradictory schemas exist; what they say last is then ignored.
uint32_t narrowed(uint32_t kinds, uint32_t by) { return (kinds & by) != 0 ? kinds & by : kinds; }

bool same_value(const JsonSlice& value, const json::value& want) {
  if (value.kind == JsonKind::kString)
    return want.is_string() && view(want.get_string()) == json_string(value);
  boost::system::error_code error;
  const json::value got = json::parse(boost_view(value.text), error);
  if (error) return false;
  if (got.is_number() && want.is_number()) return got.to_number<double>() == want.to_number<double>();
  return got == want;
}

bool fits_choices(const JsonSlice& value, const json::value* node) {
  if (const json::value* constant = find(node, "const"); constant != nullptr && !same_value(value, *constant))
    return false;
  const json::array* choices = find_list(node, "enum");
  return choices == nullptr || std::any_of(choices->begin(), choices->end(), [&](const json::value& choice) {
           return same_value(value, choice);
         });
}

}  // namespace

std::optional<NumberText> read_number(std::string_view text) {
  NumberText out;
  const auto value = read_json(text);
  out.json_form = value.has_value() && value->kind == JsonKind::kNumber && value->text == text;
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) {
    out.negative = text[0] == '-';
    text.remove_prefix(1);
  }
  if (const size_t e = text.find_first_of("eE"); e != std::string_view::npos) {
    out.exponent = text.substr(e + 1);
    text = text.substr(0, e);
    std::string_view digits = out.exponent;
    if (!digits.empty() && (digits[0] == '-' || digits[0] == '+')) digits.remove_prefix(1);
    if (!all_digits(digits)) return std::nullopt;
  }
  const size_t dot = text.find('.');
  out.whole = text.substr(0, dot);
  if (dot != std::string_view::npos) out.fraction = text.substr(dot + 1);
  if (out.whole.empty() && out.fraction.empty()) return std::nullopt;
  if (!out.whole.empty() && !all_digits(out.whole)) return std::nullopt;
  if (!out.fraction.empty() && !all_digits(out.fraction)) return std::nullopt;
  return out;
}

bool is_integral(const NumberText& n) {
  return n.exponent.empty() && n.fraction.find_first_not_of('0') == std::string_view::npos;
}

// JSON's form of a number; `integer`: without the fraction, which is zero.
std::string number_json(const NumberText& n, bool integer) {
  std::string out = n.negative ? "-" : "";
  const size_t first = n.whole.find_first_not_of('0');
  out += first == std::string_view::npos ? "0" : n.whole.substr(first);
  if (!integer && !n.fraction.empty()) out.append(".").append(n.fraction);
  if (!n.exponent.empty()) out.append("e").append(n.exponent);
  return out;
}

uint32_t kinds_of_value(const JsonSlice& value) {
  switch (value.kind) {
    case JsonKind::kNull:
      return kNull;
    case JsonKind::kBoolean:
      return kBoolean;
    case JsonKind::kNumber: {
      const auto number = read_number(value.text);
      return number.has_value() && is_integral(*number) ? kInteger : kFraction;
    }
    case JsonKind::kString:
      return kString;
    case JsonKind::kArray:
      return kArray;
    case JsonKind::kObject:
      return kObject;
  }
  return kAny;
}

bool SchemaWalk::step(Node node, int nesting) {
  return node != nullptr && node->is_object() && nesting < kMaxSchemaNesting &&
         ++steps_ <= ParameterSchema::kMaxSteps;
}

// What "$ref": "#/a/b" points to.
SchemaWalk::Node SchemaWalk::reference(Node node) const {
  Node ref = find(node, "$ref");
  if (ref == nullptr || !ref->is_string() || root_ == nullptr) return nullptr;
  std::string_view path = view(ref->get_string());
  if (!path.starts_with('#')) return nullptr;
  path.remove_prefix(1);
  Node at = root_;
  while (!path.empty() && at != nullptr) {
    if (path[0] != '/') return nullptr;
    path.remove_prefix(1);
    const size_t end = std::min(path.find('/'), path.size());
    std::string token;
    for (size_t i = 0; i < end; ++i) {
      if (path[i] == '~' && i + 1 < end && (path[i + 1] == '0' || path[i + 1] == '1')) {
        token.push_back(path[++i] == '0' ? '~' : '/');
      } else {
        token.push_back(path[i]);
      }
    }
    path.remove_prefix(end);
    if (at->is_array()) {
      size_t index = 0;
      const auto [last, error] = std::from_chars(token.data(), token.data() + token.size(), index);
      const bool good = error == std::errc() && last == token.data() + token.size();
      at = good && index < at->get_array().size() ? &at->get_array()[index] : nullptr;
    } else {
      at = find(at, token);
    }
  }
  return at == node ? nullptr : at;
}

template <typename Function>
bool SchemaWalk::any_part(Node node, const Function& function) {
  if (Node target = reference(node); target != nullptr && function(*target)) return true;
  for (const char* key : {"allOf", "anyOf", "oneOf"}) {
    if (const json::array* parts = find_list(node, key)) {
      if (std::any_of(parts->begin(), parts->end(), function)) return true;
    }
  }
  return false;
}

uint32_t SchemaWalk::kinds(Node node, int nesting) {
  if (!step(node, nesting)) return kAny;
  uint32_t out = kAny;
  if (Node type = find(node, "type")) {
    out = kinds_of_type(*type);
  } else if (Node constant = find(node, "const")) {
    out = kind_of(*constant);
  } else if (const json::array* choices = find_list(node, "enum")) {
    out = 0;
    for (const json::value& choice : *choices) out |= kind_of(choice);
  } else if (find(node, "properties") != nullptr) {
    out = kObject;
  } else if (find(node, "items") != nullptr || find(node, "prefixItems") != nullptr) {
    out = kArray;
  }
  // OpenAPI's way of allowing null.
  Node nullable = find(node, "nullable");
  if (nullable != nullptr && nullable->is_bool() && nullable->get_bool()) out |= kNull;
  for (const char* key : {"anyOf", "oneOf"}) {
    const json::array* branches = find_list(node, key);
    if (branches == nullptr || branches->empty()) continue;
    uint32_t any = 0;
    for (const json::value& branch : *branches) any |= kinds(&branch, nesting + 1);
    out = narrowed(out, any);
  }
  if (const json::array* all = find_list(node, "allOf")) {
    for (const json::value& branch : *all) out = narrowed(out, kinds(&branch, nesting + 1));
  }
  if (Node target = reference(node)) out = narrowed(out, kinds(target, nesting + 1));
  return out;
}

bool SchemaWalk::names_string(Node node, std::string_view text, int nesting) {
  if (!step(node, nesting)) return false;
  const auto same = [&](const json::value& v) { return v.is_string() && view(v.get_string()) == text; };
  if (Node constant = find(node, "const"); constant != nullptr && same(*constant)) return true;
  if (const json::array* choices = find_list(node, "enum")) {
    if (std::any_of(choices->begin(), choices->end(), same)) return true;
  }
  return any_part(node, [&](const json::value& part) { return names_string(&part, text, nesting + 1); });
}

SchemaWalk::Node SchemaWalk::member(Node node, std::string_view name, int nesting) {
  if (!step(node, nesting)) return nullptr;
  if (Node found = find(find(node, "properties"), name)) return found;
  Node out = nullptr;
  any_part(node,
           [&](const json::value& part) { return (out = member(&part, name, nesting + 1)) != nullptr; });
  if (out != nullptr) return out;
  Node rest = find(node, "additionalProperties");
  return rest != nullptr && rest->is_object() ? rest : nullptr;
}

SchemaWalk::Node SchemaWalk::element(Node node, size_t index, int nesting) {
  if (!step(node, nesting)) return nullptr;
  if (const json::array* prefix = find_list(node, "prefixItems");
      prefix != nullptr && index < prefix->size()) {
    return &(*prefix)[index];
  }
  if (Node items = find(node, "items")) {
    if (items->is_object()) return items;
    if (items->is_array()) return index < items->get_array().size() ? &items->get_array()[index] : nullptr;
  }
  Node out = nullptr;
  any_part(node,
           [&](const json::value& part) { return (out = element(&part, index, nesting + 1)) != nullptr; });
  return out;
}

const json::array* SchemaWalk::alternatives(const json::value*& node) {
  for (int hops = 0; hops < kMaxSchemaNesting && step(node, hops); ++hops) {
    for (const char* key : {"anyOf", "oneOf"}) {
      const json::array* branches = find_list(node, key);
      if (branches != nullptr && !branches->empty()) return branches;
    }
    Node target = reference(node);
    if (target == nullptr) return nullptr;
    node = target;
  }
  return nullptr;
}

bool SchemaWalk::fits(const JsonSlice& value, Node node, int nesting) {
  if (!step(node, nesting) || !spend(value.text.size())) return true;
  if ((kinds_of_value(value) & kinds(node, nesting)) == 0) return false;
  if (!fits_choices(value, node)) return false;
  for (const char* key : {"anyOf", "oneOf"}) {
    const json::array* branches = find_list(node, key);
    if (branches != nullptr && !branches->empty() &&
        std::none_of(branches->begin(), branches->end(),
                     [&](const json::value& branch) { return fits(value, &branch, nesting + 1); })) {
      return false;
    }
  }
  if (const json::array* all = find_list(node, "allOf")) {
    for (const json::value& branch : *all) {
      if (!fits(value, &branch, nesting + 1)) return false;
    }
  }
  if (Node target = reference(node); target != nullptr && !fits(value, target, nesting + 1)) {
    return false;
  }
  return value.kind == JsonKind::kObject  ? fits_members(value, node, nesting)
         : value.kind == JsonKind::kArray ? fits_elements(value, node, nesting)
                                          : true;
}

bool SchemaWalk::fits_members(const JsonSlice& value, Node node, int nesting) {
  const std::vector<JsonMember> members = json_members(value);
  if (const json::array* required = find_list(node, "required")) {
    for (const json::value& name : *required) {
      if (name.is_string() && std::none_of(members.begin(), members.end(), [&](const JsonMember& m) {
            return m.key == view(name.get_string());
          })) {
        return false;
      }
    }
  }
  Node properties = find(node, "properties");
  Node rest = find(node, "additionalProperties");
  for (const JsonMember& m : members) {
    if (Node schema = find(properties, m.key)) {
      if (!fits(m.value, schema, nesting + 1)) return false;
    } else if (rest != nullptr &&
               ((rest->is_bool() && !rest->get_bool()) || !fits(m.value, rest, nesting + 1))) {
      return false;
    }
  }
  return true;
}

bool SchemaWalk::fits_elements(const JsonSlice& value, Node node, int nesting) {
  const std::vector<JsonSlice> elements = json_elements(value);
  for (size_t i = 0; i < elements.size(); ++i) {
    if (!fits(elements[i], element(node, i, nesting + 1), nesting + 1)) return false;
  }
  return true;
}

}  // namespace conclave::text
