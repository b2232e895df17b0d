// The routes that generate nothing: /tokenize, /detokenize and /v1/models.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "libs/http/http_server.h"
#include "router_service/gateway/gateway.h"
#include "router_service/http/openai_request.h"

namespace conclave::router {

// Both may take milliseconds: on a text thread.
http::Response tokenize(const gateway::Gateway& gateway, std::string_view body,
                        const gateway::AdmissionLimits& limits);
http::Response detokenize(const gateway::Gateway& gateway, std::string_view body);

// All models (`wanted` empty) or one; `created` in seconds since 1970.
http::Response list_models(const gateway::Gateway& gateway, std::string_view wanted, int64_t created);

// A path's percent escapes; malformed ones stay as they are.
std::string percent_decoded(std::string_view text);

}  // namespace conclave::router
