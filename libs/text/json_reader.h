// Typed access to a parsed JSON document with errors that name the path. Includes Boost.JSON: for .cc files
// only.
#pragma once

#include <boost/json.hpp>
#include <initializer_list>
#include <string>
#include <string_view>

#include "libs/base/status.h"

namespace conclave::text {

inline std::string_view view(const boost::json::string& s) { return {s.data(), s.size()}; }
inline std::string_view view(boost::json::string_view s) { return {s.data(), s.size()}; }
inline boost::json::string_view boost_view(std::string_view s) { return {s.data(), s.size()}; }

// An object of the document and its path. Missing and null members are alike.
class JsonObject {
 public:
  static StatusOr<JsonObject> of(const boost::json::value& value, std::string path);
  const std::string& path() const { return path_; }
  std::string path_of(std::string_view key) const;
  // Null when absent or null.
  const boost::json::value* find(std::string_view key) const;
  StatusOr<const boost::json::value*> required(std::string_view key) const;
  StatusOr<bool> boolean(std::string_view key, bool fallback) const;
  // The required string at `key`.
  StatusOr<std::string_view> string(std::string_view key) const;
  // "" when absent.
  StatusOr<std::string_view> optional_string(std::string_view key) const;
  // INVALID_ARGUMENT for the first member not in `known`.
  Status only(std::initializer_list<std::string_view> known) const;

 private:
  const boost::json::object* object_ = nullptr;
  std::string path_;
};

// Parses `json` whole; at most `max_depth` deep. Errors say where.
StatusOr<boost::json::value> parse_json(std::string_view json, size_t max_depth,
                                        boost::json::storage_ptr storage);

// "kind of value", for messages.
std::string_view kind_name(const boost::json::value& value);

}  // namespace conclave::text
