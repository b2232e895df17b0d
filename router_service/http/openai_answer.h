// One completion request between its connection and its generations.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "libs/http/http_server.h"
#include "router_service/gateway/gateway.h"
#include "router_service/http/openai_request.h"

namespace conclave::router {

// Starts the generations of `request` (one for each of its prompts) and answers on `exchange`. To be called
// on the connection. `done` is told the HTTP status, once.
void answer_openai(std::shared_ptr<http::Exchange> exchange, OpenAiRequest request, gateway::Gateway& gateway,
                   std::function<void(int status)> done);

// Answers with the events of a resumable stream behind the first `after` ones, as whoever began it would have
// sent them.
void resume_openai(std::shared_ptr<http::Exchange> exchange, std::string_view id, uint64_t after,
                   gateway::Origin origin, const gateway::AdmissionLimits& limits, gateway::Gateway& gateway,
                   std::function<void(int status)> done);

}  // namespace conclave::router
