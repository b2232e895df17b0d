#include "router_service/http/openai_request.h"

#include <boost/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "router_service/http/json_fields.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

constexpr uint32_t kCompletionDefaultTokens = 16;  // what OpenAI's completions API does without max_tokens

// Fields that would change the answer. Each may be given with the value that changes nothing.
Status refuse_unsupported(const JsonFields& fields, bool chat) {
  const auto unsupported = [](std::string_view name) { return invalid_field(name, "is not supported here"); };
  for (std::string_view name : {"n", "best_of"}) {
    ASSIGN_OR_RETURN(const auto count, fields.integer(name));
    if (count && *count != 1) return invalid_field(name, "only 1 is supported");
  }
  for (std::string_view name : {"presence_penalty", "frequency_penalty"}) {
    ASSIGN_OR_RETURN(const auto penalty, fields.number(name));
    if (penalty && *penalty != 0) return unsupported(name);
  }
  ASSIGN_OR_RETURN(const auto repetition, fields.number("repetition_penalty"));
  if (repetition && *repetition != 1) return unsupported("repetition_penalty");
  for (std::string_view name : {"echo", "use_beam_search"}) {
    ASSIGN_OR_RETURN(const auto flag, fields.boolean(name));
    if (flag && *flag) return unsupported(name);
  }
  ASSIGN_OR_RETURN(const auto suffix, fields.text("suffix"));
  if (suffix && !suffix->empty()) return unsupported("suffix");
  if (const json::value* logprobs = fields.find("logprobs");
      logprobs && !(logprobs->is_bool() && !logprobs->get_bool()))
    return unsupported("logprobs");
  ASSIGN_OR_RETURN(const auto top_logprobs, fields.integer("top_logprobs"));
  if (top_logprobs && *top_logprobs != 0) return unsupported("top_logprobs");
  ASSIGN_OR_RETURN(const json::object* bias, fields.object("logit_bias"));
  if (bias != nullptr && !bias->empty()) return unsupported("logit_bias");
  ASSIGN_OR_RETURN(const json::object* format, fields.object("response_format"));
  if (format != nullptr) {
    const JsonFields inner(*format, "response_format");
    ASSIGN_OR_RETURN(const auto type, inner.text("type"));
    if (type != "text") return invalid_field("response_format.type", "only \"text\" is supported");
  }
  if (!chat) return OkStatus();
  for (std::string_view name : {"tools", "functions"}) {
    const json::value* tools = fields.find(name);
    if (tools != nullptr && !(tools->is_array() && tools->get_array().empty())) return unsupported(name);
  }
  return OkStatus();
}

// What both APIs share.
Status parse_common(const JsonFields& fields, OpenAiRequest& out) {
  gateway::GenerateRequest& generate = out.generate;
  ASSIGN_OR_RETURN(const auto model, fields.text("model"));
  if (model && model->empty()) return invalid_field("model", "must not be empty");
  generate.model = model.value_or("");
  ASSIGN_OR_RETURN(generate.temperature, fields.number("temperature"));
  ASSIGN_OR_RETURN(generate.top_p, fields.number("top_p"));
  ASSIGN_OR_RETURN(generate.top_k, fields.integer("top_k"));
  ASSIGN_OR_RETURN(generate.min_p, fields.number("min_p"));
  ASSIGN_OR_RETURN(const auto seed, fields.integer("seed"));
  if (seed) generate.seed = static_cast<uint64_t>(*seed);
  ASSIGN_OR_RETURN(generate.max_tokens, fields.integer("max_tokens"));
  ASSIGN_OR_RETURN(generate.min_tokens, fields.integer("min_tokens"));
  ASSIGN_OR_RETURN(generate.ignore_eos, fields.boolean("ignore_eos"));
  ASSIGN_OR_RETURN(generate.stop, fields.texts("stop"));
  ASSIGN_OR_RETURN(generate.stop_token_ids, fields.integers("stop_token_ids"));
  ASSIGN_OR_RETURN(const auto stream, fields.boolean("stream"));
  out.stream = stream.value_or(false);
  ASSIGN_OR_RETURN(const json::object* stream_options, fields.object("stream_options"));
  if (stream_options != nullptr) {
    if (!out.stream) return invalid_field("stream_options", "is allowed only with stream: true");
    ASSIGN_OR_RETURN(const auto usage,
                     JsonFields(*stream_options, "stream_options").boolean("include_usage"));
    out.include_usage = usage.value_or(false);
  }
  ASSIGN_OR_RETURN(const auto token_ids, fields.boolean("return_token_ids"));
  out.return_token_ids = token_ids.value_or(false);
  return refuse_unsupported(fields, out.chat);
}

