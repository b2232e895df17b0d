// The errors that the OpenAI-compatible API answers with.
#pragma once

#include <string>
#include <string_view>

#include "libs/base/status.h"
#include "libs/http/http_server.h"

namespace conclave::router {

// {"error":{message,type,param,code}} with the HTTP status of its code; 503 carries Retry-After.
http::Response error_response(const Status& status);
// The same body for errors that are HTTP's own.
http::Response http_error(int status, std::string_view message);
// Only the body, as mid-stream errors need it.
std::string error_body(const Status& status);
int http_status_of(const Status& status);

}  // namespace conclave::router
