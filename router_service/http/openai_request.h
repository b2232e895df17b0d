// The bodies of /v1/completions and /v1/chat/completions. A field that would change the answer and is not
// supported is refused by name, never ignored; fields without effect here (user, metadata ...) and unknown
// ones are.
#pragma once

#include <string_view>

#include "libs/base/status.h"
#include "router_service/gateway/request.h"

namespace conclave::router {

struct OpenAiRequest {
  gateway::GenerateRequest generate;
  bool chat = false;
  bool stream = false;
  bool include_usage = false;     // stream_options.include_usage
  bool return_token_ids = false;  // an extension: token_ids beside the text
};

// INVALID_ARGUMENT names the field. Whether values fit the model is the gateway's business.
StatusOr<OpenAiRequest> parse_completion(std::string_view body);
StatusOr<OpenAiRequest> parse_chat_completion(std::string_view body);

}  // namespace conclave::router
