#include "router_service/http/openai_response.h"

#include <boost/json.hpp>
#include <utility>

#include "router_service/door/tenant.h"
#include "router_service/gateway/request.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

json::object error_json(int status, std::string_view message, std::string_view param, std::string_view code) {
  json::object error;
  error["message"] = json::string_view(message.data(), message.size());
  error["type"] = status == 404   ? "not_found_error"
                  : status == 401 ? "authentication_error"
                  : status == 403 ? "permission_error"
                  : status == 429 ? "rate_limit_error"
                  : status < 500  ? "invalid_request_error"
                  : status == 503 ? "service_unavailable_error"
                  : status == 504 ? "timeout_error"
                                  : "server_error";
  error["param"] =
      param.empty() ? json::value(nullptr) : json::value(json::string_view(param.data(), param.size()));
  error["code"] =
      code.empty() ? json::value(nullptr) : json::value(json::string_view(code.data(), code.size()));
  return {{"error", std::move(error)}};
}

json::object error_json(const Status& status) {
  const std::string field = field_of(status);
  std::string message = message_of(status);
  // Some messages begin with their field already.
  if (!field.empty() && status.code() == StatusCode::kInvalidArgument && !message.starts_with(field))
    message = field + ": " + message;
  return error_json(http_status_of(status), message, field, gateway::code_of(status));
}

}  // namespace

int http_status_of(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return 200;
    case StatusCode::kInvalidArgument:
    case StatusCode::kFailedPrecondition:
      return 400;
    case StatusCode::kNotFound:
      return 404;
    case StatusCode::kCancelled:
      return 499;
    case StatusCode::kUnauthenticated:
      return 401;
    case StatusCode::kPermissionDenied:
      return 403;
    case StatusCode::kResourceExhausted:
      return gateway::code_of(status) == gateway::kRateLimitExceeded ? 429 : 503;
    case StatusCode::kUnavailable:
      return 503;
    case StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

std::string error_body(const Status& status) { return json::serialize(error_json(status)); }

http::Response error_response(const Status& status) {
  http::Response response;
  response.status = http_status_of(status);
  response.body = error_body(status);
  if (response.status == 503) {
    const Nanos told = retry_after_of(status);
    const Nanos usual = (status.code() == StatusCode::kUnavailable ? 2 : 1) * kSecond;
    response.headers.emplace_back("retry-after", door::retry_seconds(told > 0 ? told : usual));
  }
  return response;
}

http::Response http_error(int status, std::string_view message) {
  http::Response response;
  response.status = status;
  response.body = json::serialize(error_json(status, message, "", ""));
  if (status == 503) response.headers.emplace_back("retry-after", "1");
  return response;
}

}  // namespace conclave::router
