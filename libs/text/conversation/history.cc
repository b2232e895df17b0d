#include "libs/text/conversation/history.h"

#include <algorithm>
#include <map>
#include <optional>

#include "libs/text/conversation/json_text.h"

namespace conclave::text {
namespace {

std::string_view strip_newlines(std::string_view text) {
  while (text.starts_with('\n')) text.remove_prefix(1);
  while (text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

std::string text_part(std::string_view text, std::string_view name) {
  std::string out = "{\"type\": \"text\", \"text\": " + json_quoted(text);
  if (!name.empty()) out += ", \"name\": " + json_quoted(name);
  return out + "}";
}

Status wrong_kind(const std::string& path, const JsonSlice& value, std::string_view want) {
  return invalid_field(
      path, path + " is " + std::string(json_kind_name(value.kind)) + ", not " + std::string(want));
}

// The value of a member; null counts as absent.
const JsonSlice* find(const std::vector<JsonMember>& members, std::string_view key) {
  const JsonSlice* out = nullptr;
  for (const JsonMember& m : members) {
    if (m.key == key) out = m.value.kind == JsonKind::kNull ? nullptr : &m.value;
  }
  return out;
}

StatusOr<std::optional<std::string>> find_string(const std::vector<JsonMember>& members,
                                                 const std::string& path, std::string_view key) {
  const JsonSlice* value = find(members, key);
  if (value == nullptr) return std::optional<std::string>();
  if (value->kind != JsonKind::kString) return wrong_kind(path + "." + std::string(key), *value, "a string");
  return std::optional(json_string(*value));
}

// What a message says: a text, or the texts of its parts.
struct Content {
  bool present = false;
  bool is_list = false;
  std::vector<std::string> texts;
  std::vector<std::string_view> named;  // each part as it was sent, when it has a name of its own; else empty
  JsonSlice raw;

  std::string joined(std::string_view separator) const {
    std::string out;
    for (size_t i = 0; i < texts.size(); ++i) out.append(i > 0 ? separator : "").append(texts[i]);
    return out;
  }
};

StatusOr<Content> read_content(const std::vector<JsonMember>& members, const std::string& message_path) {
  Content out;
  const JsonSlice* value = find(members, "content");
  if (value == nullptr) return out;
  const std::string path = message_path + ".content";
  out.present = true;
  out.raw = *value;
  if (value->kind == JsonKind::kString) {
    out.texts.push_back(json_string(*value));
    out.named.emplace_back();
    return out;
  }
  if (value->kind != JsonKind::kArray) return wrong_kind(path, *value, "a string or a list of parts");
  out.is_list = true;
  const std::vector<JsonSlice> parts = json_elements(*value);
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string part_path = path + "[" + std::to_string(i) + "]";
    if (parts[i].kind == JsonKind::kString) {
      out.texts.push_back(json_string(parts[i]));
      out.named.emplace_back();
      continue;
    }
    if (parts[i].kind != JsonKind::kObject) return wrong_kind(part_path, parts[i], "an object");
    const std::vector<JsonMember> part = json_members(parts[i]);
    ASSIGN_OR_RETURN(const auto type, find_string(part, part_path, "type"));
    if (!type || (*type != "text" && *type != "input_text" && *type != "output_text")) {
      return invalid_field(part_path + ".type", part_path + ".type: only \"text\" is supported");
    }
    ASSIGN_OR_RETURN(const auto text, find_string(part, part_path, "text"));
    if (!text) return invalid_field(part_path + ".text", part_path + ".text is missing");
    out.texts.push_back(*text);
    out.named.push_back(find(part, "name") != nullptr ? parts[i].text : std::string_view());
  }
  return out;
}

struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;  // JSON text of an object
};

StatusOr<std::string> read_arguments(const JsonSlice* value, const std::string& path) {
  if (value == nullptr) return std::string("{}");
  if (value->kind == JsonKind::kObject) return std::string(value->text);
  if (value->kind != JsonKind::kString) return wrong_kind(path, *value, "a string that holds a JSON object");
  const std::string text = json_string(*value);
  if (trim_json_space(text).empty()) return std::string("{}");
  const auto object = read_json(text);
  if (!object.has_value()) return invalid_field(path, path + " is not JSON");
  if (object->kind != JsonKind::kObject) return wrong_kind(path, *object, "a JSON object");
  return std::string(object->text);
}

StatusOr<std::vector<ToolCall>> read_tool_calls(const JsonSlice& list, const std::string& path) {
  std::vector<ToolCall> out;
  if (list.kind != JsonKind::kArray) return wrong_kind(path, list, "a list");
  const std::vector<JsonSlice> calls = json_elements(list);
  for (size_t i = 0; i < calls.size(); ++i) {
    std::string at = path + "[" + std::to_string(i) + "]";
    if (calls[i].kind != JsonKind::kObject) return wrong_kind(at, calls[i], "an object");
    std::vector<JsonMember> members = json_members(calls[i]);
    ToolCall call;
    ASSIGN_OR_RETURN(const auto id, find_string(members, at, "id"));
    call.id = id.value_or("");
    if (const JsonSlice* function = find(members, "function")) {
      at += ".function";
      if (function->kind != JsonKind::kObject) return wrong_kind(at, *function, "an object");
      members = json_members(*function);
    }
    ASSIGN_OR_RETURN(const auto name, find_string(members, at, "name"));
    if (!name || name->empty()) return invalid_field(at + ".name", at + ".name is missing");
    call.name = *name;
    ASSIGN_OR_RETURN(call.arguments, read_arguments(find(members, "arguments"), at + ".arguments"));
    out.push_back(std::move(call));
  }
  return out;
}

std::string tool_calls_json(const std::vector<ToolCall>& calls) {
  std::string out = "[";
  for (const ToolCall& call : calls) {
    if (out.size() > 1) out += ", ";
    out += "{";
    if (!call.id.empty()) out += "\"id\": " + json_quoted(call.id) + ", ";
    out += "\"type\": \"function\", \"function\": {\"name\": " + json_quoted(call.name) +
           ", \"arguments\": " + call.arguments + "}}";
  }
  return out + "]";
}

// The calls as the model writes them.
std::string tool_calls_text(const std::vector<ToolCall>& calls, ToolFormat format) {
  std::string out;
  if (format == ToolFormat::kMiniMaxM1) {
    out = "\n<tool_calls>\n";
    for (const ToolCall& call : calls) {
      // One line each: the arguments may have been sent with line breaks, which JSON has only between values.
      std::string line = call.arguments;
      std::replace(line.begin(), line.end(), '\n', ' ');
      std::replace(line.begin(), line.end(), '\r', ' ');
      out += "{\"name\": " + json_quoted(call.name) + ", \"arguments\": " + line + "}\n";
    }
    return out + "</tool_calls>";
  }
  out = "\n<minimax:tool_call>\n";
  for (const ToolCall& call : calls) {
    out += "<invoke name=\"" + call.name + "\">\n";
    for (const JsonMember& m : json_members({JsonKind::kObject, call.arguments})) {
      out += "<parameter name=\"" + m.key + "\">" +
             (m.value.kind == JsonKind::kString ? json_string(m.value) : std::string(m.value.text)) +
             "</parameter>\n";
    }
    out += "</invoke>\n";
  }
  return out + "</minimax:tool_call>";
}

class Normalizer {
 public:
  Normalizer(const TemplateTraits& traits, const ConversationFormat& format)
      : traits_(traits), format_(format) {}

