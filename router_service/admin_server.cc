#include "router_service/admin_server.h"

#include <boost/json.hpp>
#include <charconv>
#include <utility>

#include "libs/http/http_server.h"
#include "libs/telemetry/log.h"
#include "router_service/http/openai_response.h"
#include "router_service/http/text_routes.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

constexpr size_t kDefaultListed = 1000;
constexpr size_t kMaxListed = 100000;
constexpr std::string_view kRoutes =
    "there are GET /admin/requests, GET and PUT /admin/log_level, POST /admin/drain, POST "
    "/admin/keys/reload, "
    "GET /debug/requests and GET /debug/requests/ID";
constexpr std::string_view kTimelines = "/debug/requests";

// The value of `name` in "a=1&b=2"; empty when absent. Nothing here needs percent-decoding.
std::string_view parameter(std::string_view query, std::string_view name) {
  while (!query.empty()) {
    const size_t end = std::min(query.find('&'), query.size());
    const std::string_view pair = query.substr(0, end);
    query.remove_prefix(std::min(end + 1, query.size()));
    if (pair.size() > name.size() && pair.starts_with(name) && pair[name.size()] == '=')
      return pair.substr(name.size() + 1);
  }
  return {};
}

std::string_view current_level() {
  if (log_enabled(LogLevel::kDebug)) return "debug";
  if (log_enabled(LogLevel::kInfo)) return "info";
  return log_enabled(LogLevel::kWarn) ? "warn" : "error";
}

http::Response ok(const json::object& body) {
  return {200, "application/json", {}, json::serialize(body) + "\n"};
}

http::Response level_shown() {
  return ok({{"level", json::string_view(current_level().data(), current_level().size())}});
}

class AdminServerImpl : public AdminServer {
 public:
  explicit AdminServerImpl(Hooks hooks) : hooks_(std::move(hooks)) {}

  Status listen(std::string_view where) {
    http::HttpServerOptions options;
    options.listen = where;
    options.limits.max_connections = 16;
    options.error_body = http_error;
    ASSIGN_OR_RETURN(server_, http::HttpServer::start_small(
                                  std::move(options), [this](const http::Request& r) { return answer(r); }));
    return OkStatus();
  }

  std::string address() const override { return server_->address(); }
  uint16_t port() const override { return server_->port(); }

 private:
  http::Response answer(const http::Request& request) {
    // A page from elsewhere may make a browser send requests here; it says so.
    if (!request.header("origin").empty() || request.header("sec-fetch-site") == "cross-site")
      return http_error(403, "the admin routes are not for browsers");
    const std::string_view path = request.path;
    const bool get = request.method == "GET";
    const bool post = request.method == "POST";
    if (path == "/admin/requests") return get ? list(request) : wrong_method("GET");
    if (path == "/admin/log_level") {
      if (get) return level_shown();
      return request.method == "PUT" ? set_level(request) : wrong_method("GET, PUT");
    }
    if (path == "/admin/drain") return post ? drain() : wrong_method("POST");
    if (path == "/admin/keys/reload") return post ? reload() : wrong_method("POST");
    if (path == kTimelines) return get ? list_timelines(request) : wrong_method("GET");
    if (path.starts_with(kTimelines) && path[kTimelines.size()] == '/')
      return get ? timeline(request) : wrong_method("GET");
    return http_error(404, kRoutes);
  }

  static http::Response wrong_method(const char* allowed) {
    http::Response response = http_error(405, std::string("this takes ") + allowed);
    response.headers.emplace_back("allow", allowed);
    return response;
  }

  static StatusOr<size_t> limit_of_list(const http::Request& request) {
    size_t limit = kDefaultListed;
    if (const std::string_view text = parameter(request.query, "limit"); !text.empty()) {
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), limit);
      if (error != std::errc() || end != text.data() + text.size() || limit < 1 || limit > kMaxListed)
        return invalid_field("limit", "must be from 1 to " + std::to_string(kMaxListed));
    }
    return limit;
  }

  http::Response list(const http::Request& request) {
    const auto limit = limit_of_list(request);
    if (!limit.ok()) return error_response(limit.status());
    json::array out;
    for (const gateway::OpenRequest& open : hooks_.open_requests(*limit))
      out.push_back(json::object{{"request_id", open.request_id},
                                 {"tenant", open.tenant},
                                 {"route", open.route},
                                 {"age_seconds", static_cast<double>(open.age) / kSecond},
                                 {"accepted", open.accepted},
                                 {"prompt_tokens", open.usage.prompt_tokens},
                                 {"completion_tokens", open.usage.completion_tokens}});
    return ok({{"requests", std::move(out)}});
  }

  http::Response list_timelines(const http::Request& request) {
    const auto limit = limit_of_list(request);
    if (!limit.ok()) return error_response(limit.status());
    return {
        200,
        "application/json",
        {},
        list_json(hooks_.timelines ? hooks_.timelines(*limit) : std::vector<gateway::RouterTimelineView>{})};
  }

  http::Response timeline(const http::Request& request) {
    const std::string name = percent_decoded(std::string_view(request.path).substr(kTimelines.size() + 1));
    const std::string_view format = parameter(request.query, "format");
    if (!format.empty() && format != "chrome" && format != "json")
      return error_response(invalid_field("format", "must be json or chrome"));
    if (!hooks_.timeline) return error_response(not_found("no timelines are kept here"));
    const StatusOr<WholeTimeline> found = hooks_.timeline(name);
    if (!found.ok()) return error_response(found.status());
    return {200, "application/json", {}, format == "chrome" ? chrome_trace(*found) : timeline_json(*found)};
  }

  static http::Response set_level(const http::Request& request) {
    auto level = parse_log_level(parameter(request.query, "level"), "level");
    if (!level.ok()) return error_response(level.status());
    log_threshold(*level);
    return level_shown();
  }

  http::Response drain() {
    log_info(LogModule::kService, "draining, as the admin port was told");
    hooks_.drain();
    return ok({{"draining", true}, {"open_requests", hooks_.open_requests(kMaxListed).size()}});
  }

  http::Response reload() {
    auto keys = hooks_.reload_keys();
    if (!keys.ok()) return error_response(keys.status());
    return ok({{"keys", *keys}});
  }

  const Hooks hooks_;
  std::unique_ptr<http::HttpServer> server_;
};

}  // namespace

StatusOr<std::unique_ptr<AdminServer>> AdminServer::start(std::string_view listen, Hooks hooks) {
  auto server = std::make_unique<AdminServerImpl>(std::move(hooks));
  RETURN_IF_ERROR(server->listen(listen));
  return std::unique_ptr<AdminServer>(std::move(server));
}

}  // namespace conclave::router
