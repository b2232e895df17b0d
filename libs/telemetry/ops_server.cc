#include "libs/telemetry/ops_server.h"

#include <cstdio>

#include "libs/http/http_server.h"

namespace conclave {
namespace {

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char buffer[8];
      std::snprintf(buffer, sizeof buffer, "\\u%04x", c);
      out += buffer;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

class OpsServerImpl : public OpsServer {
 public:
  explicit OpsServerImpl(Hooks hooks) : hooks_(std::move(hooks)) {}

  Status listen(std::string_view where) {
    http::HttpServerOptions options;
    options.listen = where;
    options.limits.max_body_bytes = 1024;
    options.limits.max_header_bytes = 8 << 10;
    options.limits.max_connections = 64;
    auto server = http::HttpServer::start(
        std::move(options), [this](http::Request& request, std::shared_ptr<http::Exchange> exchange) {
          exchange->respond(answer(request));
        });
    if (!server.ok()) return server.status();
    server_ = std::move(server).value();
    return OkStatus();
  }

  std::string address() const override { return server_->address(); }
  uint16_t port() const override { return server_->port(); }

 private:
  http::Response answer(const http::Request& request) {
    if (request.method != "GET" && request.method != "HEAD")
      return {405, "application/json", {{"allow", "GET, HEAD"}}, "{\"error\":\"only GET and HEAD\"}\n"};
    if (request.path == "/metrics")
      return {200,
              "text/plain; version=0.0.4; charset=utf-8",
              {},
              hooks_.metrics ? hooks_.metrics->expose() : ""};
    if (request.path == "/livez") return {200, "application/json", {}, "{\"live\":true}\n"};
    if (request.path == "/readyz") {
      const Readiness readiness = hooks_.readiness ? hooks_.readiness() : Readiness{};
      std::string reasons;
      for (const std::string& reason : readiness.reasons)
        reasons += (reasons.empty() ? "" : ",") + json_string(reason);
      return {readiness.ready() ? 200 : 503,
              "application/json",
              {},
              std::string("{\"ready\":") + (readiness.ready() ? "true" : "false") + ",\"reasons\":[" +
                  reasons + "]}\n"};
    }
    if (request.path == "/startupz") {
      if (hooks_.startup) hooks_.startup->refresh();
      const bool done = hooks_.startup == nullptr || hooks_.startup->is_done();
      return {done ? 200 : 503,
              "application/json",
              {},
              (hooks_.startup ? hooks_.startup->json() : "{\"done\":true}") + "\n"};
    }
    return {404,
            "application/json",
            {},
            "{\"error\":\"unknown path; there are /metrics /livez /readyz /startupz\"}\n"};
  }

  const Hooks hooks_;
  std::unique_ptr<http::HttpServer> server_;
};

}  // namespace

void StartupProgress::set(std::string_view phase, std::string_view detail, double fraction) {
  std::lock_guard lock(mutex_);
  phase_ = phase;
  detail_ = detail;
  fraction_ = fraction;
}

void StartupProgress::done() {
  std::lock_guard lock(mutex_);
  if (finished_ != kNever) return;
  finished_ = steady_now();
  phase_ = "done";
  detail_.clear();
  fraction_ = 1;
}

void StartupProgress::follow(std::function<void(StartupProgress&)> look) {
  std::lock_guard lock(look_mutex_);
  look_ = std::move(look);
}

void StartupProgress::refresh() {
  if (is_done()) return;
  std::lock_guard lock(look_mutex_);
  if (look_) look_(*this);
}

bool StartupProgress::is_done() const {
  std::lock_guard lock(mutex_);
  return finished_ != kNever;
}

std::string StartupProgress::json() const {
  std::lock_guard lock(mutex_);
  const bool done = finished_ != kNever;
  char numbers[96];
  const double elapsed = static_cast<double>((done ? finished_ : steady_now()) - started_) / kSecond;
  if (fraction_ < 0)
    std::snprintf(numbers, sizeof numbers, "\"fraction\":null,\"elapsed_seconds\":%.3f", elapsed);
  else
    std::snprintf(numbers, sizeof numbers, "\"fraction\":%.4f,\"elapsed_seconds\":%.3f", fraction_, elapsed);
  return std::string("{\"done\":") + (done ? "true" : "false") + ",\"phase\":" + json_string(phase_) +
         ",\"detail\":" + json_string(detail_) + "," + numbers + "}";
}

StatusOr<std::unique_ptr<OpsServer>> OpsServer::start(std::string_view listen, Hooks hooks) {
  auto server = std::make_unique<OpsServerImpl>(std::move(hooks));
  RETURN_IF_ERROR(server->listen(listen));
  return std::unique_ptr<OpsServer>(std::move(server));
}

}  // namespace conclave
