#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>

#include "libs/text/chat_template.h"
#include "libs/text/json_reader.h"
#include "libs/text/utf8.h"

namespace conclave::text {
namespace {

namespace json = boost::json;

constexpr size_t kMaxFileBytes = 16u << 20;
constexpr size_t kMaxDepth = 32;

constexpr std::string_view kAssistantTags[] = {
    "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>", "<tool_calls>", "</tool_calls>"};

// The text of a file; nullopt when it is not there.
StatusOr<std::optional<std::string>> read_if_there(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    if (errno == ENOENT || errno == ENOTDIR) return std::optional<std::string>();
    return failed_precondition("cannot open " + path + ": " + std::strerror(errno));
  }
  std::string text(kMaxFileBytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  if (text.size() > kMaxFileBytes) {
    return invalid_argument(path + " is larger than " + std::to_string(kMaxFileBytes) + " bytes");
  }
  if (!is_valid_utf8(text)) return invalid_argument(path + " is not UTF-8");
  return std::optional<std::string>(std::move(text));
}

// chat_template: a string, or a list of {"name": ..., "template": ...}.
Status read_templates(const json::value& value, TemplateSource& source) {
  if (value.is_string()) {
    source.templates["default"] = std::string(view(value.get_string()));
    return OkStatus();
  }
  if (!value.is_array())
    return invalid_field("chat_template", "chat_template is neither a string nor an array");
  const auto& list = value.get_array();
  for (size_t i = 0; i < list.size(); ++i) {
    ASSIGN_OR_RETURN(const JsonObject entry,
                     JsonObject::of(list[i], "chat_template[" + std::to_string(i) + "]"));
    ASSIGN_OR_RETURN(const std::string_view name, entry.string("name"));
    ASSIGN_OR_RETURN(const std::string_view text, entry.string("template"));
    source.templates[std::string(name)] = text;
  }
  if (source.templates.count("default") == 0) {
    return invalid_field("chat_template", "chat_template has no entry named \"default\"");
  }
  return OkStatus();
}

Status read_config(std::string_view text, TemplateSource& source) {
  ASSIGN_OR_RETURN(const json::value document, parse_json(text, kMaxDepth, {}));
  ASSIGN_OR_RETURN(const JsonObject config, JsonObject::of(document, ""));
  for (std::string_view key :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    const json::value* value = config.find(key);
    if (value == nullptr) continue;
    if (value->is_object()) {
      ASSIGN_OR_RETURN(const JsonObject token, JsonObject::of(*value, std::string(key)));
      ASSIGN_OR_RETURN(const std::string_view content, token.string("content"));
      source.variables[std::string(key)] = content;
    } else {
      ASSIGN_OR_RETURN(const std::string_view content, config.string(key));
      source.variables[std::string(key)] = content;
    }
  }
  if (const json::value* value = config.find("chat_template")) return read_templates(*value, source);
  return OkStatus();
}

}  // namespace

StatusOr<TemplateSource> read_template_source(const std::string& model_dir, const Tokenizer* tokenizer) {
  TemplateSource source;
  const std::string config_path = model_dir + "/tokenizer_config.json";
  ASSIGN_OR_RETURN(const auto config, read_if_there(config_path));
  if (config.has_value()) {
    if (Status status = read_config(*config, source); !status.ok()) return annotate(status, config_path);
  }
  ASSIGN_OR_RETURN(const auto jinja, read_if_there(model_dir + "/chat_template.jinja"));
  if (jinja.has_value()) source.templates = {{"default", *jinja}};
  if (source.templates.empty()) {
    return not_found(model_dir +
                     " has no chat template: neither chat_template.jinja nor a chat_template in " +
                     "tokenizer_config.json");
  }
  if (tokenizer != nullptr) {
    for (const AddedToken& token : tokenizer->added_tokens()) {
      // Some releases flag the tags of thinking and calls as special; they are no less an assistant's.
      const bool tag = std::find(std::begin(kAssistantTags), std::end(kAssistantTags), token.content) !=
                       std::end(kAssistantTags);
      (token.special && !tag ? source.special_tokens : source.other_tokens).push_back(token.content);
    }
  }
  return source;
}

}  // namespace conclave::text
