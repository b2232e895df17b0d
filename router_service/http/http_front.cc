#include "router_service/http/http_front.h"

#include <new>
#include <utility>

#include "libs/telemetry/log.h"
#include "router_service/first_time.h"
#include "router_service/http/openai_answer.h"
#include "router_service/http/openai_request.h"
#include "router_service/http/openai_response.h"
#include "router_service/http/text_routes.h"

namespace conclave::router {
namespace {

constexpr size_t kLargeBody = 64 << 10;  // bytes; larger ones are parsed off the I/O threads

using gateway::Gateway;

class HttpFrontImpl : public HttpFront {
 public:
  HttpFrontImpl(HttpFrontOptions options, Gateway& gateway)
      : options_(std::move(options)), gateway_(gateway), started_(wall_now_ms() / 1000) {}

  Status listen() {
    http::HttpServerOptions server;
    server.listen = options_.listen;
    server.threads = options_.threads;
    server.limits = options_.limits;
    server.error_body = [this](int status, std::string_view message) {
      count("other", status);
      return http_error(status, message);
    };
    auto started = http::HttpServer::start(
        std::move(server), [this](http::Request& request, std::shared_ptr<http::Exchange> exchange) {
          handle(request, std::move(exchange));
        });
    if (!started.ok()) return started.status();
    server_ = std::move(started).value();
    return OkStatus();
  }

  std::string address() const override { return server_->address(); }
  uint16_t port() const override { return server_->port(); }
  http::HttpCounts counts() const override { return server_->counts(); }
  void drain() override { server_->drain(); }

 private:
  void count(std::string_view route, int status) const {
    if (options_.on_answer) options_.on_answer(route, status);
  }

  void reply(std::string_view route, http::Exchange& exchange, http::Response response) const {
    count(route, response.status);
    exchange.respond(std::move(response));
  }

  void handle(http::Request& request, std::shared_ptr<http::Exchange> exchange) {
    const std::string_view path = request.path;
    const bool completions = path == "/v1/completions";
    const bool chat = path == "/v1/chat/completions";
    constexpr std::string_view kModels = "/v1/models";
    const bool models =
        path == kModels || (path.starts_with("/v1/models/") && path.size() > kModels.size() + 1);
    const bool text = path == "/tokenize" || path == "/detokenize";
    const std::string_view route = completions || chat || text || path == "/health" ? path
                                   : models                                         ? kModels
                                                                                    : "other";
    if (route == "other")
      return reply(route, *exchange,
                   http_error(404, "there is no " + std::string(path.substr(0, 256)) + " here"));

    const bool posts = completions || chat || text;
    const std::string_view allowed = posts ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
    if (request.method == "OPTIONS")
      return reply(route, *exchange, {204, "", {{"allow", std::string(allowed)}}, ""});
    const bool fits = posts ? request.method == "POST" : request.method == "GET" || request.method == "HEAD";
    if (!fits) {
      http::Response refusal = http_error(405, std::string(path) + " takes " + std::string(allowed));
      refusal.headers.emplace_back("allow", allowed);
      return reply(route, *exchange, std::move(refusal));
    }
    if (path == "/health") return reply(route, *exchange, health());
    if (models)
      return reply(
          route, *exchange,
          list_models(gateway_, path == kModels ? "" : percent_decoded(path.substr(kModels.size() + 1)),
                      started_));
    if (text) return on_text_thread(route, request, std::move(exchange));

    if (request.body.size() <= kLargeBody)
      return generate(route, std::move(exchange), parse(chat, request.body));
    // Parsing a large body takes long enough to hold up other streams of this thread.
    const auto body = std::make_shared<const std::string>(std::move(request.body));
    const bool taken = gateway_.run_on_text_thread([this, chat, body, exchange, r = std::string(route)] {
      auto parsed = std::make_shared<StatusOr<OpenAiRequest>>(parse_within_memory(chat, *body));
      exchange->post([this, r, exchange, parsed] { generate(r, exchange, std::move(*parsed)); });
    });
    if (!taken)
      reply(route, *exchange,
            error_response(resource_exhausted("too many requests wait to be read; retry later")));
  }

  StatusOr<OpenAiRequest> parse(bool chat, std::string_view body) const {
    return chat ? parse_chat_completion(body, options_.openai) : parse_completion(body, options_.openai);
  }

  // Off the connections' threads nobody else catches what one body's size may cause.
  StatusOr<OpenAiRequest> parse_within_memory(bool chat, std::string_view body) const {
    try {
      return parse(chat, body);
    } catch (const std::bad_alloc&) {
      return resource_exhausted("there is not enough memory for this request");
    }
  }

  void generate(std::string_view route, std::shared_ptr<http::Exchange> exchange,
                StatusOr<OpenAiRequest> parsed) {
    if (!parsed.ok()) return reply(route, *exchange, error_response(parsed.status()));
    for (const std::string& name : parsed->unknown)
      if (unknown_fields_(name))
        log_warn("requests have a field that nobody here knows; it is ignored", {{"field", name}});
    answer_openai(std::move(exchange), std::move(*parsed), gateway_,
                  [this, r = std::string(route)](int status) { count(r, status); });
  }

  // /tokenize and /detokenize.
  void on_text_thread(std::string_view route, http::Request& request,
                      std::shared_ptr<http::Exchange> exchange) {
    const auto body = std::make_shared<const std::string>(std::move(request.body));
    const bool taken = gateway_.run_on_text_thread([this, body, exchange, r = std::string(route)] {
      http::Response response;
      try {
        response =
            r == "/tokenize" ? tokenize(gateway_, *body, options_.openai) : detokenize(gateway_, *body);
      } catch (const std::bad_alloc&) {
        response = error_response(resource_exhausted("there is not enough memory for this request"));
      }
      reply(r, *exchange, std::move(response));
    });
    if (!taken)
      reply(route, *exchange,
            error_response(resource_exhausted("too many requests wait to be read; retry later")));
  }

  http::Response health() const {
    const Status ready = gateway_.ready();
    if (ready.ok()) return {200, "application/json", {}, "{\"status\":\"ok\"}"};
    http::Response response = error_response(ready);
    return response;
  }

  const HttpFrontOptions options_;
  Gateway& gateway_;
  const int64_t started_;
  FirstTime unknown_fields_;
  std::unique_ptr<http::HttpServer> server_;
};

}  // namespace

StatusOr<std::unique_ptr<HttpFront>> HttpFront::start(HttpFrontOptions options, Gateway& gateway) {
  auto front = std::make_unique<HttpFrontImpl>(std::move(options), gateway);
  RETURN_IF_ERROR(front->listen());
  return std::unique_ptr<HttpFront>(std::move(front));
}

}  // namespace conclave::router
