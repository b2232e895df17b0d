#include "router_service/http/json_fields.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

constexpr size_t kMaxDepth = 64;

Status wrong_kind(const std::string& path, std::string_view wanted, const json::value& got) {
  return invalid_field(path, "must be " + std::string(wanted) + ", not " + std::string(json_kind(got)));
}

}  // namespace

StatusOr<json::object> parse_json_object(std::string_view body) {
  json::parse_options options;
  options.max_depth = kMaxDepth;
  boost::system::error_code error;
  json::value value = json::parse(json::string_view(body.data(), body.size()), error, {}, options);
  if (error == json::make_error_code(json::error::too_deep))
    return invalid_field("body", "is nested more than " + std::to_string(kMaxDepth) + " levels deep");
  if (error) return invalid_field("body", "is not valid JSON: " + error.message());
  if (!value.is_object()) return wrong_kind("body", "a JSON object", value);
  return std::move(value.get_object());
}

std::string_view json_kind(const json::value& value) {
  switch (value.kind()) {
    case json::kind::null:
      return "null";
    case json::kind::bool_:
      return "a boolean";
    case json::kind::int64:
    case json::kind::uint64:
      return "an integer";
    case json::kind::double_:
      return "a number";
    case json::kind::string:
      return "a string";
    case json::kind::array:
      return "a list";
    case json::kind::object:
      return "an object";
  }
  return "a value";
}

std::string to_std(const json::string& text) { return std::string(text.data(), text.size()); }

const json::value* JsonFields::find(std::string_view name) const {
  const json::value* value = object_.if_contains(json::string_view(name.data(), name.size()));
  return value == nullptr || value->is_null() ? nullptr : value;
}

std::string JsonFields::path(std::string_view name) const {
  return path_.empty() ? std::string(name) : path_ + "." + std::string(name);
}

StatusOr<std::optional<std::string>> JsonFields::text(std::string_view name) const {
  const json::value* value = find(name);
  if (value == nullptr) return std::optional<std::string>();
  if (!value->is_string()) return wrong_kind(path(name), "a string", *value);
  return std::optional<std::string>(to_std(value->get_string()));
}

StatusOr<std::optional<bool>> JsonFields::boolean(std::string_view name) const {
  const json::value* value = find(name);
  if (value == nullptr) return std::optional<bool>();
  if (!value->is_bool()) return wrong_kind(path(name), "true or false", *value);
  return std::optional<bool>(value->get_bool());
}

StatusOr<std::optional<double>> JsonFields::number(std::string_view name) const {
  const json::value* value = find(name);
  if (value == nullptr) return std::optional<double>();
  if (!value->is_number()) return wrong_kind(path(name), "a number", *value);
  return std::optional<double>(value->to_number<double>());
}

StatusOr<std::optional<int64_t>> JsonFields::integer(std::string_view name) const {
  const json::value* value = find(name);
  if (value == nullptr) return std::optional<int64_t>();
  if (value->is_uint64()) return invalid_field(path(name), "is too large");
  if (!value->is_int64()) return wrong_kind(path(name), "an integer", *value);
  return std::optional<int64_t>(value->get_int64());
}

StatusOr<std::vector<std::string>> JsonFields::texts(std::string_view name) const {
  const json::value* value = find(name);
  std::vector<std::string> out;
  if (value == nullptr) return out;
  if (value->is_string()) {
    out.push_back(to_std(value->get_string()));
    return out;
  }
  if (!value->is_array()) return wrong_kind(path(name), "a string or a list of strings", *value);
  for (size_t i = 0; i < value->get_array().size(); ++i) {
    const json::value& item = value->get_array()[i];
    if (!item.is_string()) return wrong_kind(path(name) + "[" + std::to_string(i) + "]", "a string", item);
    out.push_back(to_std(item.get_string()));
  }
  return out;
}

StatusOr<std::vector<int64_t>> JsonFields::integers(std::string_view name) const {
  const json::value* value = find(name);
  std::vector<int64_t> out;
  if (value == nullptr) return out;
  if (!value->is_array()) return wrong_kind(path(name), "a list of integers", *value);
  const json::array& items = value->get_array();
  out.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].is_int64())
      return wrong_kind(path(name) + "[" + std::to_string(i) + "]", "an integer", items[i]);
    out.push_back(items[i].get_int64());
  }
  return out;
}

StatusOr<const json::object*> JsonFields::object(std::string_view name) const {
  const json::value* value = find(name);
  if (value == nullptr) return static_cast<const json::object*>(nullptr);
  if (!value->is_object()) return wrong_kind(path(name), "an object", *value);
  return &value->get_object();
}

}  // namespace conclave::router
