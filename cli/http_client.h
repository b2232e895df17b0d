// A small blocking HTTP/1.1 client for the command line: one request a connection, plain or as a stream of
// server-sent events. Threads: each call is independent; several threads may call at once.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "libs/base/clock.h"
#include "libs/base/status.h"

namespace conclave::cli {

struct ServerUrl {
  std::string host;
  std::string port;
  std::string api_key{};  // sent as a bearer token; empty: none
};

// "http://HOST:PORT", "HOST:PORT" or "HOST"; the error names the flag --url.
StatusOr<ServerUrl> parse_url(std::string_view text);

struct HttpResponse {
  int status = 0;
  std::string body;
};

// UNAVAILABLE when nothing listens there, DEADLINE_EXCEEDED past `timeout` between two pieces of data.
StatusOr<HttpResponse> http_request(const ServerUrl& server, std::string_view method, std::string_view path,
                                    const std::string& body, Nanos timeout);

// POSTs `body` and calls on_data with the data of each event until the server ends, "[DONE]" came, or on_data
// returns false (then the connection is closed at once, which cancels the request). An answer that is not an
// event stream comes back as the response with its body.
StatusOr<HttpResponse> http_stream(const ServerUrl& server, std::string_view path, const std::string& body,
                                   Nanos timeout, const std::function<bool(std::string_view)>& on_data);

// The message of an OpenAI-style error body, with the HTTP status, as a Status.
Status error_from(const HttpResponse& response);

}  // namespace conclave::cli
