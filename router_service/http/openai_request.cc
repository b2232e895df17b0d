#include "router_service/http/openai_request.h"

#include <boost/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libs/text/conversation/json_text.h"
#include "router_service/http/json_fields.h"
#include "router_service/http/openai_fields.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

constexpr uint32_t kCompletionDefaultTokens = 16;  // what OpenAI's completions API does without max_tokens

using AnyPrompt = std::variant<gateway::TextPrompt, gateway::TokenPrompt>;

StatusOr<gateway::TokenPrompt> token_prompt(const json::array& items) {
  gateway::TokenPrompt tokens;
  tokens.ids.reserve(items.size());
  for (const json::value& item : items) {
    if (!item.is_int64())
      return invalid_field("prompt",
                           "must be a list of token ids, but holds " + std::string(json_kind(item)));
    tokens.ids.push_back(item.get_int64());
  }
  return tokens;
}

// A string; a list of token ids; a list of strings and lists of ids, each a prompt of its own.
StatusOr<std::vector<AnyPrompt>> parse_prompts(const JsonFields& fields,
                                               const gateway::AdmissionLimits& limits) {
  const json::value* prompt = fields.find("prompt");
  if (prompt == nullptr) return invalid_field("prompt", "is required");
  std::vector<AnyPrompt> out;
  if (prompt->is_string()) {
    out.emplace_back(gateway::TextPrompt{to_std(prompt->get_string())});
    return out;
  }
  if (!prompt->is_array())
    return invalid_field("prompt",
                         "must be a string or a list of token ids, not " + std::string(json_kind(*prompt)));
  const json::array& items = prompt->get_array();
  if (items.empty()) return invalid_field("prompt", "must not be empty");
  if (!items[0].is_string() && !items[0].is_array()) {
    ASSIGN_OR_RETURN(auto ids, token_prompt(items));
    out.emplace_back(std::move(ids));
    return out;
  }
  if (items.size() > limits.max_prompts)
    return over_limit(gateway::Limit::kPrompts, "prompt",
                      "has " + std::to_string(items.size()) + " prompts; at most " +
                          std::to_string(limits.max_prompts) + " are taken in one request");
  for (const json::value& item : items) {
    if (item.is_string()) {
      out.emplace_back(gateway::TextPrompt{to_std(item.get_string())});
    } else if (item.is_array()) {
      ASSIGN_OR_RETURN(auto ids, token_prompt(item.get_array()));
      out.emplace_back(std::move(ids));
    } else {
      return invalid_field("prompt", "must be a list of strings or of lists of token ids, but holds " +
                                         std::string(json_kind(item)));
    }
  }
  return out;
}

uint64_t text_bytes(const json::value& value) {
  uint64_t sum = 0;
  if (value.is_string()) sum = value.get_string().size();
  if (value.is_array())
    for (const json::value& item : value.get_array()) sum += text_bytes(item);
  if (value.is_object())
    for (const auto& member : value.get_object()) sum += text_bytes(member.value());
  return sum;
}

// The members of the body as they were written: templates print numbers and escapes, so what a client wrote
// is passed on to the byte.
class RawMembers {
 public:
  explicit RawMembers(std::string_view body) {
    if (const auto value = text::read_json(body)) members_ = text::json_members(*value);
  }
  std::string get(std::string_view name, const json::value& parsed) const {
    for (size_t i = members_.size(); i-- > 0;)  // of repeated names the last one counts
      if (members_[i].key == name) return std::string(members_[i].value.text);
    return json::serialize(parsed);
  }

 private:
  std::vector<text::JsonMember> members_;
};

Status parse_messages(const JsonFields& fields, const RawMembers& raw, const gateway::AdmissionLimits& limits,
                      gateway::ChatPrompt& chat) {
  const json::value* messages = fields.find("messages");
  if (messages == nullptr) return invalid_field("messages", "is required");
  if (!messages->is_array())
    return invalid_field("messages", "must be a list, not " + std::string(json_kind(*messages)));
  const json::array& list = messages->get_array();
  if (list.empty()) return invalid_field("messages", "must not be empty");
  if (list.size() > limits.max_messages)
    return over_limit(gateway::Limit::kMessages, "messages",
                      "has " + std::to_string(list.size()) + " messages; at most " +
                          std::to_string(limits.max_messages) + " are taken");
  uint64_t largest = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const uint64_t bytes = text_bytes(list[i]);
    chat.text_bytes += bytes;
    if (bytes <= largest) continue;
    largest = bytes;
    const json::value* content = list[i].is_object() ? list[i].get_object().if_contains("content") : nullptr;
    const bool is_content = content != nullptr && 2 * text_bytes(*content) > bytes;
    chat.largest_field = "messages[" + std::to_string(i) + "]" + (is_content ? ".content" : "");
  }
  chat.request.messages_json = raw.get("messages", *messages);
  if (const json::value* tools = fields.find("tools")) {
    const uint64_t bytes = text_bytes(*tools);
    chat.text_bytes += bytes;
    if (bytes > largest) chat.largest_field = "tools";
  }
  return OkStatus();
}