  StatusOr<NormalizedHistory> run(std::string_view messages_json) {
    const auto list = read_json(messages_json);
    if (!list.has_value()) return invalid_field("messages", "messages is not JSON");
    if (list->kind != JsonKind::kArray) return wrong_kind("messages", *list, "a list");
    const std::vector<JsonSlice> messages = json_elements(*list);
    if (messages.empty()) return invalid_field("messages", "messages is empty");
    out_.messages_json = "[";
    for (size_t i = 0; i < messages.size(); ++i) {
      if (i > 0) out_.messages_json += ", ";
      RETURN_IF_ERROR(message(messages[i], i));
    }
    out_.messages_json += "]";
    return std::move(out_);
  }

 private:
  Status message(const JsonSlice& value, size_t index) {
    const std::string path = "messages[" + std::to_string(index) + "]";
    if (value.kind != JsonKind::kObject) return wrong_kind(path, value, "an object");
    const std::vector<JsonMember> members = json_members(value);
    ASSIGN_OR_RETURN(auto role, find_string(members, path, "role"));
    if (!role) return invalid_field(path + ".role", path + ".role is missing");
    if (*role == "developer") role = "system";  // OpenAI's newer name of the same
    if (*role != "system" && *role != "user" && *role != "assistant" && *role != "tool") {
      return invalid_field(path + ".role", path + ".role must be system, developer, user, assistant or tool");
    }
    if (*role == "system" && index > 0 && !traits_.takes_late_system) {
      out_.warnings.push_back(
          path + " is a system message that is not the first; this model's template leaves it out");
    }
    ASSIGN_OR_RETURN(const Content content, read_content(members, path));
    out_.messages_json += "{\"role\": " + json_quoted(*role);
    for (const JsonMember& m : members) {
      const bool ours = m.key == "role" || m.key == "content" || m.key == "reasoning_content" ||
                        m.key == "reasoning" || m.key == "thinking" || m.key == "tool_calls";
      if (!ours && m.value.kind != JsonKind::kNull) {
        out_.messages_json.append(", ").append(m.name).append(": ").append(m.value.text);
      }
    }
    RETURN_IF_ERROR(*role == "assistant" ? assistant(members, content, path)
                                         : other(members, content, *role, path));
    out_.messages_json += "}";
    return OkStatus();
  }

