// The fields that completions and chats have in common. Private to the parsers: it brings Boost.JSON in.
#pragma once

#include "libs/base/status.h"
#include "router_service/http/json_fields.h"
#include "router_service/http/openai_request.h"

namespace conclave::router {

// Sampling, ends, log-probabilities, streaming; refuses what cannot be honoured and lists unknown names.
// `out.style.chat` is set.
Status parse_common(const JsonFields& fields, const boost::json::object& body, OpenAiRequest& out);

}  // namespace conclave::router