// tools and tool_choice. With tool_choice "none" the template does not show the tools, as in vLLM.
Status parse_tools(const JsonFields& fields, const RawMembers& raw, const gateway::AdmissionLimits& limits,
                   gateway::ChatPrompt& chat, gateway::GenerateRequest& generate) {
  ASSIGN_OR_RETURN(const auto parallel, fields.boolean("parallel_tool_calls"));
  generate.parallel_tool_calls = parallel.value_or(true);
  const json::value* tools = fields.find("tools");
  if (tools != nullptr && !tools->is_array())
    return invalid_field("tools", "must be a list, not " + std::string(json_kind(*tools)));
  const bool none_given = tools == nullptr || tools->get_array().empty();
  bool use = !none_given;
  if (const json::value* choice = fields.find("tool_choice")) {
    const std::string_view word =
        choice->is_string() ? std::string_view(choice->get_string().data(), choice->get_string().size())
                            : std::string_view();
    if (word == "none") {
      use = false;
    } else if (choice->is_object() || word == "required") {
      return invalid_field("tool_choice",
                           "only \"auto\" and \"none\" are supported: a call cannot be forced yet");
    } else if (word != "auto") {
      return invalid_field("tool_choice", "must be \"auto\" or \"none\"");
    }
  }
  if (none_given) return OkStatus();
  if (tools->get_array().size() > limits.max_tools)
    return over_limit(gateway::Limit::kTools, "tools",
                      "has " + std::to_string(tools->get_array().size()) + " tools; at most " +
                          std::to_string(limits.max_tools) + " are taken");
  const std::string written = raw.get("tools", *tools);
  ASSIGN_OR_RETURN(auto set, text::ToolSet::parse(written));
  if (!use) return OkStatus();
  chat.request.tools_json = written;
  generate.tools = std::move(set);
  return OkStatus();
}

Status parse_reasoning(const JsonFields& fields, OpenAiRequest& out) {
  ASSIGN_OR_RETURN(const auto format, fields.text("reasoning_format"));
  if (format == "append") {
    out.generate.reasoning = text::ReasoningFormat::kAppend;
  } else if (format == "none") {
    out.generate.reasoning = text::ReasoningFormat::kNone;
  } else if (format && *format != "separate") {
    return invalid_field("reasoning_format", "must be \"separate\", \"append\" or \"none\"");
  }
  ASSIGN_OR_RETURN(const auto separate, fields.boolean("separate_reasoning"));  // SGLang's name
  if (separate && !*separate && !format) out.generate.reasoning = text::ReasoningFormat::kNone;
  ASSIGN_OR_RETURN(const auto include, fields.boolean("include_reasoning"));  // vLLM's
  out.style.include_reasoning = include.value_or(true);
  return OkStatus();
}

// What only the template sees.
Status parse_template_fields(const JsonFields& fields, const RawMembers& raw, gateway::ChatPrompt& chat) {
  ASSIGN_OR_RETURN(const auto generation_prompt, fields.boolean("add_generation_prompt"));
  chat.request.add_generation_prompt = generation_prompt.value_or(true);
  ASSIGN_OR_RETURN(const auto special, fields.boolean("allow_special_tokens"));
  chat.request.allow_special_tokens = special.value_or(false);
  ASSIGN_OR_RETURN(const json::object* kwargs, fields.object("chat_template_kwargs"));
  ASSIGN_OR_RETURN(const auto effort, fields.text("reasoning_effort"));
  std::string& written = chat.request.template_kwargs_json;
  if (kwargs != nullptr) {
    written = raw.get("chat_template_kwargs", *fields.find("chat_template_kwargs"));
    chat.text_bytes += text_bytes(*fields.find("chat_template_kwargs"));
  }
  if (effort && (kwargs == nullptr || !kwargs->contains("reasoning_effort"))) {
    const std::string member = "\"reasoning_effort\": " + json_quoted(*effort);
    if (kwargs == nullptr || kwargs->empty())
      written = "{" + member + "}";
    else
      written.insert(written.find('{') + 1, member + ", ");
  }
  return OkStatus();
}

}  // namespace