  void add(std::string_view key, std::string_view json) {
    out_.messages_json.append(", \"").append(key).append("\": ").append(json);
  }

  // The content in the form that the template takes; as it was sent where that is one.
  void add_content(const Content& content, std::string_view tool_name, bool own_turn = false) {
    const bool named = !tool_name.empty() && !traits_.takes_text;  // templates of parts name each tool's part
    if (!traits_.takes_all_parts && !named && !own_turn && content.texts.size() > 1) {
      add_text(content.joined("\n"));  // MiniMax-M1's template would lose all but the first
    } else if (content.is_list ? traits_.takes_parts && !named : traits_.takes_text) {
      add("content", content.raw.text);
    } else if (traits_.takes_text) {
      add("content", json_quoted(content.joined("\n")));
    } else {
      std::string parts = "[";
      for (size_t i = 0; i < content.texts.size(); ++i) {
        if (i > 0) parts += ", ";
        parts +=
            content.named[i].empty() ? text_part(content.texts[i], tool_name) : std::string(content.named[i]);
      }
      add("content", parts + "]");
    }
  }
  void add_text(const std::string& text) {
    if (traits_.takes_text) {
      add("content", json_quoted(text));
    } else {
      add("content", "[" + text_part(text, "") + "]");
    }
  }

  Status other(const std::vector<JsonMember>& members, const Content& content, const std::string& role,
               const std::string& path) {
    if (!content.present) return invalid_field(path + ".content", path + ".content is missing");
    if (find(members, "tool_calls") != nullptr) {
      return invalid_field(path + ".tool_calls", path + ".tool_calls: only an assistant's message has them");
    }
    std::string tool_name;
    if (role == "tool") {
      ASSIGN_OR_RETURN(const auto id, find_string(members, path, "tool_call_id"));
      ASSIGN_OR_RETURN(const auto name, find_string(members, path, "name"));
      const auto known = names_of_calls_.find(id.value_or(""));
      tool_name = name ? *name : known != names_of_calls_.end() ? known->second : "tool";
    }
    add_content(content, tool_name);
    return OkStatus();
  }

