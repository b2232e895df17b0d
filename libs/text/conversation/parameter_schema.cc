#include "libs/text/conversation/parameter_schema.h"

#include <algorithm>
#include <boost/json.hpp>
#include <optional>
#include <vector>

#include "libs/text/conversation/schema_walk.h"

namespace conclave::text {
namespace {

namespace json = boost::json;

bool iequals(std::string_view text, std::string_view lower) {
  return text.size() == lower.size() &&
         std::equal(text.begin(), text.end(), lower.begin(), [](char a, char b) {
           return (a >= 'A' && a <= 'Z' ? static_cast<char>(a - 'A' + 'a') : a) == b;
         });
}

// Brings values to a schema. One walk for the whole value, so that its budget covers everything.
class Coercion {
 public:
  explicit Coercion(const json::value* root) : walk_(root) {}

  // The kind that the text of a value stands for, strings apart; nullopt when it is none of `kinds`.
  std::optional<std::string> from_text(std::string_view text, const json::value* node, uint32_t kinds,
                                       int nesting) {
    // Where a string would do as well, only what is clearly something else is taken for it.
    const bool strict = (kinds & kString) != 0;
    const std::string_view bare = trim_json_space(text);
    if ((kinds & kNull) != 0 && iequals(bare, "null")) return "null";
    if ((kinds & kNumber) != 0) {
      const auto number = read_number(bare);
      if (number.has_value() && (number->json_form || !strict)) {
        if ((kinds & kInteger) != 0 && is_integral(*number) &&
            ((kinds & kFraction) == 0 || number->fraction.empty())) {
          return number_json(*number, true);
        }
        if ((kinds & kFraction) != 0)
          return number->json_form ? std::string(bare) : number_json(*number, false);
      }
    }
    if ((kinds & kBoolean) != 0) {
      const bool loose = !strict && (kinds & kNumber) == 0;
      if (iequals(bare, "true") || (loose && (bare == "1" || iequals(bare, "yes") || iequals(bare, "on"))))
        return "true";
      if (iequals(bare, "false") || (loose && (bare == "0" || iequals(bare, "no") || iequals(bare, "off"))))
        return "false";
    }
    if ((kinds & (kObject | kArray)) != 0 && !bare.empty() && (bare[0] == '{' || bare[0] == '[')) {
      const auto value = read_json(bare);
      if (value.has_value() && (kinds & kinds_of_value(*value)) != 0) return value_of(*value, node, nesting);
    }
    return std::nullopt;
  }

  std::string text(std::string_view text, const json::value* node) {
    const uint32_t kinds = walk_.kinds(node);
    if (kinds == kAny || kinds == kString || ((kinds & kString) != 0 && walk_.names_string(node, text))) {
      return json_quoted(text);
    }
    auto out = from_text(text, node, kinds, 0);
    return out.has_value() ? *std::move(out) : json_quoted(text);
  }

  std::string value_of(const JsonSlice& value, const json::value* node, int nesting) {
    if (nesting < kMaxSchemaNesting && walk_.spend(value.text.size())) {
      const json::value* at = node;
      if (const json::array* branches = walk_.alternatives(at)) {
        if (const json::value* branch = chosen(value, *branches, nesting))
          return value_of(value, branch, nesting + 1);
      }
    }
    const uint32_t kinds = walk_.kinds(node);
    switch (value.kind) {
      case JsonKind::kString: {
        if (kinds == kAny || (kinds & kString) != 0) return std::string(value.text);
        auto out = from_text(json_string(value), node, kinds, nesting + 1);
        return out.has_value() ? *std::move(out) : std::string(value.text);
      }
      case JsonKind::kNumber: {
        if ((kinds & kNumber) == kInteger) {
          const auto number = read_number(value.text);
          if (number.has_value() && is_integral(*number)) return number_json(*number, true);
        }
        return kinds == kString ? json_quoted(value.text) : std::string(value.text);
      }
      case JsonKind::kBoolean:
        return kinds == kString ? json_quoted(value.text) : std::string(value.text);
      case JsonKind::kNull:
        return std::string(value.text);
      case JsonKind::kObject: {
        if (kinds == kString) return json_quoted(value.text);
        std::string out = "{";
        for (const JsonMember& m : json_members(value)) {
          if (out.size() > 1) out += ", ";
          out.append(m.name).append(": ").append(value_of(m.value, walk_.member(node, m.key), nesting + 1));
        }
        return out + "}";
      }
      case JsonKind::kArray: {
        if (kinds == kString) return json_quoted(value.text);
        std::string out = "[";
        const std::vector<JsonSlice> elements = json_elements(value);
        for (size_t i = 0; i < elements.size(); ++i) {
          if (i > 0) out += ", ";
          out += value_of(elements[i], walk_.element(node, i), nesting + 1);
        }
        return out + "]";
      }
    }
    return std::string(value.text);
  }

 private:
  // The alternative that the value fits as it is, or else the first that it can be brought to.
  const json::value* chosen(const JsonSlice& value, const json::array& branches, int nesting) {
    for (const json::value& branch : branches) {
      if (walk_.fits(value, &branch)) return &branch;
    }
    for (const json::value& branch : branches) {
      const std::string brought = value_of(value, &branch, nesting + 1);
      const auto slice = read_json(brought, 2 * kMaxJsonDepth);
      if (slice.has_value() && walk_.fits(*slice, &branch)) return &branch;
    }
    return nullptr;
  }

  SchemaWalk walk_;
};

}  // namespace

ParameterSchema::TextForm ParameterSchema::text_form() const {
  const uint32_t kinds = SchemaWalk(root_).kinds(node_);
  if (kinds == kAny || kinds == kString) return TextForm::kString;
  return kinds == (kString | kNull) ? TextForm::kStringOrNull : TextForm::kWhole;
}

std::string ParameterSchema::coerce_text(std::string_view text) const {
  return Coercion(root_).text(text, node_);
}

std::string ParameterSchema::coerce_json(const JsonSlice& value) const {
  return Coercion(root_).value_of(value, node_, 0);
}

ParameterSchema ParameterSchema::member(std::string_view name) const {
  return ParameterSchema(root_, SchemaWalk(root_).member(node_, name));
}

}  // namespace conclave::text
