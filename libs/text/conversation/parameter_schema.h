// What a JSON schema says about a value, and values brought to it. The declared type wins: a declared string
// keeps its text to the byte, and what does not fit stays a string. Schemas are taken as hints: keywords that
// don't bear on types (format, pattern, minimum ...) are not looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <boost/json/fwd.hpp>

#include "libs/text/conversation/json_text.h"

namespace conclave::text {

// A view of a part of a schema; the document must outlive it. A default-constructed one allows anything.
class ParameterSchema {
 public:
  ParameterSchema() = default;
  ParameterSchema(const boost::json::value* root, const boost::json::value* node)
      : root_(root), node_(node) {}

  enum class TextForm {
    kString,        // always a string: its pieces may be passed on as they come
    kStringOrNull,  // a string, unless all of it is "null"
    kWhole,         // to be seen whole
  };
  TextForm text_form() const;

  // The JSON text of a value that was written as plain text. Kinds are tried in the order null, integer,
  // number, boolean, object, array, string; a text that is one of the schema's own strings (enum, const) is
  // that string. Without a declared type everything is a string.
  std::string coerce_text(std::string_view text) const;
  // The JSON text of a value that was written as JSON. What does not fit stays as it is.
  std::string coerce_json(const JsonSlice& value) const;

  // The schema of an object's member.
  ParameterSchema member(std::string_view name) const;

  // Work that one value may cost, in visited parts of the schema: references may run in circles.
  static constexpr int kMaxSteps = 100000;
  // The same in bytes of the value, each look counted.
  static constexpr size_t kMaxBytes = 32u << 20;

 private:
  const boost::json::value* root_ = nullptr;
  const boost::json::value* node_ = nullptr;
};

}  // namespace conclave::text