StatusOr<OpenAiRequest> parse_completion(std::string_view body, const gateway::AdmissionLimits& limits) {
  ASSIGN_OR_RETURN(const json::object object, parse_json_object(body));
  const JsonFields fields(object);
  OpenAiRequest out;
  RETURN_IF_ERROR(parse_common(fields, object, out));
  ASSIGN_OR_RETURN(const auto special, fields.boolean("allow_special_tokens"));
  out.generate.allow_special_tokens = special.value_or(false);
  ASSIGN_OR_RETURN(auto prompts, parse_prompts(fields, limits));
  const auto n = static_cast<uint64_t>(std::max<int64_t>(out.generate.n.value_or(1), 1));
  if (n <= limits.max_answers && prompts.size() * n > limits.max_answers)
    return over_limit(gateway::Limit::kAnswers, "n",
                      std::to_string(n) + " choices of " + std::to_string(prompts.size()) +
                          " prompts are more than " + std::to_string(limits.max_answers) +
                          " answers in one request");
  std::visit([&](auto& first) { out.generate.prompt = std::move(first); }, prompts.front());
  prompts.erase(prompts.begin());
  out.more_prompts = std::move(prompts);
  out.generate.default_max_tokens = kCompletionDefaultTokens;
  return out;
}

StatusOr<OpenAiRequest> parse_chat_completion(std::string_view body, const gateway::AdmissionLimits& limits) {
  ASSIGN_OR_RETURN(const json::object object, parse_json_object(body));
  const JsonFields fields(object);
  const RawMembers raw(body);
  OpenAiRequest out;
  out.style.chat = true;
  out.generate.conversation = true;
  RETURN_IF_ERROR(parse_common(fields, object, out));
  ASSIGN_OR_RETURN(const auto max_completion_tokens, fields.integer("max_completion_tokens"));
  if (max_completion_tokens) {  // the newer name wins
    out.generate.max_tokens = max_completion_tokens;
    out.generate.max_tokens_field = "max_completion_tokens";
  }
  gateway::ChatPrompt chat;
  RETURN_IF_ERROR(parse_messages(fields, raw, limits, chat));
  RETURN_IF_ERROR(parse_tools(fields, raw, limits, chat, out.generate));
  RETURN_IF_ERROR(parse_reasoning(fields, out));
  RETURN_IF_ERROR(parse_template_fields(fields, raw, chat));
  out.generate.prompt = std::move(chat);
  out.generate.prompt_field = "messages";
  return out;
}

StatusOr<TokenizeRequest> parse_tokenize(std::string_view body, const gateway::AdmissionLimits& limits) {
  ASSIGN_OR_RETURN(const json::object object, parse_json_object(body));
  const JsonFields fields(object);
  const RawMembers raw(body);
  TokenizeRequest out;
  ASSIGN_OR_RETURN(const auto model, fields.text("model"));
  out.model = model.value_or("");
  ASSIGN_OR_RETURN(const auto strings, fields.boolean("return_token_strs"));
  out.return_token_strs = strings.value_or(false);
  ASSIGN_OR_RETURN(auto prompt, fields.text("prompt"));
  if (prompt) {
    ASSIGN_OR_RETURN(const auto special, fields.boolean("allow_special_tokens"));
    out.allow_special_tokens = special.value_or(false);
    out.prompt = gateway::TextPrompt{std::move(*prompt)};
    return out;
  }
  if (fields.find("messages") == nullptr) return invalid_field("prompt", "prompt or messages is required");
  gateway::ChatPrompt chat;
  gateway::GenerateRequest unused;
  RETURN_IF_ERROR(parse_messages(fields, raw, limits, chat));
  RETURN_IF_ERROR(parse_tools(fields, raw, limits, chat, unused));
  RETURN_IF_ERROR(parse_template_fields(fields, raw, chat));
  out.prompt = std::move(chat);
  return out;
}

StatusOr<DetokenizeRequest> parse_detokenize(std::string_view body) {
  ASSIGN_OR_RETURN(const json::object object, parse_json_object(body));
  const JsonFields fields(object);
  DetokenizeRequest out;
  ASSIGN_OR_RETURN(const auto model, fields.text("model"));
  out.model = model.value_or("");
  if (fields.find("tokens") == nullptr) return invalid_field("tokens", "is required");
  ASSIGN_OR_RETURN(out.tokens, fields.integers("tokens"));
  return out;
}

}  // namespace conclave::router
