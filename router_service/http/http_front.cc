#include "router_service/http/http_front.h"

#include <atomic>
#include <boost/json.hpp>
#include <charconv>
#include <new>
#include <utility>

#include "router_service/http/openai_request.h"
#include "router_service/http/openai_response.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

constexpr size_t kBytesPerToken = 4;  // of a body, about
constexpr char kTimeoutHeader[] = "x-request-timeout";
constexpr double kMaxTimeoutSeconds = 7 * 86400;
constexpr size_t kLargeBody = 64 << 10;  // bytes; larger ones are parsed off the I/O threads

using gateway::Gateway;
using gateway::Generation;
using gateway::Update;

// Seconds, as a decimal number; absent where there is no such header.
StatusOr<std::optional<Nanos>> parse_timeout(std::string_view text) {
  if (text.empty()) return std::optional<Nanos>();
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() ||
      !(seconds > 0 && seconds <= kMaxTimeoutSeconds))
    return invalid_field(kTimeoutHeader, "must be a number of seconds above 0, at most a week");
  return std::optional<Nanos>(static_cast<Nanos>(seconds * kSecond));
}

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
    door_ = options_.door;
    if (door_ == nullptr) {
      ASSIGN_OR_RETURN(own_door_, door::FrontDoor::open({}));
      door_ = own_door_.get();
    }
    http::HttpServerOptions server;
    server.listen = options_.listen;
    server.threads = options_.threads;
    server.limits = options_.limits;
    server.error_body = [this](int status, std::string_view message) {
      count("other", status);
      return http_error(status, message);
    };
    // Nobody without a key gets us to read a body.
    server.head_check = [this](const http::Request& head) -> std::optional<http::Response> {
      if (head.path == kHealth) return std::nullopt;
      auto tenant = door_->identify(head.header("authorization"));
      if (tenant.ok()) return std::nullopt;
      http::Response refusal = error_response(tenant.status());
      refusal.headers.emplace_back("www-authenticate", "Bearer");
      const std::string_view route = route_of(head.path);
      count(route, refusal.status);
      door_->enter("http", route, head.id, nullptr)->answered(refusal.status);
      return refusal;
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

  // One request on its way: its route, its record, and where its answer goes.
  struct Call {
    std::string_view route;  // static
    std::shared_ptr<door::Visit> visit;
    std::shared_ptr<http::Exchange> exchange;
    std::optional<Nanos> timeout;  // x-request-timeout
  };

  void reply(const Call& call, http::Response response) const {
    count(call.route, response.status);
    if (call.visit) call.visit->answered(response.status);
    call.exchange->respond(std::move(response));
  }

  static constexpr std::string_view kHealth = "/health";
  static constexpr std::string_view kCompletions = "/v1/completions";
  static constexpr std::string_view kChat = "/v1/chat/completions";
  static constexpr std::string_view kModels = "/v1/models";
  static constexpr std::string_view kOther = "other";

  static std::string_view route_of(std::string_view path) {
    for (const std::string_view route : {kHealth, kCompletions, kChat, kModels})
      if (path == route) return route;
    return path.starts_with("/v1/models/") && path.size() > kModels.size() + 1 ? kModels : kOther;
  }

  void handle(http::Request& request, std::shared_ptr<http::Exchange> exchange) {
    const std::string_view path = request.path;
    const std::string_view route = route_of(path);
    const bool chat = route == kChat;
    const bool models = route == kModels;
    Call call{route, nullptr, std::move(exchange), std::nullopt};
    if (route != kHealth) {  // probes are not worth a line
      auto tenant = door_->identify(request.header("authorization"));
      if (!tenant.ok()) return reply(call, error_response(tenant.status()));
      call.visit = door_->enter("http", route, request.id, *std::move(tenant));
    }
    if (route == kOther)
      return reply(call, http_error(404, "there is no " + std::string(path.substr(0, 256)) + " here"));

    const bool posts = route == kCompletions || chat;
    const std::string_view allowed = posts ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
    if (request.method == "OPTIONS") return reply(call, {204, "", {{"allow", std::string(allowed)}}, ""});
    const bool fits = posts ? request.method == "POST" : request.method == "GET" || request.method == "HEAD";
    if (!fits) {
      http::Response refusal = http_error(405, std::string(path) + " takes " + std::string(allowed));
      refusal.headers.emplace_back("allow", allowed);
      return reply(call, std::move(refusal));
    }
    if (route == kHealth) return reply(call, health());
    if (models) return reply(call, list_models(path == kModels ? "" : path.substr(kModels.size() + 1)));

    // Before any work: what is left of the caller's allowance.
    const Status allowed_now = call.visit->charge(request.body.size() / kBytesPerToken);
    if (auto headers = call.visit->headers(); !headers.empty())
      call.exchange->add_headers(std::move(headers));
    if (!allowed_now.ok()) return reply(call, error_response(allowed_now));
    auto timeout = parse_timeout(request.header(kTimeoutHeader));
    if (!timeout.ok()) return reply(call, error_response(timeout.status()));
    call.timeout = *timeout;
    if (request.body.size() <= kLargeBody) return generate(call, parse(chat, request.body));
    // Parsing a large body takes long enough to hold up other streams of this thread.
    const auto body = std::make_shared<const std::string>(std::move(request.body));
    const bool taken = gateway_.run_on_text_thread([this, chat, body, call] {
      auto parsed = std::make_shared<StatusOr<OpenAiRequest>>(parse_within_memory(chat, *body));
      call.exchange->post([this, call, parsed] { generate(call, std::move(*parsed)); });
    });
    if (!taken)
      reply(call, error_response(resource_exhausted("too many requests wait to be read; retry later")));
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

  void generate(const Call& call, StatusOr<OpenAiRequest> parsed) {
    if (!parsed.ok()) return reply(call, error_response(parsed.status()));
    gateway::GenerateRequest& wanted = parsed->generate;
    wanted.origin = call.visit->origin(call.visit);
    if (call.timeout) wanted.time_left = std::min(*call.timeout, wanted.time_left.value_or(*call.timeout));
    auto answer = std::make_shared<Answer>(call.exchange, *parsed, gateway_, [this, call](int status) {
      count(call.route, status);
      call.visit->answered(status);
    });
    answer->start(gateway_, std::move(wanted));
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
  std::unique_ptr<door::FrontDoor> own_door_;
  door::FrontDoor* door_ = nullptr;
  std::unique_ptr<http::HttpServer> server_;
};

}  // namespace

StatusOr<std::unique_ptr<HttpFront>> HttpFront::start(HttpFrontOptions options, Gateway& gateway) {
  auto front = std::make_unique<HttpFrontImpl>(std::move(options), gateway);
  RETURN_IF_ERROR(front->listen());
  return std::unique_ptr<HttpFront>(std::move(front));
}

}  // namespace conclave::router
