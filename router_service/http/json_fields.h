// Typed access to a JSON object's fields. Every refusal is INVALID_ARGUMENT and names the field by its path.
// A field that is null counts as absent, as public clients send it so.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"

namespace conclave::router {

// One JSON object and nothing else, with bounded nesting; the field of a refusal is "body".
StatusOr<boost::json::object> parse_json_object(std::string_view body);

class JsonFields {
 public:
  // `object` outlives this. `path` prefixes names in refusals: "messages[2]".
  explicit JsonFields(const boost::json::object& object, std::string path = "")
      : object_(object), path_(std::move(path)) {}

  const boost::json::value* find(std::string_view name) const;
  std::string path(std::string_view name) const;

  StatusOr<std::optional<std::string>> text(std::string_view name) const;
  StatusOr<std::optional<bool>> boolean(std::string_view name) const;
  StatusOr<std::optional<double>> number(std::string_view name) const;
  // Whole numbers of 64 bits; 5.0 is not one.
  StatusOr<std::optional<int64_t>> integer(std::string_view name) const;
  // A string or a list of strings.
  StatusOr<std::vector<std::string>> texts(std::string_view name) const;
  StatusOr<std::vector<int64_t>> integers(std::string_view name) const;
  StatusOr<const boost::json::object*> object(std::string_view name) const;  // null when absent

 private:
  const boost::json::object& object_;
  const std::string path_;
};

// "a number", "a list" ...: for messages.
std::string_view json_kind(const boost::json::value& value);
std::string to_std(const boost::json::string& text);

}  // namespace conclave::router
