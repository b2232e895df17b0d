#include "libs/text/conversation/tool_set.h"

#include <boost/json.hpp>
#include <functional>
#include <map>

#include "libs/text/conversation/parameter_schema.h"
#include "libs/text/json_reader.h"

namespace conclave::text {

namespace json = boost::json;

struct ToolSet::Tools {
  json::value document;
  // The parameters of each tool, inside `document`; null when it declares none.
  std::map<std::string, const json::value*, std::less<>> by_name;
};

ToolSet::ToolSet() : tools_(std::make_unique<Tools>()) {}
ToolSet::~ToolSet() = default;

StatusOr<std::shared_ptr<const ToolSet>> ToolSet::parse(std::string_view tools_json, std::string_view field) {
  const std::string name(field);
  auto document = parse_json(tools_json, kMaxJsonDepth, {});
  if (!document.ok()) return with_field(document.status(), name);
  if (!document->is_array()) return invalid_field(name, name + " is not a list");
  std::shared_ptr<ToolSet> out(new ToolSet());
  out->tools_->document = std::move(*document);
  const json::array& list = out->tools_->document.get_array();
  if (list.size() > kMaxTools) {
    return invalid_field(name, name + " holds more than " + std::to_string(kMaxTools) + " tools");
  }
  for (size_t i = 0; i < list.size(); ++i) {
    ASSIGN_OR_RETURN(JsonObject tool, JsonObject::of(list[i], name + "[" + std::to_string(i) + "]"));
    ASSIGN_OR_RETURN(const std::string_view type, tool.optional_string("type"));
    if (!type.empty() && type != "function") {
      return invalid_field(tool.path_of("type"), tool.path_of("type") + " must be \"function\"");
    }
    if (const json::value* function = tool.find("function")) {
      ASSIGN_OR_RETURN(tool, JsonObject::of(*function, tool.path_of("function")));
    }
    ASSIGN_OR_RETURN(const std::string_view tool_name, tool.string("name"));
    const std::string path = tool.path_of("name");
    if (tool_name.empty() || tool_name.size() > kMaxNameBytes) {
      return invalid_field(path, path + " has no byte, or over " + std::to_string(kMaxNameBytes));
    }
    const json::value* parameters = tool.find("parameters");
    if (parameters != nullptr && !parameters->is_object()) {
      return invalid_field(tool.path_of("parameters"), tool.path_of("parameters") + " is not an object");
    }
    if (!out->tools_->by_name.emplace(tool_name, parameters).second) {
      return invalid_field(path, path + " is the name of an earlier tool");
    }
  }
  return std::shared_ptr<const ToolSet>(std::move(out));
}

size_t ToolSet::size() const { return tools_->by_name.size(); }

bool ToolSet::has(std::string_view name) const { return tools_->by_name.find(name) != tools_->by_name.end(); }

bool ToolSet::has_prefix(std::string_view beginning) const {
  const auto it = tools_->by_name.lower_bound(beginning);
  return it != tools_->by_name.end() && std::string_view(it->first).starts_with(beginning);
}

ParameterSchema ToolSet::schema(std::string_view name) const {
  const auto it = tools_->by_name.find(name);
  if (it == tools_->by_name.end()) return {};
  return ParameterSchema(it->second, it->second);
}

}  // namespace conclave::text
