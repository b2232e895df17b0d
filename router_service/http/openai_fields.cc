#include "router_service/http/openai_fields.h"

#include <algorithm>
#include <boost/json.hpp>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>

namespace conclave::router {
namespace json = boost::json;
namespace {

constexpr size_t kMaxUnknownBytes = 64;
constexpr double kMaxTimeoutSeconds = 1e7;

// Names with an effect in both APIs; then those of one only; then those without effect here.
constexpr std::string_view kShared[] = {"model",
                                        "temperature",
                                        "top_p",
                                        "top_k",
                                        "min_p",
                                        "repetition_penalty",
                                        "presence_penalty",
                                        "frequency_penalty",
                                        "logit_bias",
                                        "seed",
                                        "n",
                                        "best_of",
                                        "max_tokens",
                                        "min_tokens",
                                        "ignore_eos",
                                        "stop",
                                        "stop_token_ids",
                                        "include_stop_str_in_output",
                                        "stream",
                                        "stream_options",
                                        "logprobs",
                                        "prompt_logprobs",
                                        "echo",
                                        "skip_special_tokens",
                                        "return_token_ids",
                                        "return_tokens_as_token_ids",
                                        "timeout",
                                        "priority",
                                        "cache_salt",
                                        "request_id",
                                        "allow_special_tokens",
                                        "response_format"};
constexpr std::string_view kChatOnly[] = {
    "messages",         "max_completion_tokens", "top_logprobs",         "tools",
    "tool_choice",      "parallel_tool_calls",   "chat_template_kwargs", "reasoning_format",
    "reasoning_effort", "include_reasoning",     "separate_reasoning",   "add_generation_prompt"};
constexpr std::string_view kCompletionOnly[] = {"prompt", "suffix"};
constexpr std::string_view kWithoutEffect[] = {"user",
                                               "metadata",
                                               "store",
                                               "service_tier",
                                               "safety_identifier",
                                               "prompt_cache_key",
                                               "prompt_cache_retention",
                                               "verbosity",
                                               "add_special_tokens",
                                               "spaces_between_special_tokens"};
// Fields that would change the answer, and cannot be honoured: refused unless null, false or empty.
constexpr std::string_view kUnsupported[] = {"structured_outputs",
                                             "guided_json",
                                             "guided_regex",
                                             "guided_choice",
                                             "guided_grammar",
                                             "guided_decoding_backend",
                                             "guided_whitespace_pattern",
                                             "json_schema",
                                             "regex",
                                             "ebnf",
                                             "functions",
                                             "audio",
                                             "prediction",
                                             "web_search_options",
                                             "prompt_embeds",
                                             "truncate_prompt_tokens",
                                             "bad_words",
                                             "allowed_token_ids",
                                             "logits_processors",
                                             "use_beam_search",
                                             "early_stopping",
                                             "chat_template",
                                             "documents",
                                             "continue_final_message",
                                             "mm_processor_kwargs",
                                             "kv_transfer_params",
                                             "lora_path"};

bool among(std::string_view name, const auto& names) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool is_empty(const json::value& value) {
  return (value.is_bool() && !value.get_bool()) || (value.is_array() && value.get_array().empty()) ||
         (value.is_object() && value.get_object().empty()) ||
         (value.is_string() && value.get_string().empty());
}

std::string_view why_unsupported(std::string_view name) {
  if (name.starts_with("guided_") || name == "structured_outputs" || name == "json_schema" ||
      name == "regex" || name == "ebnf")
    return "is not supported here: there is no structured output yet";
  if (name == "functions") return "is not supported here: use tools";
  return "is not supported here";
}

Status refuse_unsupported(const JsonFields& fields, const OpenAiRequest& request) {
  for (const std::string_view name : kUnsupported) {
    const json::value* value = fields.find(name);
    if (value != nullptr && !is_empty(*value)) return invalid_field(name, why_unsupported(name));
  }
  ASSIGN_OR_RETURN(const auto best_of, fields.integer("best_of"));
  if (best_of && *best_of != request.generate.n.value_or(1))
    return invalid_field("best_of", "only the value of n is supported");
  ASSIGN_OR_RETURN(const auto length_penalty, fields.number("length_penalty"));
  if (length_penalty && *length_penalty != 1) return invalid_field("length_penalty", "is not supported here");
  ASSIGN_OR_RETURN(const json::object* format, fields.object("response_format"));
  if (format != nullptr) {
    const JsonFields inner(*format, "response_format");
    ASSIGN_OR_RETURN(const auto type, inner.text("type"));
    if (type != "text")
      return invalid_field("response_format.type",
                           "only \"text\" is supported: there is no structured output yet");
  }
  if (const json::value* call = fields.find("function_call");
      call != nullptr && !(call->is_string() && call->get_string() == "none"))
    return invalid_field("function_call", "is not supported here: use tool_choice");
  ASSIGN_OR_RETURN(const auto modalities, fields.texts("modalities"));
  for (const std::string& modality : modalities)
    if (modality != "text") return invalid_field("modalities", "only \"text\" is supported");
  ASSIGN_OR_RETURN(const auto suffix, fields.text("suffix"));
  if (suffix && !suffix->empty()) return invalid_field("suffix", "is not supported here");
  return OkStatus();
}

void list_unknown(const json::object& body, OpenAiRequest& out) {
  for (const auto& member : body) {
    const std::string_view name(member.key().data(), member.key().size());
    const bool known = among(name, kShared) || among(name, kWithoutEffect) || among(name, kUnsupported) ||
                       (out.style.chat ? among(name, kChatOnly) : among(name, kCompletionOnly)) ||
                       name == "length_penalty" || name == "function_call" || name == "modalities";
    if (known || out.unknown.size() >= OpenAiRequest::kMaxUnknown) continue;
    out.unknown.emplace_back(name.substr(0, kMaxUnknownBytes));
  }
}

Status parse_sampling(const JsonFields& fields, gateway::GenerateRequest& out) {
  ASSIGN_OR_RETURN(out.temperature, fields.number("temperature"));
  ASSIGN_OR_RETURN(out.top_p, fields.number("top_p"));
  ASSIGN_OR_RETURN(out.top_k, fields.integer("top_k"));
  ASSIGN_OR_RETURN(out.min_p, fields.number("min_p"));
  ASSIGN_OR_RETURN(out.repetition_penalty, fields.number("repetition_penalty"));
  ASSIGN_OR_RETURN(out.presence_penalty, fields.number("presence_penalty"));
  ASSIGN_OR_RETURN(out.frequency_penalty, fields.number("frequency_penalty"));
  ASSIGN_OR_RETURN(out.seed, fields.integer("seed"));
  ASSIGN_OR_RETURN(out.n, fields.integer("n"));
  ASSIGN_OR_RETURN(out.max_tokens, fields.integer("max_tokens"));
  ASSIGN_OR_RETURN(out.min_tokens, fields.integer("min_tokens"));
  ASSIGN_OR_RETURN(out.ignore_eos, fields.boolean("ignore_eos"));
  ASSIGN_OR_RETURN(out.stop, fields.texts("stop"));
  ASSIGN_OR_RETURN(out.stop_token_ids, fields.integers("stop_token_ids"));
  ASSIGN_OR_RETURN(const auto include_stop, fields.boolean("include_stop_str_in_output"));
  out.include_stop = include_stop.value_or(false);
  ASSIGN_OR_RETURN(const auto skip_special, fields.boolean("skip_special_tokens"));
  out.skip_special_tokens = skip_special.value_or(true);
  ASSIGN_OR_RETURN(const json::object* bias, fields.object("logit_bias"));
  if (bias == nullptr) return OkStatus();
  for (const auto& member : *bias) {
    const std::string_view key(member.key().data(), member.key().size());
    int64_t id = 0;
    const auto read = std::from_chars(key.data(), key.data() + key.size(), id);
    if (read.ec != std::errc() || read.ptr != key.data() + key.size())
      return invalid_field("logit_bias", "\"" + std::string(key.substr(0, 64)) + "\" is not a token id");
    if (!member.value().is_number())
      return invalid_field("logit_bias", "the value of " + std::to_string(id) + " must be a number, not " +
                                             std::string(json_kind(member.value())));
    const double value = member.value().to_number<double>();
    if (!(std::abs(value) <= 100))
      return invalid_field("logit_bias", "the value of " + std::to_string(id) + " must be from -100 to 100");
    out.logit_bias.emplace_back(id, value);
  }
  return OkStatus();
}

Status parse_stream(const JsonFields& fields, AnswerStyle& style) {
  ASSIGN_OR_RETURN(const auto stream, fields.boolean("stream"));
  style.stream = stream.value_or(false);
  ASSIGN_OR_RETURN(const json::object* stream_options, fields.object("stream_options"));
  if (stream_options == nullptr) return OkStatus();
  if (!style.stream) return invalid_field("stream_options", "is allowed only with stream: true");
  const JsonFields options(*stream_options, "stream_options");
  ASSIGN_OR_RETURN(const auto usage, options.boolean("include_usage"));
  ASSIGN_OR_RETURN(const auto continuous, options.boolean("continuous_usage_stats"));
  style.include_usage = usage.value_or(false);
  style.continuous_usage = style.include_usage && continuous.value_or(false);
  return OkStatus();
}

// Chats say whether and how many; completions how many.
Status parse_logprobs(const JsonFields& fields, OpenAiRequest& out) {
  gateway::GenerateRequest& generate = out.generate;
  if (out.style.chat) {
    ASSIGN_OR_RETURN(const auto wanted, fields.boolean("logprobs"));
    generate.logprobs = wanted.value_or(false);
    ASSIGN_OR_RETURN(generate.top_logprobs, fields.integer("top_logprobs"));
    if (generate.top_logprobs.value_or(0) != 0 && !generate.logprobs)
      return invalid_field("top_logprobs", "is allowed only with logprobs: true");
  } else {
    ASSIGN_OR_RETURN(generate.top_logprobs, fields.integer("logprobs"));
    generate.logprobs = generate.top_logprobs.has_value();
    generate.top_logprobs_field = "logprobs";
  }
  out.style.logprobs = generate.logprobs;
  ASSIGN_OR_RETURN(generate.prompt_logprobs, fields.integer("prompt_logprobs"));
  out.style.prompt_logprobs = generate.prompt_logprobs.has_value();
  if (out.style.prompt_logprobs && out.style.stream)
    return invalid_field("prompt_logprobs", "is not available with stream: true");
  ASSIGN_OR_RETURN(const auto echo, fields.boolean("echo"));
  if (echo.value_or(false) && out.style.chat)
    return invalid_field("echo", "is only supported by /v1/completions");
  out.style.echo = generate.echo = echo.value_or(false);
  // The log-probabilities of an echoed answer begin with those of the prompt.
  if (generate.echo && generate.logprobs && !generate.prompt_logprobs)
    generate.prompt_logprobs = generate.top_logprobs;
  return OkStatus();
}

Status parse_treatment(const JsonFields& fields, gateway::GenerateRequest& out) {
  ASSIGN_OR_RETURN(const auto timeout, fields.number("timeout"));
  if (timeout) {
    if (!(*timeout > 0 && *timeout <= kMaxTimeoutSeconds))
      return invalid_field("timeout", "must be a number of seconds above 0");
    out.time_left = static_cast<Nanos>(*timeout * kSecond);
  }
  ASSIGN_OR_RETURN(const auto priority, fields.integer("priority"));
  out.priority = priority.value_or(0);
  ASSIGN_OR_RETURN(const auto salt, fields.text("cache_salt"));
  if (salt && salt->empty()) return invalid_field("cache_salt", "must not be empty");
  out.cache_salt = salt.value_or("");
  ASSIGN_OR_RETURN(const auto name, fields.text("request_id"));
  out.name = name.value_or("");
  // Without effect, but of a known kind.
  RETURN_IF_ERROR(fields.text("user").status());
  return fields.object("metadata").status();
}

}  // namespace

Status parse_common(const JsonFields& fields, const json::object& body, OpenAiRequest& out) {
  gateway::GenerateRequest& generate = out.generate;
  ASSIGN_OR_RETURN(const auto model, fields.text("model"));
  if (model && model->empty()) return invalid_field("model", "must not be empty");
  generate.model = model.value_or("");
  RETURN_IF_ERROR(parse_sampling(fields, generate));
  RETURN_IF_ERROR(parse_stream(fields, out.style));
  RETURN_IF_ERROR(parse_logprobs(fields, out));
  RETURN_IF_ERROR(parse_treatment(fields, generate));
  ASSIGN_OR_RETURN(const auto token_ids, fields.boolean("return_token_ids"));
  out.style.return_token_ids = token_ids.value_or(false);
  ASSIGN_OR_RETURN(const auto as_ids, fields.boolean("return_tokens_as_token_ids"));
  out.style.tokens_as_ids = as_ids.value_or(false);
  list_unknown(body, out);
  return refuse_unsupported(fields, out);
}

}  // namespace conclave::router
