#include "libs/text/json_reader.h"

#include <algorithm>

namespace conclave::text {

namespace json = boost::json;

std::string_view kind_name(const json::value& value) {
  switch (value.kind()) {
    case json::kind::null:
      return "null";
    case json::kind::bool_:
      return "a boolean";
    case json::kind::int64:
    case json::kind::uint64:
    case json::kind::double_:
      return "a number";
    case json::kind::string:
      return "a string";
    case json::kind::array:
      return "an array";
    case json::kind::object:
      return "an object";
  }
  return "unknown";
}

StatusOr<JsonObject> JsonObject::of(const json::value& value, std::string path) {
  if (!value.is_object()) {
    return invalid_field(path, (path.empty() ? "the document" : path) + " is " +
                                   std::string(kind_name(value)) + ", not an object");
  }
  JsonObject out;
  out.object_ = &value.get_object();
  out.path_ = std::move(path);
  return out;
}

std::string JsonObject::path_of(std::string_view key) const {
  return path_.empty() ? std::string(key) : path_ + "." + std::string(key);
}

const json::value* JsonObject::find(std::string_view key) const {
  const json::value* value = object_->if_contains(boost_view(key));
  return value == nullptr || value->is_null() ? nullptr : value;
}

StatusOr<const json::value*> JsonObject::required(std::string_view key) const {
  const json::value* value = find(key);
  if (value == nullptr) return invalid_field(path_of(key), path_of(key) + " is missing");
  return value;
}

StatusOr<bool> JsonObject::boolean(std::string_view key, bool fallback) const {
  const json::value* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_bool()) {
    return invalid_field(path_of(key),
                         path_of(key) + " is " + std::string(kind_name(*value)) + ", not a boolean");
  }
  return value->get_bool();
}

StatusOr<std::string_view> JsonObject::string(std::string_view key) const {
  ASSIGN_OR_RETURN(const json::value* value, required(key));
  if (!value->is_string()) {
    return invalid_field(path_of(key),
                         path_of(key) + " is " + std::string(kind_name(*value)) + ", not a string");
  }
  return view(value->get_string());
}

StatusOr<std::string_view> JsonObject::optional_string(std::string_view key) const {
  if (find(key) == nullptr) return std::string_view();
  return string(key);
}

Status JsonObject::only(std::initializer_list<std::string_view> known) const {
  for (const auto& member : *object_) {
    const std::string_view key = view(member.key());
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return invalid_field(path_of(key), path_of(key) + " is not supported");
    }
  }
  return OkStatus();
}

StatusOr<json::value> parse_json(std::string_view text, size_t max_depth, json::storage_ptr storage) {
  json::parse_options options;
  options.max_depth = max_depth;
  boost::system::error_code error;
  json::stream_parser parser(storage, options);
  const size_t read = parser.write_some(text.data(), text.size(), error);
  if (!error) {
    if (read < text.size()) {
      return invalid_argument("not JSON: text after the end of the document, at byte " +
                              std::to_string(read));
    }
    parser.finish(error);
  }
  if (error) return invalid_argument("not JSON: " + error.message() + ", near byte " + std::to_string(read));
  return parser.release();
}

}  // namespace conclave::text
