#include "router_service/http/openai_response.h"

#include <boost/json.hpp>
#include <cstdio>
#include <utility>

#include "libs/base/clock.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

std::string hex_id(RequestId id) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%016llx%016llx", static_cast<unsigned long long>(id.hi),
                static_cast<unsigned long long>(id.lo));
  return buffer;
}

json::object usage_json(const gateway::Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", static_cast<uint64_t>(usage.prompt_tokens) + usage.completion_tokens}};
}

json::array tokens_json(const std::vector<TokenId>& tokens) {
  json::array out;
  out.reserve(tokens.size());
  for (const TokenId token : tokens) out.push_back(static_cast<uint64_t>(token));
  return out;
}

std::string event(const json::object& document) { return "data: " + json::serialize(document) + "\n\n"; }

json::object error_json(int status, std::string_view message, std::string_view param, std::string_view code) {
  json::object error;
  error["message"] = json::string_view(message.data(), message.size());
  error["type"] = status == 404   ? "not_found_error"
                  : status == 401 ? "authentication_error"
                  : status == 403 ? "permission_error"
                  : status == 429 ? "rate_limit_error"
                  : status < 500  ? "invalid_request_error"
                  : status == 503 ? "service_unavailable_error"
                  : status == 504 ? "timeout_error"
                                  : "server_error";
  error["param"] =
      param.empty() ? json::value(nullptr) : json::value(json::string_view(param.data(), param.size()));
  error["code"] =
      code.empty() ? json::value(nullptr) : json::value(json::string_view(code.data(), code.size()));
  return {{"error", std::move(error)}};
}

json::object error_json(const Status& status) {
  const std::string field = field_of(status);
  std::string message = message_of(status);
  if (!field.empty() && status.code() == StatusCode::kInvalidArgument) message = field + ": " + message;
  return error_json(http_status_of(status), message, field, gateway::code_of(status));
}

}  // namespace

int http_status_of(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return 200;
    case StatusCode::kInvalidArgument:
    case StatusCode::kFailedPrecondition:
      return 400;
    case StatusCode::kNotFound:
      return 404;
    case StatusCode::kCancelled:
      return 499;
    case StatusCode::kUnauthenticated:
      return 401;
    case StatusCode::kPermissionDenied:
      return 403;
    case StatusCode::kResourceExhausted:
      return gateway::code_of(status) == gateway::kRateLimitExceeded ? 429 : 503;
    case StatusCode::kUnavailable:
      return 503;
    case StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

std::string error_body(const Status& status) { return json::serialize(error_json(status)); }

http::Response error_response(const Status& status) {
  http::Response response;
  response.status = http_status_of(status);
  response.body = error_body(status);
  if (response.status == 503)
    response.headers.emplace_back("retry-after", status.code() == StatusCode::kUnavailable ? "2" : "1");
  return response;
}

http::Response http_error(int status, std::string_view message) {
  http::Response response;
  response.status = status;
  response.body = json::serialize(error_json(status, message, "", ""));
  if (status == 503) response.headers.emplace_back("retry-after", "1");
  return response;
}

std::string_view finish_name(FinishReason finish) {
  return finish == FinishReason::kLength ? "length" : "stop";
}

OpenAiWriter::OpenAiWriter(bool chat, bool include_usage, bool return_token_ids, RequestId id,
                           std::string model)
    : id_((chat ? "chatcmpl-" : "cmpl-") + hex_id(id)),
      chat_(chat),
      include_usage_(include_usage),
      return_token_ids_(return_token_ids),
      created_(wall_now_ms() / 1000),
      model_(std::move(model)) {}

namespace {

json::object document(const std::string& id, std::string_view kind, int64_t created, const std::string& model,
                      json::object choice) {
  json::object out;
  out["id"] = id;
  out["object"] = json::string_view(kind.data(), kind.size());
  out["created"] = created;
  out["model"] = model;
  out["choices"] = json::array{std::move(choice)};
  return out;
}

}  // namespace

std::string OpenAiWriter::whole(const std::string& text, const std::vector<TokenId>& tokens,
                                const std::vector<TokenId>& prompt, const gateway::Update& end) const {
  json::object choice;
  choice["index"] = 0;
  if (chat_)
    choice["message"] = json::object{{"role", "assistant"}, {"content", text}, {"refusal", nullptr}};
  else
    choice["text"] = text;
  choice["logprobs"] = nullptr;
  const std::string_view finish = finish_name(end.finish);
  choice["finish_reason"] = json::string_view(finish.data(), finish.size());
  if (return_token_ids_) {
    choice["token_ids"] = tokens_json(tokens);
    choice["prompt_token_ids"] = tokens_json(prompt);
  }
  json::object out =
      document(id_, chat_ ? "chat.completion" : "text_completion", created_, model_, std::move(choice));
  out["usage"] = usage_json(end.usage);
  return json::serialize(out);
}

namespace {
constexpr std::string_view kChatChunk = "chat.completion.chunk";
constexpr std::string_view kTextChunk = "text_completion";
}  // namespace

std::string OpenAiWriter::first_event(const std::vector<TokenId>& prompt) const {
  if (!chat_ && !return_token_ids_) return "";
  json::object choice;
  choice["index"] = 0;
  if (chat_)
    choice["delta"] = json::object{{"role", "assistant"}, {"content", ""}};
  else
    choice["text"] = "";
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = nullptr;
  if (return_token_ids_) choice["prompt_token_ids"] = tokens_json(prompt);
  json::object out = document(id_, chat_ ? kChatChunk : kTextChunk, created_, model_, std::move(choice));
  if (include_usage_) out["usage"] = nullptr;
  return event(out);
}

std::string OpenAiWriter::text_event(const std::string& text, const std::vector<TokenId>& tokens) const {
  if (text.empty() && !(return_token_ids_ && !tokens.empty())) return "";
  json::object choice;
  choice["index"] = 0;
  if (chat_)
    choice["delta"] = json::object{{"content", text}};
  else
    choice["text"] = text;
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = nullptr;
  if (return_token_ids_) choice["token_ids"] = tokens_json(tokens);
  json::object out = document(id_, chat_ ? kChatChunk : kTextChunk, created_, model_, std::move(choice));
  if (include_usage_) out["usage"] = nullptr;
  return event(out);
}

std::string OpenAiWriter::end_events(const gateway::Update& end) const {
  json::object choice;
  choice["index"] = 0;
  if (chat_)
    choice["delta"] = json::object{};
  else
    choice["text"] = "";
  choice["logprobs"] = nullptr;
  const std::string_view finish = finish_name(end.finish);
  choice["finish_reason"] = json::string_view(finish.data(), finish.size());
  json::object last = document(id_, chat_ ? kChatChunk : kTextChunk, created_, model_, std::move(choice));
  if (include_usage_) last["usage"] = nullptr;
  std::string out = event(last);
  if (include_usage_) {
    json::object usage = document(id_, chat_ ? kChatChunk : kTextChunk, created_, model_, {});
    usage["choices"] = json::array{};
    usage["usage"] = usage_json(end.usage);
    out += event(usage);
  }
  return out + "data: [DONE]\n\n";
}

std::string OpenAiWriter::error_events(const Status& status) {
  return "data: " + error_body(status) + "\n\ndata: [DONE]\n\n";
}

}  // namespace conclave::router
