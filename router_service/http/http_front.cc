#include "router_service/http/http_front.h"

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "libs/telemetry/log.h"
#include "router_service/door/traceparent.h"
#include "router_service/first_time.h"
#include "router_service/http/openai_answer.h"
#include "router_service/http/openai_request.h"
#include "router_service/http/openai_response.h"
#include "router_service/http/openai_resume.h"
#include "router_service/http/text_routes.h"
#include "router_service/http/timeout_header.h"
#include "router_service/task_count.h"

namespace conclave::router {
namespace {

constexpr size_t kLargeBody = 64 << 10;  // bytes; larger ones are parsed off the I/O threads
constexpr size_t kBytesPerToken = 4;     // of a body, about

using gateway::Gateway;

class HttpFrontImpl : public HttpFront {
 public:
  HttpFrontImpl(HttpFrontOptions options, Gateway& gateway)
      : options_(std::move(options)), gateway_(gateway), started_(wall_now_ms() / 1000) {}

  Status listen() {
    door_ = options_.door;
    if (door_ == nullptr) {
      door::FrontDoorOptions open;
      open.trust_without_keys = true;
      ASSIGN_OR_RETURN(own_door_, door::FrontDoor::open(std::move(open)));
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

  // The text threads are the gateway's, and may still be at work for us.
  ~HttpFrontImpl() override {
    server_.reset();
    tasks_.wait();
  }

  std::string address() const override { return server_->address(); }
  uint16_t port() const override { return server_->port(); }
  http::HttpCounts counts() const override { return server_->counts(); }
  void post(std::function<void()> task) override { server_->post(std::move(task)); }
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
    bool resumable = false;        // x-conclave-resumable
  };

  void reply(const Call& call, http::Response response) const {
    count(call.route, response.status);
    if (call.visit) call.visit->answered(response.status);
    call.exchange->respond(std::move(response));
  }

  static constexpr std::string_view kHealth = "/health";
  static constexpr std::string_view kCompletions = "/v1/completions";
  static constexpr std::string_view kChat = "/v1/chat/completions";
  static constexpr std::string_view kTokenize = "/tokenize";
  static constexpr std::string_view kDetokenize = "/detokenize";
  static constexpr std::string_view kModels = "/v1/models";
  static constexpr std::string_view kStreams = "/v1/streams/{id}";
  static constexpr std::string_view kStreamsPath = "/v1/streams/";
  static constexpr std::string_view kOther = "other";

  static std::string_view route_of(std::string_view path) {
    for (const std::string_view route : {kHealth, kCompletions, kChat, kTokenize, kDetokenize, kModels})
      if (path == route) return route;
    if (path.starts_with(kStreamsPath) && path.size() > kStreamsPath.size()) return kStreams;
    return path.starts_with("/v1/models/") && path.size() > kModels.size() + 1 ? kModels : kOther;
  }

  // Several of them say nothing.
  static std::string_view traceparent_of(const http::Request& request) {
    const auto named = [](const auto& header) { return header.first == door::kTraceparentHeader; };
    return std::count_if(request.headers.begin(), request.headers.end(), named) == 1
               ? request.header(door::kTraceparentHeader)
               : std::string_view();
  }

  void handle(http::Request& request, std::shared_ptr<http::Exchange> exchange) {
    const std::string_view path = request.path;
    const std::string_view route = route_of(path);
    const bool chat = route == kChat;
    const bool text = route == kTokenize || route == kDetokenize;
    Call call{route, nullptr, std::move(exchange), std::nullopt};
    if (route != kHealth) {  // probes are not worth a line
      auto tenant = door_->identify(request.header("authorization"));
      if (!tenant.ok()) return reply(call, error_response(tenant.status()));
      call.visit = door_->enter("http", route, request.id, *std::move(tenant), traceparent_of(request));
      call.exchange->add_headers({{door::kTraceparentHeader, door::write_traceparent(call.visit->trace())}});
    }
    if (route == kOther)
      return reply(call, http_error(404, "there is no " + std::string(path.substr(0, 256)) + " here"));

    const bool posts = route == kCompletions || chat || text;
    const std::string_view allowed = posts               ? "POST, OPTIONS"
                                     : route == kStreams ? "GET, OPTIONS"
                                                         : "GET, HEAD, OPTIONS";
    if (request.method == "OPTIONS") return reply(call, {204, "", {{"allow", std::string(allowed)}}, ""});
    const bool fits = posts ? request.method == "POST"
                            : request.method == "GET" || (request.method == "HEAD" && route != kStreams);
    if (!fits) {
      http::Response refusal = http_error(405, std::string(path) + " takes " + std::string(allowed));
      refusal.headers.emplace_back("allow", allowed);
      return reply(call, std::move(refusal));
    }
    if (route == kHealth) return reply(call, health());
    if (route == kModels)
      return reply(
          call, list_models(gateway_, path == kModels ? "" : percent_decoded(path.substr(kModels.size() + 1)),
                            started_));

    // Before any work: what is left of the caller's allowance.
    const Status allowed_now = call.visit->charge(request.body.size() / kBytesPerToken);
    if (auto headers = call.visit->headers(); !headers.empty())
      call.exchange->add_headers(std::move(headers));
    if (!allowed_now.ok()) return reply(call, error_response(allowed_now));
    if (route == kStreams) return resume(call, request);
    auto resumable = parse_resumable_header(request.header(kResumableHeader));
    if (!resumable.ok()) return reply(call, error_response(resumable.status()));
    call.resumable = *resumable;
    auto timeout = parse_timeout_header(request.header(kTimeoutHeader));
    if (!timeout.ok()) return reply(call, error_response(timeout.status()));
    call.timeout = *timeout;
    if (text) return on_text_thread(call, request);
    const bool keep = call.resumable;
    if (request.body.size() <= kLargeBody) return generate(call, parse(chat, keep, request.body));
    // Parsing a large body takes long enough to hold up other streams of this thread.
    const auto body = std::make_shared<const std::string>(std::move(request.body));
    const bool taken = gateway_.run_on_text_thread([task = tasks_.enter(), this, chat, keep, body, call] {
      auto parsed = std::make_shared<StatusOr<OpenAiRequest>>(parse_within_memory(chat, keep, *body));
      call.exchange->post([this, call, parsed] { generate(call, std::move(*parsed)); });
    });
    if (!taken)
      reply(call, error_response(resource_exhausted("too many requests wait to be read; retry later")));
  }

  // `keep`: what another router needs of it too, where it can be resumed.
  StatusOr<OpenAiRequest> parse(bool chat, bool keep, std::string_view body) const {
    ASSIGN_OR_RETURN(OpenAiRequest parsed, chat ? parse_chat_completion(body, options_.openai)
                                                : parse_completion(body, options_.openai));
    parsed.resumable = keep;
    if (!keep || !parsed.style.stream || !parsed.more_prompts.empty()) return parsed;
    parsed.created = wall_now_ms() / 1000;
    parsed.fingerprint = gateway_.fleet().numerics_id;
    parsed.generate.resume_context =
        write_stream_context(chat, body, {gateway_.model().name, parsed.fingerprint, parsed.created});
    return parsed;
  }

  // GET /v1/streams/{id}
  void resume(const Call& call, const http::Request& request) {
    const auto after = parse_last_event_id(request.header(kLastEventIdHeader));
    if (!after.ok()) return reply(call, error_response(after.status()));
    const std::string id = percent_decoded(std::string_view(request.path).substr(kStreamsPath.size()));
    resume_openai(call.exchange, id, *after, call.visit->origin(call.visit), options_.openai, gateway_,
                  [this, call](int status) {
                    count(call.route, status);
                    call.visit->answered(status);
                  });
  }

  // Off the connections' threads nobody else catches what one body's size may cause.
  StatusOr<OpenAiRequest> parse_within_memory(bool chat, bool keep, std::string_view body) const {
    try {
      return parse(chat, keep, body);
    } catch (const std::bad_alloc&) {
      return resource_exhausted("there is not enough memory for this request");
    }
  }

  void generate(const Call& call, StatusOr<OpenAiRequest> parsed) {
    if (!parsed.ok()) {
      gateway_.note_limit(parsed.status());
      return reply(call, error_response(parsed.status()));
    }
    for (const std::string& name : parsed->unknown)
      if (unknown_fields_(name))
        log_warn(LogModule::kRequests, "requests have a field that nobody here knows; it is ignored",
                 {{"field", name}});
    gateway::GenerateRequest& wanted = parsed->generate;
    wanted.origin = call.visit->origin(call.visit);
    if (call.timeout) wanted.time_left = std::min(*call.timeout, wanted.time_left.value_or(*call.timeout));
    answer_openai(call.exchange, *std::move(parsed), gateway_, [this, call](int status) {
      count(call.route, status);
      call.visit->answered(status);
    });
  }

  // /tokenize and /detokenize.
  void on_text_thread(const Call& call, http::Request& request) {
    const auto body = std::make_shared<const std::string>(std::move(request.body));
    const bool taken = gateway_.run_on_text_thread([task = tasks_.enter(), this, body, call] {
      http::Response response;
      try {
        response = call.route == kTokenize ? tokenize(gateway_, *body, options_.openai)
                                           : detokenize(gateway_, *body);
      } catch (const std::bad_alloc&) {
        response = error_response(resource_exhausted("there is not enough memory for this request"));
      }
      reply(call, std::move(response));
    });
    if (!taken)
      reply(call, error_response(resource_exhausted("too many requests wait to be read; retry later")));
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
  std::unique_ptr<door::FrontDoor> own_door_;
  door::FrontDoor* door_ = nullptr;
  TaskCount tasks_;
  std::unique_ptr<http::HttpServer> server_;
};

}  // namespace

StatusOr<std::unique_ptr<HttpFront>> HttpFront::start(HttpFrontOptions options, Gateway& gateway) {
  auto front = std::make_unique<HttpFrontImpl>(std::move(options), gateway);
  RETURN_IF_ERROR(front->listen());
  return std::unique_ptr<HttpFront>(std::move(front));
}

}  // namespace conclave::router
