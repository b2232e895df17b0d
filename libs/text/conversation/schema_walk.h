// Questions about the types that a JSON schema gives to a value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "libs/text/conversation/json_text.h"
#include "libs/text/conversation/parameter_schema.h"

namespace conclave::text {

// Sets of kinds of values.
enum SchemaKinds : uint32_t {
  kNull = 1,
  kBoolean = 2,
  kInteger = 4,
  kFraction = 8,
  kObject = 16,
  kArray = 32,
  kString = 64,
  kNumber = kInteger | kFraction,
  kAny = 127,
};

inline constexpr int kMaxSchemaNesting = 64;  // of schema parts within each other

// A number as people write it, cut into its parts.
struct NumberText {
  bool negative = false;
  std::string_view whole, fraction, exponent;  // digits; exponent with its sign
  bool json_form = false;                      // written as JSON writes it
};
std::optional<NumberText> read_number(std::string_view text);
bool is_integral(const NumberText& number);
// JSON's form of a number; `integer`: without the fraction, which is zero.
std::string number_json(const NumberText& number, bool integer);

// The kind of a value: one bit, an integral number being an integer.
uint32_t kinds_of_value(const JsonSlice& value);

// Questions about one value, within one budget of work. `node` may be null: a schema that says nothing.
class SchemaWalk {
 public:
  using Node = const boost::json::value*;
  explicit SchemaWalk(Node root) : root_(root) {}

  // What a value may be; kAny when nothing is said.
  uint32_t kinds(Node node, int nesting = 0);
  // Whether `text` is one of the strings that enum and const spell out.
  bool names_string(Node node, std::string_view text, int nesting = 0);
  // The schema of a member or an element; null when nothing is said about it.
  Node member(Node node, std::string_view name, int nesting = 0);
  Node element(Node node, size_t index, int nesting = 0);
  // The list of anyOf or oneOf, the chain of references followed (`node` is then its end); null when there is
  // none.
  const boost::json::array* alternatives(Node& node);
  // Whether a value is what the schema describes, as far as types, enum, const and required members go.
  bool fits(const JsonSlice& value, Node node, int nesting = 0);
  // Counts bytes of values looked at; false when that was enough. Choosing between alternatives, nested,
  // costs the most; a value past the budget is passed on without.
  bool spend(size_t bytes) {
    bytes_ += bytes;
    return bytes_ <= ParameterSchema::kMaxBytes;
  }

 private:
  bool step(Node node, int nesting);
  Node reference(Node node) const;
  template <typename Function>
  bool any_part(Node node, const Function& function);
  bool fits_members(const JsonSlice& value, Node node, int nesting);
  bool fits_elements(const JsonSlice& value, Node node, int nesting);

  Node root_;
  int steps_ = 0;
  size_t bytes_ = 0;
};

}  // namespace conclave::text
