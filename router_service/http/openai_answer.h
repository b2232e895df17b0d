// One completion request between its connection and its generations.
#pragma once

#include <functional>
#include <memory>

#include "libs/http/http_server.h"
#include "router_service/gateway/gateway.h"
#include "router_service/http/openai_request.h"

namespace conclave::router {

// Starts the generations of `request` (one for each of its prompts) and answers on `exchange`. To be called
// on the connection. `done` is told the HTTP status, once.
void answer_openai(std::shared_ptr<http::Exchange> exchange, OpenAiRequest request, gateway::Gateway& gateway,
                   std::function<void(int status)> done);

}  // namespace conclave::router
