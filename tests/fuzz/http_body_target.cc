#include "tests/fuzz/http_body_target.h"

#include <variant>

#include "libs/base/check.h"
#include "libs/text/conversation/json_text.h"
#include "libs/text/utf8.h"
#include "router_service/http/openai_request.h"

namespace conclave::fuzz {

namespace {

// False for a refusal, which must be one that helps.
bool accepted(const Status& status) {
  if (status.ok()) return true;
  CONCLAVE_CHECK(status.code() == StatusCode::kInvalidArgument);
  CONCLAVE_CHECK(!field_of(status).empty());
  CONCLAVE_CHECK(!message_of(status).empty());
  return false;
}

}  // namespace

bool try_text_body(std::string_view body, bool tokenize) {
  if (!tokenize) return accepted(router::parse_detokenize(body).status());
  const auto parsed = router::parse_tokenize(body);
  if (!accepted(parsed.status())) return false;
  if (const auto* text = std::get_if<gateway::TextPrompt>(&parsed->prompt))
    CONCLAVE_CHECK(text::is_valid_utf8(text->text));
  return true;
}

bool try_http_body(std::string_view body, bool chat) {
  const auto parsed = chat ? router::parse_chat_completion(body) : router::parse_completion(body);
  if (!accepted(parsed.status())) return false;
  const gateway::GenerateRequest& request = parsed->generate;
  CONCLAVE_CHECK(parsed->style.chat == chat);
  CONCLAVE_CHECK(parsed->style.stream || !parsed->style.include_usage);
  CONCLAVE_CHECK(parsed->more_prompts.size() < gateway::AdmissionLimits().max_prompts);
  CONCLAVE_CHECK(parsed->unknown.size() <= router::OpenAiRequest::kMaxUnknown);
  CONCLAVE_CHECK(std::holds_alternative<gateway::ChatPrompt>(request.prompt) == chat);
  if (const auto* text = std::get_if<gateway::TextPrompt>(&request.prompt))
    CONCLAVE_CHECK(text::is_valid_utf8(text->text));
  if (const auto* conversation = std::get_if<gateway::ChatPrompt>(&request.prompt)) {
    // Passed on as it was written: no blow-up.
    const text::ChatRequest& said = conversation->request;
    for (const std::string* json : {&said.messages_json, &said.tools_json, &said.template_kwargs_json}) {
      CONCLAVE_CHECK(json->size() <= body.size() + 64);
      CONCLAVE_CHECK(text::is_valid_utf8(*json));
      CONCLAVE_CHECK(json->empty() || text::read_json(*json).has_value());
    }
    CONCLAVE_CHECK(conversation->text_bytes <= body.size());
    CONCLAVE_CHECK(said.tools_json.empty() == (request.tools == nullptr));
  }
  for (const std::string& stop : request.stop) CONCLAVE_CHECK(text::is_valid_utf8(stop));
  return true;
}

}  // namespace conclave::fuzz
