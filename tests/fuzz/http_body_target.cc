#include "tests/fuzz/http_body_target.h"

#include <variant>

#include "libs/base/check.h"
#include "libs/text/utf8.h"
#include "router_service/http/openai_request.h"

namespace conclave::fuzz {

bool try_http_body(std::string_view body, bool chat) {
  const auto parsed = chat ? router::parse_chat_completion(body) : router::parse_completion(body);
  if (!parsed.ok()) {
    CONCLAVE_CHECK(parsed.status().code() == StatusCode::kInvalidArgument);
    CONCLAVE_CHECK(!field_of(parsed.status()).empty());
    CONCLAVE_CHECK(!message_of(parsed.status()).empty());
    return false;
  }
  const gateway::GenerateRequest& request = parsed->generate;
  CONCLAVE_CHECK(parsed->chat == chat);
  CONCLAVE_CHECK(parsed->stream || !parsed->include_usage);
  CONCLAVE_CHECK(std::holds_alternative<gateway::ChatPrompt>(request.prompt) == chat);
  if (const auto* text = std::get_if<gateway::TextPrompt>(&request.prompt))
    CONCLAVE_CHECK(text::is_valid_utf8(text->text));
  if (const auto* document = std::get_if<gateway::ChatPrompt>(&request.prompt)) {
    CONCLAVE_CHECK(document->document_json.size() <= 6 * body.size() + 1024);  // escapes at most; no blow-up
    CONCLAVE_CHECK(text::is_valid_utf8(document->document_json));
  }
  for (const std::string& stop : request.stop) CONCLAVE_CHECK(text::is_valid_utf8(stop));
  return true;
}

}  // namespace conclave::fuzz
