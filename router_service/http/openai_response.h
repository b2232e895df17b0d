// Bodies that the OpenAI-compatible API answers with.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"
#include "libs/http/http_server.h"
#include "router_service/gateway/generation.h"

namespace conclave::router {

// {"error":{message,type,param,code}} with the HTTP status of its code; 503 carries Retry-After.
http::Response error_response(const Status& status);
// The same body for errors that are HTTP's own.
http::Response http_error(int status, std::string_view message);
// Only the body, as mid-stream errors need it.
std::string error_body(const Status& status);
int http_status_of(const Status& status);

// Writes one answer's documents; the identifying fields are the same in all of them.
class OpenAiWriter {
 public:
  OpenAiWriter(bool chat, bool include_usage, bool return_token_ids, RequestId id, std::string model);

  // A complete, unstreamed answer.
  std::string whole(const std::string& text, const std::vector<TokenId>& tokens,
                    const std::vector<TokenId>& prompt, const gateway::Update& end) const;
  // Server-sent events, each with its "data: " and blank line.
  std::string first_event(
      const std::vector<TokenId>& prompt) const;  // empty for completions without token ids
  std::string text_event(const std::string& text, const std::vector<TokenId>& tokens) const;
  std::string end_events(const gateway::Update& end) const;  // finish reason, usage where asked for, [DONE]
  static std::string error_events(const Status& status);

 private:
  std::string id_;
  const bool chat_;
  const bool include_usage_;
  const bool return_token_ids_;
  const int64_t created_;
  const std::string model_;
};

std::string_view finish_name(FinishReason finish);

}  // namespace conclave::router
