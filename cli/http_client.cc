#include "cli/http_client.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <boost/json.hpp>
#include <chrono>

#include "libs/base/address.h"

namespace conclave::cli {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using Error = boost::system::error_code;

constexpr uint64_t kMaxBodyBytes = 256ull << 20;

Status from_error(const Error& error, const ServerUrl& server) {
  const std::string where = server.host + ":" + server.port;
  if (error == beast::error::timeout) return deadline_exceeded("no answer from " + where + " in time");
  if (error == asio::error::connection_refused) {
    return unavailable("nothing listens at " + where +
                       "; start a cluster with `conclave up --model DIR`, or name its address with --url");
  }
  return unavailable(where + ": " + error.message());
}

// Runs one asynchronous operation at a time, so that every one of them has the stream's timeout.
class Connection {
 public:
  Connection(const ServerUrl& server, Nanos timeout)
      : server_(server), timeout_(timeout), stream_(context_) {}

  Status open() {
    asio::ip::tcp::resolver resolver(context_);
    Error error;
    const auto endpoints = resolver.resolve(server_.host, server_.port, error);
    if (error) return unavailable("cannot resolve " + server_.host + ": " + error.message());
    arm();
    stream_.async_connect(endpoints, [&](Error e, const asio::ip::tcp::endpoint&) { error = e; });
    return finish(error);
  }

  Status write(const http::request<http::string_body>& request) {
    Error error;
    arm();
    http::async_write(stream_, request, [&](Error e, size_t) { error = e; });
    return finish(error);
  }

  template <class Parser>
  Status read_header(Parser& parser) {
    Error error;
    arm();
    http::async_read_header(stream_, buffer_, parser, [&](Error e, size_t) { error = e; });
    return finish(error);
  }

  // Error::need_buffer and the end of the message are not errors here.
  template <class Parser>
  Status read_some(Parser& parser) {
    Error error;
    arm();
    http::async_read_some(stream_, buffer_, parser, [&](Error e, size_t) { error = e; });
    run();
    if (error == http::error::need_buffer || !error) return OkStatus();
    return from_error(error, server_);
  }

  void close() {
    Error ignored;
    stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
    stream_.close();
  }

 private:
  void arm() { stream_.expires_after(std::chrono::nanoseconds(timeout_)); }
  void run() {
    context_.restart();
    context_.run();
  }
  Status finish(const Error& error) {
    run();
    return error ? from_error(error, server_) : OkStatus();
  }

  const ServerUrl& server_;
  Nanos timeout_;
  asio::io_context context_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
};

http::request<http::string_body> make_request(const ServerUrl& server, std::string_view method,
                                              std::string_view path, const std::string& body) {
  http::request<http::string_body> request;
  request.version(11);
  request.method_string({method.data(), method.size()});
  request.target({path.data(), path.size()});
  request.set(http::field::host, server.host + ":" + server.port);
  request.set(http::field::connection, "close");
  if (!server.api_key.empty()) request.set(http::field::authorization, "Bearer " + server.api_key);
  if (!body.empty()) request.set(http::field::content_type, "application/json");
  request.body() = body;
  request.prepare_payload();
  return request;
}

// Cuts a byte stream into the data fields of server-sent events; an event ends with an empty line.
class EventSplitter {
 public:
  // False once on_data said stop or [DONE] came.
  bool feed(std::string_view bytes, const std::function<bool(std::string_view)>& on_data) {
    for (char c : bytes) {
      if (c == '\r') continue;
      if (c != '\n') {
        line_.push_back(c);
        continue;
      }
      if (line_.empty()) {
        if (!data_.empty()) {
          if (data_ == "[DONE]" || !on_data(data_)) return false;
          data_.clear();
        }
      } else if (line_.rfind("data:", 0) == 0) {
        std::string_view value = std::string_view(line_).substr(5);
        if (!value.empty() && value.front() == ' ') value.remove_prefix(1);
        if (!data_.empty()) data_.push_back('\n');
        data_.append(value);
      }
      line_.clear();
    }
    return true;
  }