  Status assistant(const std::vector<JsonMember>& members, const Content& content, const std::string& path) {
    std::optional<std::string> reasoning;
    for (const char* key : {"thinking", "reasoning", "reasoning_content"}) {  // the last name wins
      ASSIGN_OR_RETURN(auto found, find_string(members, path, key));
      if (found) reasoning = std::move(found);
    }
    std::vector<ToolCall> calls;
    if (const JsonSlice* list = find(members, "tool_calls")) {
      ASSIGN_OR_RETURN(calls, read_tool_calls(*list, path + ".tool_calls"));
      for (const ToolCall& call : calls) names_of_calls_[call.id] = call.name;
    }
    if (!content.present && calls.empty() && !reasoning) {
      return invalid_field(path + ".content", path + ".content is missing");
    }
    bool rewritten = false;
    std::string text = content.joined("");
    if (!reasoning && traits_.takes_reasoning && format_.reasons &&
        text.find(format_.think_close) != std::string::npos) {
      SplitThinking split = split_thinking(text, format_);
      reasoning = std::move(split.reasoning);
      text = std::move(split.content);
      rewritten = true;
    }
    if (reasoning && traits_.takes_reasoning) {
      add("reasoning_content", json_quoted(*reasoning));
    } else if (reasoning && !reasoning->empty() && format_.reasons) {
      text = format_.think_open + "\n" + *reasoning + "\n" + format_.think_close + "\n" + text;
      rewritten = true;
    } else if (reasoning && !reasoning->empty()) {
      out_.warnings.push_back(path + " has reasoning, which this model's template leaves out");
    }
    if (!calls.empty()) {
      if (traits_.takes_tool_calls) {
        add("tool_calls", tool_calls_json(calls));
      } else if (format_.tools != ToolFormat::kNone) {
        text += tool_calls_text(calls, format_.tools);
        rewritten = true;
      } else {
        out_.warnings.push_back(path + " has tool calls, which this model's template leaves out");
      }
    }
    if (rewritten || !content.present) {
      add_text(text);
    } else {
      add_content(content, "", /*own_turn=*/true);
    }
    return OkStatus();
  }

  const TemplateTraits& traits_;
  const ConversationFormat& format_;
  NormalizedHistory out_;
  std::map<std::string, std::string> names_of_calls_;  // by id
};

}  // namespace

SplitThinking split_thinking(std::string_view text, const ConversationFormat& format) {
  const size_t first = text.find(format.think_close);
  if (first == std::string_view::npos) return {"", std::string(text)};
  std::string_view before = strip_newlines(text.substr(0, first));
  if (const size_t open = before.rfind(format.think_open); open != std::string_view::npos) {
    before = before.substr(open + format.think_open.size());
  }
  const size_t last = text.rfind(format.think_close);
  return {std::string(strip_newlines(before)),
          std::string(strip_newlines(text.substr(last + format.think_close.size())))};
}

StatusOr<NormalizedHistory> normalize_history(std::string_view messages_json, const TemplateTraits& traits,
                                              const ConversationFormat& format) {
  return Normalizer(traits, format).run(messages_json);
}

std::string normalize_tools(std::string_view tools_json, ToolFormat format) {
  const auto list = read_json(tools_json);
  if (!list.has_value() || list->kind != JsonKind::kArray) return std::string(tools_json);
  std::string out = "[";
  for (const JsonSlice& tool : json_elements(*list)) {
    if (out.size() > 1) out += ", ";
    const std::vector<JsonMember> members = json_members(tool);
    const JsonSlice* function = find(members, "function");
    if (format == ToolFormat::kMiniMaxM1) {
      out += function != nullptr ? function->text : tool.text;
    } else if (function == nullptr && tool.kind == JsonKind::kObject) {
      out.append("{\"type\": \"function\", \"function\": ").append(tool.text).append("}");
    } else {
      out += tool.text;
    }
  }
  return out + "]";
}

}  // namespace conclave::text
