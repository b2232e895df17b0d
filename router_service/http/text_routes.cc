#include "router_service/http/text_routes.h"

#include <boost/json.hpp>
#include <utility>

#include "libs/text/utf8.h"
#include "router_service/http/openai_response.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

constexpr Nanos kTemplateTime = 30 * kSecond;  // for rendering messages; the template has its own limit below

Status unknown_model(std::string_view wanted) {
  return gateway::with_code(
      with_field(not_found("the model \"" + std::string(wanted.substr(0, 256)) + "\" is not served here"),
                 "model"),
      "model_not_found");
}

StatusOr<std::vector<TokenId>> encode(const gateway::Gateway& gateway, const TokenizeRequest& request) {
  if (const auto* text = std::get_if<gateway::TextPrompt>(&request.prompt))
    return gateway.text().encode(text->text, request.allow_special_tokens);
  const auto& chat = std::get<gateway::ChatPrompt>(request.prompt);
  auto encoded = gateway.text().encode_chat(chat, steady_now() + kTemplateTime);
  if (!encoded.ok()) {
    if (encoded.status().code() == StatusCode::kDeadlineExceeded)
      return resource_exhausted(message_of(encoded.status()) + "; retry later");
    return field_of(encoded.status()).empty() ? with_field(encoded.status(), "messages") : encoded.status();
  }
  return std::move(encoded->tokens);
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

http::Response tokenize(const gateway::Gateway& gateway, std::string_view body,
                        const gateway::AdmissionLimits& limits) {
  const auto request = parse_tokenize(body, limits);
  if (!request.ok()) return error_response(request.status());
  if (!request->model.empty() && request->model != gateway.model().name)
    return error_response(unknown_model(request->model));
  const auto tokens = encode(gateway, *request);
  if (!tokens.ok()) return error_response(tokens.status());
  json::array ids;
  json::array strings;
  ids.reserve(tokens->size());
  for (const TokenId token : *tokens) {
    ids.push_back(static_cast<uint64_t>(token));
    if (request->return_token_strs)
      strings.push_back(json::string(text::replace_invalid_utf8(gateway.text().token_bytes(token))));
  }
  json::object out;
  out["count"] = tokens->size();
  out["max_model_len"] = gateway.context_length();
  out["tokens"] = std::move(ids);
  if (request->return_token_strs)
    out["token_strs"] = std::move(strings);
  else
    out["token_strs"] = nullptr;
  return {200, "application/json", {}, json::serialize(out)};
}

http::Response detokenize(const gateway::Gateway& gateway, std::string_view body) {
  const auto request = parse_detokenize(body);
  if (!request.ok()) return error_response(request.status());
  if (!request->model.empty() && request->model != gateway.model().name)
    return error_response(unknown_model(request->model));
  std::vector<TokenId> tokens;
  tokens.reserve(request->tokens.size());
  for (const int64_t id : request->tokens) {
    if (id < 0 || id >= static_cast<int64_t>(gateway.model().vocab_size))
      return error_response(invalid_field("tokens", "the id " + std::to_string(id) +
                                                        " is not in the vocabulary of " +
                                                        std::to_string(gateway.model().vocab_size)));
    tokens.push_back(static_cast<TokenId>(id));
  }
  const json::object out{{"prompt", json::string(gateway.text().decode(tokens, /*skip_special=*/false))}};
  return {200, "application/json", {}, json::serialize(out)};
}

http::Response list_models(const gateway::Gateway& gateway, std::string_view wanted, int64_t created) {
  const std::string& name = gateway.model().name;
  const json::object model{{"id", name},
                           {"object", "model"},
                           {"created", created},
                           {"owned_by", "conclave"},
                           {"root", name},
                           {"parent", nullptr},
                           {"max_model_len", gateway.context_length()}};
  if (wanted.empty())
    return {200,
            "application/json",
            {},
            json::serialize(json::object{{"object", "list"}, {"data", json::array{model}}})};
  if (wanted == name) return {200, "application/json", {}, json::serialize(model)};
  return error_response(unknown_model(text::replace_invalid_utf8(wanted)));
}

std::string percent_decoded(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const int high = text[i] == '%' && i + 2 < text.size() ? hex_digit(text[i + 1]) : -1;
    const int low = high >= 0 ? hex_digit(text[i + 2]) : -1;
    if (low < 0) {
      out += text[i];
      continue;
    }
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return out;
}

}  // namespace conclave::router