 private:
  std::string line_;
  std::string data_;
};

}  // namespace

StatusOr<ServerUrl> parse_url(std::string_view text) {
  std::string_view rest = text;
  if (rest.rfind("http://", 0) == 0) rest.remove_prefix(7);
  if (rest.find("://") != std::string_view::npos)
    return invalid_field("--url", "only http:// URLs: '" + std::string(text) + "'");
  while (!rest.empty() && rest.back() == '/') rest.remove_suffix(1);
  if (rest.size() > 3 && rest.substr(rest.size() - 3) == "/v1")
    rest.remove_suffix(3);  // as other clients have it
  // A name or "[v6]" alone has the usual port.
  const size_t host_end = rest.starts_with('[') ? rest.find(']') : 0;
  std::string address(rest);
  if (host_end != std::string_view::npos && rest.find(':', host_end) == std::string_view::npos)
    address += ":8000";
  const auto parsed = parse_host_port(address);
  if (!parsed.ok() || rest.empty() || rest.front() == ':') {
    return invalid_field("--url", "not a server's address: '" + std::string(text) + "' (http://HOST:PORT)");
  }
  ServerUrl url;
  url.host = parsed->host;
  url.port = std::to_string(parsed->port);
  return url;
}

StatusOr<HttpResponse> http_request(const ServerUrl& server, std::string_view method, std::string_view path,
                                    const std::string& body, Nanos timeout) {
  HttpResponse response;
  Connection connection(server, timeout);
  RETURN_IF_ERROR(connection.open());
  RETURN_IF_ERROR(connection.write(make_request(server, method, path, body)));
  http::response_parser<http::string_body> parser;
  parser.body_limit(kMaxBodyBytes);
  while (!parser.is_done()) RETURN_IF_ERROR(connection.read_some(parser));
  response.status = static_cast<int>(parser.get().result_int());
  response.body = std::move(parser.get().body());
  return response;
}

StatusOr<HttpResponse> http_stream(const ServerUrl& server, std::string_view path, const std::string& body,
                                   Nanos timeout, const std::function<bool(std::string_view)>& on_data) {
  HttpResponse response;
  Connection connection(server, timeout);
  RETURN_IF_ERROR(connection.open());
  RETURN_IF_ERROR(connection.write(make_request(server, "POST", path, body)));
  http::response_parser<http::buffer_body> parser;
  parser.body_limit(boost::none);
  RETURN_IF_ERROR(connection.read_header(parser));
  response.status = static_cast<int>(parser.get().result_int());
  const auto type = parser.get()[http::field::content_type];
  const bool events = type.find("text/event-stream") != type.npos;
  EventSplitter splitter;
  char piece[16384];
  while (!parser.is_done()) {
    parser.get().body().data = piece;
    parser.get().body().size = sizeof(piece);
    RETURN_IF_ERROR(connection.read_some(parser));
    const std::string_view bytes(piece, sizeof(piece) - parser.get().body().size);
    if (events) {
      if (!splitter.feed(bytes, on_data)) break;
    } else {
      response.body.append(bytes);
      if (response.body.size() > kMaxBodyBytes) return resource_exhausted("the server's answer is too large");
    }
  }
  connection.close();
  return response;
}

Status error_from(const HttpResponse& response) {
  std::string message = "the server answered " + std::to_string(response.status);
  Error error;
  const auto value = boost::json::parse(response.body, error);
  if (!error && value.is_object()) {
    if (const auto* inner = value.as_object().if_contains("error"); inner && inner->is_object()) {
      if (const auto* text = inner->as_object().if_contains("message"); text && text->is_string()) {
        message += ": " + std::string(text->as_string());
      }
    }
  } else if (!response.body.empty()) {
    message += ": " + response.body.substr(0, 200);
  }
  if (response.status == 404) return not_found(message);
  if (response.status >= 400 && response.status < 500) return invalid_argument(message);
  return unavailable(message);
}

}  // namespace conclave::cli
