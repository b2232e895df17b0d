#include "router_service/http/http_front.h"

#include <atomic>
#include <boost/json.hpp>
#include <new>
#include <utility>

#include "router_service/http/openai_request.h"
#include "router_service/http/openai_response.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

constexpr size_t kLargeBody = 64 << 10;  // bytes; larger ones are parsed off the I/O threads

using gateway::Gateway;
using gateway::Generation;
using gateway::Update;

// Follows one generation on its connection. Everything but notify() runs there, one call at a time.
class Answer : public http::StreamSource, public std::enable_shared_from_this<Answer> {
 public:
  using Done = std::function<void(int status)>;

  Answer(std::shared_ptr<http::Exchange> exchange, const OpenAiRequest& request, const Gateway& gateway,
         Done done)
      : exchange_(std::move(exchange)),
        chat_(request.chat),
        stream_(request.stream),
        include_usage_(request.include_usage),
        return_token_ids_(request.return_token_ids),
        model_(gateway.model().name),
        done_(std::move(done)) {}

  void start(Gateway& gateway, gateway::GenerateRequest request) {
    auto generation = gateway.generate(std::move(request), [self = shared_from_this()] { self->notify(); });
    if (!generation.ok()) return respond(error_response(generation.status()));
    generation_ = *generation;
    writer_.emplace(chat_, include_usage_, return_token_ids_, generation_->id(), model_);
    exchange_->on_client_gone([g = generation_] { g->cancel(); });
  }

  bool pull(std::string& out) override {
    if (!started_) {
      started_ = true;
      out += writer_->first_event(return_token_ids_ ? generation_->prompt() : std::vector<TokenId>{});
    }
    take();
    out += writer_->text_event(text_, tokens_);
    text_.clear();
    tokens_.clear();
    if (!last_.ended) return true;
    out += last_.error.ok() ? writer_->end_events(last_) : OpenAiWriter::error_events(last_.error);
    return false;
  }

 private:
  void notify() {
    if (streaming_.load()) return exchange_->wake();
    exchange_->post([self = shared_from_this()] { self->advance(); });
  }

  void advance() {
    if (responded_) return;
    if (streaming_.load()) return exchange_->wake();
    take();
    if (last_.ended && !last_.error.ok()) return respond(error_response(last_.error));
    if (stream_) {
      if (!last_.accepted && !last_.ended) return;
      streaming_.store(true);
      done_(200);
      http::Response head;
      head.content_type = "text/event-stream; charset=utf-8";
      head.headers.emplace_back("cache-control", "no-cache");
      head.headers.emplace_back("x-accel-buffering", "no");
      exchange_->stream(std::move(head), shared_from_this());
      return;
    }
    if (!last_.ended) return;
    http::Response response;
    response.body = writer_->whole(text_, tokens_,
                                   return_token_ids_ ? generation_->prompt() : std::vector<TokenId>{}, last_);
    respond(std::move(response));
  }

  void take() {
    last_ = generation_->take();
    text_ += last_.text;
    if (return_token_ids_) tokens_.insert(tokens_.end(), last_.tokens.begin(), last_.tokens.end());
  }

  void respond(http::Response response) {
    responded_ = true;
    done_(response.status);
    exchange_->respond(std::move(response));
  }

  const std::shared_ptr<http::Exchange> exchange_;
  const bool chat_;
  const bool stream_;
  const bool include_usage_;
  const bool return_token_ids_;
  const std::string model_;
  const Done done_;
  std::shared_ptr<Generation> generation_;
  std::optional<OpenAiWriter> writer_;
  std::atomic<bool> streaming_{false};
  bool responded_ = false;
  bool started_ = false;
  Update last_;
  std::string text_;  // taken, not yet written
  std::vector<TokenId> tokens_;
};

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
    const std::string_view route = completions || chat || path == "/health" ? path
                                   : models                                 ? kModels
                                                                            : "other";
    if (route == "other")
      return reply(route, *exchange,
                   http_error(404, "there is no " + std::string(path.substr(0, 256)) + " here"));

    const bool posts = completions || chat;
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
      return reply(route, *exchange, list_models(path == kModels ? "" : path.substr(kModels.size() + 1)));

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

  static StatusOr<OpenAiRequest> parse(bool chat, std::string_view body) {
    return chat ? parse_chat_completion(body) : parse_completion(body);
  }

  // Off the connections' threads nobody else catches what one body's size may cause.
  static StatusOr<OpenAiRequest> parse_within_memory(bool chat, std::string_view body) {
    try {
      return parse(chat, body);
    } catch (const std::bad_alloc&) {
      return resource_exhausted("there is not enough memory for this request");
    }
  }

  void generate(std::string_view route, std::shared_ptr<http::Exchange> exchange,
                StatusOr<OpenAiRequest> parsed) {
    if (!parsed.ok()) return reply(route, *exchange, error_response(parsed.status()));
    auto answer = std::make_shared<Answer>(std::move(exchange), *parsed, gateway_,
                                           [this, r = std::string(route)](int status) { count(r, status); });
    answer->start(gateway_, std::move(parsed->generate));
  }

  http::Response health() const {
    const Status ready = gateway_.ready();
    if (ready.ok()) return {200, "application/json", {}, "{\"status\":\"ok\"}"};
    http::Response response = error_response(ready);
    return response;
  }

  http::Response list_models(std::string_view wanted) const {
    const json::object model{{"id", gateway_.model().name},
                             {"object", "model"},
                             {"created", started_},
                             {"owned_by", "conclave"},
                             {"max_model_len", gateway_.context_length()}};
    if (wanted.empty())
      return {200,
              "application/json",
              {},
              json::serialize(json::object{{"object", "list"}, {"data", json::array{model}}})};
    if (wanted == gateway_.model().name) return {200, "application/json", {}, json::serialize(model)};
    return error_response(gateway::with_code(
        with_field(not_found("the model \"" + std::string(wanted.substr(0, 256)) + "\" is not served here"),
                   "model"),
        "model_not_found"));
  }

  const HttpFrontOptions options_;
  Gateway& gateway_;
  const int64_t started_;
  std::unique_ptr<http::HttpServer> server_;
};

}  // namespace

StatusOr<std::unique_ptr<HttpFront>> HttpFront::start(HttpFrontOptions options, Gateway& gateway) {
  auto front = std::make_unique<HttpFrontImpl>(std::move(options), gateway);
  RETURN_IF_ERROR(front->listen());
  return std::unique_ptr<HttpFront>(std::move(front));
}

}  // namespace conclave::router
