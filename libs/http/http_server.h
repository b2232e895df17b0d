// A small HTTP/1.1 server: requests in, whole or streamed responses out. It knows nothing of what it serves;
// the router and the operations endpoints share it.
//
// Threading: a few I/O threads of its own; each connection's calls (handler, source, gone callback) come one
// at a time. A handler must not block: it hands work elsewhere and answers later, from any thread, through
// the Exchange.
//
// Bounds: header and body bytes, connections, idle and write times, bytes buffered per connection
// (HttpLimits). Input never ends the server: malformed requests get 400, too large ones 413 and 431, slow
// ones 408, and the connection closes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"

namespace conclave::http {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct Request {
  std::string id;  // the client's x-request-id where it is short and printable, else drawn; returned with the
                   // response
  std::string method;  // as sent: "GET"
  std::string path;    // of the target, without the query
  std::string query;   // after '?', undecoded
  Headers headers;     // names in lower case
  std::string body;
  bool from_loopback = false;  // the connection comes from this host's loopback interface

  // The first header of that (lower-case) name; empty when absent.
  std::string_view header(std::string_view name) const;
};

struct Response {
  int status = 200;
  std::string content_type = "application/json";
  Headers headers;
  std::string body;
};

// Where a streamed body comes from. Called on the connection, one call at a time.
class StreamSource {
 public:
  virtual ~StreamSource() = default;
  // Appends what there is to `out`, nothing when nothing is there yet; false after the last of it. Called
  // after each wake() and whenever earlier bytes have been written, but not while write_buffer_bytes are
  // waiting for the client.
  virtual bool pull(std::string& out) = 0;
};

// One request's response side. Any thread. Exactly one of respond() and stream(), once. An exchange that is
// dropped without either answers 500.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual void respond(Response response) = 0;
  // Sends the head (its body is ignored), then pulls.
  virtual void stream(Response head, std::shared_ptr<StreamSource> source) = 0;
  // The source has more. Cheap; may be called from threads that must not block.
  virtual void wake() = 0;
  // Runs `task` on the connection, after what it does now; dropped when the server has stopped.
  virtual void post(std::function<void()> task) = 0;
  // Adds headers to the response, whatever it will be. Before respond() and stream().
  virtual void add_headers(Headers headers) = 0;
  // Called once on the connection if the client goes away (or is cut off for reading too slowly) before its
  // response is complete; at once when that already happened. Dropped afterwards.
  virtual void on_client_gone(std::function<void()> gone) = 0;
};

// The request lives until the handler returns; move out of it what is needed later.
using Handler = std::function<void(Request& request, std::shared_ptr<Exchange> exchange)>;
// Looks at a request before its body is read; an answer refuses it, and the connection closes after it. On
// the connection; must not block.
using HeadCheck = std::function<std::optional<Response>(const Request& head)>;
// Makes the body of the server's own errors (400, 408, 413, 431, 500, 503).
using ErrorBody = std::function<Response(int status, std::string_view message)>;

struct HttpLimits {
  uint32_t max_header_bytes = 32 << 10;
  uint64_t max_body_bytes = 16ull << 20;
  uint32_t max_connections = 2048;         // beyond: 503 and close
  uint32_t write_buffer_bytes = 64 << 10;  // of a stream, not yet taken by the client's socket
  uint32_t pipelined_bytes = 64 << 10;     // of requests sent ahead; beyond, the socket is not read
  Nanos header_timeout = 60 * kSecond;     // idle keep-alive, and until a header is complete
  Nanos body_timeout = 60 * kSecond;       // until a body is complete
  Nanos write_timeout = 60 * kSecond;      // without a byte taken by the client
  // An event stream (text/event-stream) that was silent for so long gets a comment, so that nothing on the
  // way takes it for dead; 0: never.
  Nanos sse_ping_interval = 0;
};

struct HttpServerOptions {
  std::string listen = "127.0.0.1:0";  // "host:port", "[::1]:port"; port 0 takes a free one
  unsigned threads = 1;
  HttpLimits limits;
  ErrorBody error_body;  // none: text/plain
  HeadCheck head_check;  // none: every request's body is read
};

// What the server counted; a snapshot.
struct HttpCounts {
  uint64_t connections_opened = 0;
  uint64_t connections_refused = 0;  // at max_connections
  uint64_t connections_open = 0;
  uint64_t requests = 0;
  uint64_t malformed = 0;     // 400, 408, 413 and 431 of the server itself
  uint64_t clients_gone = 0;  // before their response was complete
  uint64_t slow_clients = 0;  // cut off at write_timeout
  uint64_t sse_pings = 0;
  // Of the malformed ones:
  uint64_t bodies_too_large = 0;
  uint64_t headers_too_large = 0;
};

class HttpServer {
 public:
  // A port in use or a bad address is a one-line status that says what to do.
  static StatusOr<std::unique_ptr<HttpServer>> start(HttpServerOptions options, Handler handler);
  // The same for small requests that are answered at once, such as operators send: bodies and headers are
  // bounded by a few KiB, whatever the options say.
  static StatusOr<std::unique_ptr<HttpServer>> start_small(HttpServerOptions options,
                                                           std::function<Response(const Request&)> answer);
  // Stops at once: closes every connection, joins the threads.
  virtual ~HttpServer() = default;

  virtual std::string address() const = 0;  // "host:port" as really bound
  virtual uint16_t port() const = 0;
  virtual HttpCounts counts() const = 0;
  // Runs the task soon on one of its threads; dropped when the server ends first.
  virtual void post(std::function<void()> task) = 0;
  // Takes no new connection, closes idle ones, and each other one after the response in progress. Any thread.
  virtual void drain() = 0;
};

// The standard phrase for a status code.
std::string_view reason_phrase(int status);

}  // namespace conclave::http
