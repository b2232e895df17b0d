#include "libs/telemetry/ops_server.h"

#include <cstdio>

#include "libs/base/json_escape.h"
#include "libs/http/http_server.h"
#include "libs/telemetry/log_levels.h"

namespace conclave {
namespace {

class OpsServerImpl : public OpsServer {
 public:
  explicit OpsServerImpl(Hooks hooks) : hooks_(std::move(hooks)) {}

  Status listen(std::string_view where) {
    http::HttpServerOptions options;
    options.listen = where;
    options.limits.max_connections = 64;
    ASSIGN_OR_RETURN(server_, http::HttpServer::start_small(
                                  std::move(options), [this](const http::Request& r) { return answer(r); }));
    return OkStatus();
  }

  std::string address() const override { return server_->address(); }
  uint16_t port() const override { return server_->port(); }

 private:
  http::Response answer(const http::Request& request) {
    if (request.path == "/debug/log" && request.method == "PUT") return change_log(request);
    if (request.method != "GET" && request.method != "HEAD")
      return {405, "application/json", {{"allow", "GET, HEAD"}}, "{\"error\":\"only GET and HEAD\"}\n"};
    if (request.path == "/metrics")
      return {200,
              "text/plain; version=0.0.4; charset=utf-8",
              {},
              hooks_.metrics ? hooks_.metrics->expose() : ""};
    if (request.path == "/livez") return check("live", hooks_.liveness);
    if (request.path == "/readyz") return check("ready", hooks_.readiness);
    if (request.path == "/startupz") {
      if (hooks_.startup) hooks_.startup->refresh();
      const bool done = hooks_.startup == nullptr || hooks_.startup->is_done();
      return {done ? 200 : 503,
              "application/json",
              {},
              (hooks_.startup ? hooks_.startup->json() : "{\"done\":true}") + "\n"};
    }
    if (request.path == "/debug/log") return {200, "application/json", {}, log_levels_json() + "\n"};
    if (request.path == "/debug/process" && hooks_.report)
      return {200, "application/json", {}, hooks_.report() + "\n"};
    return {404,
            "application/json",
            {},
            "{\"error\":\"unknown path; there are /metrics /livez /readyz /startupz /debug/log "
            "/debug/process\"}\n"};
  }

  http::Response change_log(const http::Request& request) const {
    // A page from elsewhere may make a browser send requests here; it says so.
    if (!request.header("origin").empty() || request.header("sec-fetch-site") == "cross-site")
      return refused(403, "", "log levels are not for browsers");
    if (!request.from_loopback && !hooks_.remote_changes)
      return refused(
          403, "logging.remote_changes",
          "log levels are changed from this host only, unless logging.remote_changes says otherwise");
    const auto change = parse_log_change(request.query);
    if (!change.ok()) return refused(400, field_of(change.status()), message_of(change.status()));
    change_log_level(*change);
    log_info(LogModule::kService, "log level changed",
             {{"changed", change->module ? log_module_name(*change->module) : "all"},
              {"to", change->level ? log_level_name(*change->level) : "default"},
              {"for_s", static_cast<double>(change->lasts) / kSecond}});
    return {200, "application/json", {}, log_levels_json() + "\n"};
  }

  static http::Response refused(int status, const std::string& field, const std::string& message) {
    return {status,
            "application/json",
            {},
            "{\"error\":" + json_quoted(message) + ",\"field\":" + json_quoted(field) + "}\n"};
  }

  static http::Response check(const std::string& what, const std::function<Readiness()>& ask) {
    const Readiness answer = ask ? ask() : Readiness{};
    std::string reasons;
    for (const std::string& reason : answer.reasons)
      reasons += (reasons.empty() ? "" : ",") + json_quoted(reason);
    std::string body = "{\"" + what + "\":" + (answer.ready() ? "true" : "false");
    if (what == "ready" || !answer.ready()) body += ",\"reasons\":[" + reasons + "]";
    return {answer.ready() ? 200 : 503, "application/json", {}, body + "}\n"};
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

StartupStep StartupProgress::now() const {
  std::lock_guard lock(mutex_);
  return {phase_, fraction_};
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
  return std::string("{\"done\":") + (done ? "true" : "false") + ",\"phase\":" + json_quoted(phase_) +
         ",\"detail\":" + json_quoted(detail_) + "," + numbers + "}";
}

StatusOr<std::unique_ptr<OpsServer>> OpsServer::start(std::string_view listen, Hooks hooks) {
  auto server = std::make_unique<OpsServerImpl>(std::move(hooks));
  RETURN_IF_ERROR(server->listen(listen));
  return std::unique_ptr<OpsServer>(std::move(server));
}

}  // namespace conclave