Status parse_prompt(const JsonFields& fields, gateway::GenerateRequest& generate) {
  const json::value* prompt = fields.find("prompt");
  if (prompt == nullptr) return invalid_field("prompt", "is required");
  if (prompt->is_array() && prompt->get_array().size() == 1 && !prompt->get_array()[0].is_number())
    prompt = &prompt->get_array()[0];  // a list of one prompt is that prompt
  if (prompt->is_string()) {
    generate.prompt = gateway::TextPrompt{to_std(prompt->get_string())};
    return OkStatus();
  }
  if (!prompt->is_array())
    return invalid_field("prompt",
                         "must be a string or a list of token ids, not " + std::string(json_kind(*prompt)));
  gateway::TokenPrompt tokens;
  tokens.ids.reserve(prompt->get_array().size());
  for (const json::value& item : prompt->get_array()) {
    if (item.is_string() || item.is_array())
      return invalid_field("prompt", "holds several prompts; only one per request is supported");
    if (!item.is_int64())
      return invalid_field("prompt",
                           "must be a list of token ids, but holds " + std::string(json_kind(item)));
    tokens.ids.push_back(item.get_int64());
  }
  generate.prompt = std::move(tokens);
  return OkStatus();
}

Status check_content(const JsonFields& message, std::string_view role) {
  const json::value* content = message.find("content");
  const std::string path = message.path("content");
  if (content == nullptr) {
    // Only an assistant's turn may be without text: its tool calls or reasoning say it all.
    if (role == "assistant" && (message.find("tool_calls") || message.find("reasoning_content")))
      return OkStatus();
    return invalid_field(path, "is required");
  }
  if (content->is_string()) return OkStatus();
  if (!content->is_array())
    return invalid_field(path,
                         "must be a string or a list of parts, not " + std::string(json_kind(*content)));
  if (content->get_array().empty()) return invalid_field(path, "must not be an empty list");
  for (size_t i = 0; i < content->get_array().size(); ++i) {
    const std::string part_path = path + "[" + std::to_string(i) + "]";
    const json::value& part = content->get_array()[i];
    if (!part.is_object())
      return invalid_field(part_path, "must be an object, not " + std::string(json_kind(part)));
    const JsonFields fields(part.get_object(), part_path);
    ASSIGN_OR_RETURN(const auto type, fields.text("type"));
    if (type != "text") return invalid_field(part_path + ".type", "only \"text\" is supported");
    ASSIGN_OR_RETURN(const auto text, fields.text("text"));
    if (!text) return invalid_field(part_path + ".text", "is required");
  }
  return OkStatus();
}

Status parse_messages(const JsonFields& fields, gateway::GenerateRequest& generate) {
  const json::value* messages = fields.find("messages");
  if (messages == nullptr) return invalid_field("messages", "is required");
  if (!messages->is_array())
    return invalid_field("messages", "must be a list, not " + std::string(json_kind(*messages)));
  if (messages->get_array().empty()) return invalid_field("messages", "must not be empty");
  json::array out;
  for (size_t i = 0; i < messages->get_array().size(); ++i) {
    const std::string path = "messages[" + std::to_string(i) + "]";
    const json::value& item = messages->get_array()[i];
    if (!item.is_object())
      return invalid_field(path, "must be an object, not " + std::string(json_kind(item)));
    json::object message = item.get_object();
    const JsonFields inner(message, path);
    ASSIGN_OR_RETURN(auto role, inner.text("role"));
    if (!role) return invalid_field(path + ".role", "is required");
    if (*role == "developer") *role = "system";  // OpenAI's newer name of the same
    if (*role != "system" && *role != "user" && *role != "assistant" && *role != "tool")
      return invalid_field(path + ".role", "must be system, developer, user, assistant or tool");
    RETURN_IF_ERROR(check_content(inner, *role));
    ASSIGN_OR_RETURN(const auto reasoning, inner.text("reasoning_content"));
    ASSIGN_OR_RETURN(const auto name, inner.text("name"));
    if (inner.find("tool_calls") != nullptr)
      return invalid_field(path + ".tool_calls", "is not supported here");
    json::object clean;
    clean["role"] = *role;
    if (const json::value* content = inner.find("content")) clean["content"] = *content;
    if (reasoning) clean["reasoning_content"] = *reasoning;
    if (name) clean["name"] = *name;
    out.push_back(std::move(clean));
  }
  gateway::ChatPrompt chat;
  chat.messages = static_cast<uint32_t>(out.size());
  chat.document_json =
      json::serialize(json::object{{"messages", std::move(out)}, {"add_generation_prompt", true}});
  generate.prompt = std::move(chat);
  generate.prompt_field = "messages";
  return OkStatus();
}

}  // namespace

StatusOr<OpenAiRequest> parse_completion(std::string_view body) {
  ASSIGN_OR_RETURN(const json::object object, parse_json_object(body));
  const JsonFields fields(object);
  OpenAiRequest out;
  RETURN_IF_ERROR(parse_common(fields, out));
  RETURN_IF_ERROR(parse_prompt(fields, out.generate));
  out.generate.default_max_tokens = kCompletionDefaultTokens;
  return out;
}

StatusOr<OpenAiRequest> parse_chat_completion(std::string_view body) {
  ASSIGN_OR_RETURN(const json::object object, parse_json_object(body));
  const JsonFields fields(object);
  OpenAiRequest out;
  out.chat = true;
  RETURN_IF_ERROR(parse_common(fields, out));
  ASSIGN_OR_RETURN(const auto max_completion_tokens, fields.integer("max_completion_tokens"));
  if (max_completion_tokens) {  // the newer name wins
    out.generate.max_tokens = max_completion_tokens;
    out.generate.max_tokens_field = "max_completion_tokens";
  }
  RETURN_IF_ERROR(parse_messages(fields, out.generate));
  return out;
}

}  // namespace conclave::router
