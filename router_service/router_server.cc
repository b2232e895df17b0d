#include "router_service/router_server.h"

#include <array>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "libs/telemetry/log.h"
#include "router_service/admin_server.h"
#include "router_service/door/front_door.h"
#include "router_service/door/traceparent.h"
#include "router_service/gateway/gateway.h"
#include "router_service/grpc/grpc_front.h"
#include "router_service/http/http_front.h"
#include "router_service/model_text.h"
#include "router_service/warm_up.h"

namespace conclave::router {
namespace {

constexpr Nanos kReadinessPeriod = 100 * kMillisecond;  // how stale the gRPC health service may be
// Fractions of a start: the router's own part, then the fleet's weights, then the token through all of it.
constexpr double kFleetBegins = 0.05;
constexpr double kWarmUpBegins = 0.95;
constexpr size_t kMaxLoggedText = 8192;  // bytes of a prompt, where logging.texts allows it
constexpr size_t kMaxNamesakes = 16;
constexpr Nanos kTimelineWait = 4 * kSecond;  // for the scheduler's part
constexpr int kKeysEvery = 10;                // of those periods: a look at the file of keys

void log_access(const door::AccessLine& line) {
  const auto ms = [](Nanos time) { return static_cast<double>(time) / kMillisecond; };
  std::vector<LogField> fields = {{"protocol", line.protocol},
                                  {"request_id", line.request_id},
                                  {"tenant", line.tenant},
                                  {"route", line.route},
                                  {"status", line.status},
                                  {"outcome", line.outcome},
                                  {"prompt_tokens", line.prompt_tokens},
                                  {"completion_tokens", line.completion_tokens},
                                  {"trace_id", door::trace_id_text(line.trace)},
                                  {"followed", line.trace.followed}};
  if (line.to_first_token >= 0) fields.emplace_back("ttft_ms", ms(line.to_first_token));
  fields.emplace_back("total_ms", ms(line.total));
  log(LogModule::kRequests, LogLevel::kInfo, "request", fields);
}

door::FrontDoorOptions door_options(const RouterConfig& config) {
  door::FrontDoorOptions options;
  options.keys_file = config.api_keys_file;
  options.trust_without_keys = config.trust_without_keys;
  options.trace_share = config.trace_share;
  if (config.access_log) options.on_end = log_access;
  return options;
}

gateway::GatewayOptions gateway_options(const RouterConfig& config, const gateway::TextCodec& text,
                                        std::function<void(Nanos)> on_token_gap) {
  gateway::GatewayOptions options;
  options.stream.on_token_gap = std::move(on_token_gap);
  options.limits = config.limits;
  options.text_threads = std::max(2u, config.template_processes);
  options.default_deadline = config.default_deadline;
  options.max_timelines = config.max_timelines;
  options.stream.max_pending_tokens = config.max_stream_events;
  options.on_submit = [&text](const gateway::Origin& origin, const AcceptedRequest& request) {
    if (!log_enabled(LogModule::kRequests, LogLevel::kDebug)) return;
    std::vector<LogField> fields = {{"request_id", origin.request_id},
                                    {"stream", gateway::id_text(request.id)},
                                    {"route", origin.route},
                                    {"prompt_tokens", request.prompt.size()},
                                    {"max_tokens", request.sampling.max_tokens},
                                    {"choices", request.choices},
                                    {"deadline_ms", request.time_left / kMillisecond}};
    if (log_texts())
      fields.emplace_back("prompt", text.decode(request.prompt, false).substr(0, kMaxLoggedText));
    log(LogModule::kRequests, LogLevel::kDebug, "submitting a request", fields);
  };
  return options;
}

// What is counted per request; null without a registry.
class RouterMetrics {
 public:
  explicit RouterMetrics(MetricsRegistry* registry) : registry_(registry) {
    if (registry_ == nullptr) return;
    prompt_tokens_ =
        &registry_->counter("conclave_router_prompt_tokens_total", "Prompt tokens of ended requests");
    generated_tokens_ =
        &registry_->counter("conclave_router_generated_tokens_total", "Generated tokens of ended requests");
    cached_tokens_ = &registry_->counter("conclave_router_cached_tokens_total",
                                         "Prompt tokens of ended requests that were in the prefix cache");
    token_gaps_ = &registry_->histogram("conclave_router_inter_token_seconds",
                                        "From one token of a choice to its next, as they come to the router");
    first_token_ = &registry_->histogram("conclave_router_time_to_first_token_seconds",
                                         "From a request's arrival to its first token");
    duration_ = &registry_->histogram("conclave_router_request_duration_seconds",
                                      "From a request's arrival to its end");
    mean_gap_ =
        &registry_->histogram("conclave_router_time_per_output_token_seconds",
                              "From a request's first token to its end, by the tokens after the first");
    prompt_lengths_ = &registry_->histogram("conclave_router_request_prompt_tokens",
                                            "Prompt tokens of a request", {}, length_buckets());
    generated_lengths_ = &registry_->histogram("conclave_router_request_generated_tokens",
                                               "Generated tokens of a request", {}, length_buckets());
  }

  void answered(std::string_view protocol, std::string_view route, int code) {
    if (registry_ == nullptr) return;
    registry_
        ->counter("conclave_router_answers_total", "Answers by protocol, route and status code",
                  {{"protocol", std::string(protocol)},
                   {"route", std::string(route)},
                   {"code", std::to_string(code)}})
        .add();
  }

  void token_gap(Nanos gap) {
    if (registry_ != nullptr) token_gaps_->observe(static_cast<double>(gap) / kSecond);
  }

  void ended(const gateway::Summary& summary) {
    if (registry_ == nullptr) return;
    const std::string outcome = summary.code != StatusCode::kOk
                                    ? std::string(absl::StatusCodeToString(summary.code))
                                : summary.finish == FinishReason::kLength ? "length"
                                                                          : "stop";
    registry_
        ->counter("conclave_router_requests_total", "Requests that ended, by outcome", {{"outcome", outcome}})
        .add();
    prompt_tokens_->add(summary.usage.prompt_tokens);
    generated_tokens_->add(summary.usage.completion_tokens);
    cached_tokens_->add(summary.usage.cached_tokens.value_or(0));
    duration_->observe(static_cast<double>(summary.total) / kSecond);
    prompt_lengths_->observe(summary.usage.prompt_tokens);
    generated_lengths_->observe(summary.usage.completion_tokens);
    if (summary.to_first_token < 0) return;
    first_token_->observe(static_cast<double>(summary.to_first_token) / kSecond);
    // Choices of one request get their tokens side by side.
    const double steps = static_cast<double>(summary.usage.completion_tokens) / summary.choices - 1;
    if (steps >= 1)
      mean_gap_->observe(static_cast<double>(summary.total - summary.to_first_token) / kSecond / steps);
  }

 private:
  // 1 to 262,144 tokens, by powers of two.
  static std::vector<double> length_buckets() {
    std::vector<double> out;
    for (int power = 0; power <= 18; ++power) out.push_back(1 << power);
    return out;
  }

  MetricsRegistry* const registry_;
  Counter* prompt_tokens_ = nullptr;
  Counter* generated_tokens_ = nullptr;
  Counter* cached_tokens_ = nullptr;
  Histogram* first_token_ = nullptr;
  Histogram* duration_ = nullptr;
  Histogram* token_gaps_ = nullptr;
  Histogram* mean_gap_ = nullptr;
  Histogram* prompt_lengths_ = nullptr;
  Histogram* generated_lengths_ = nullptr;
};

class RouterServerImpl : public RouterServer {
 public:
  RouterServerImpl(const RouterConfig& config, ModelSpec model, SchedulerPort& scheduler,
                   const gateway::TextCodec& text, MetricsRegistry* metrics)
      : config_(config),
        registry_(metrics),
        metrics_(metrics),
        gateway_(gateway_options(config, text, [this](Nanos gap) { metrics_.token_gap(gap); }), std::move(model),
                 scheduler, text, [this](const gateway::Summary& summary) { metrics_.ended(summary); }),
        warm_up_(scheduler, gateway_.model(), text.vocab_limit()) {}

  ~RouterServerImpl() override {
    stop_watching();
    collector_.reset();
    admin_.reset();
    gateway_.begin_drain();
    gateway_.abort_all(unavailable("the router is shutting down"));
    if (grpc_) grpc_->shutdown(0);
    http_.reset();
    grpc_.reset();
  }

  Status start() {
    ASSIGN_OR_RETURN(door_, door::FrontDoor::open(door_options(config_)));
    if (door_->asks_for_keys()) {
      log_info(LogModule::kKeys, "API keys read", {{"keys", door_->counts().keys}});
      if (door_->counts().keys == 0)
        log_warn(LogModule::kKeys, "the file of API keys is empty: every request will be refused");
    }
    if (!config_.http_listen.empty()) {
      HttpFrontOptions options;
      options.listen = config_.http_listen;
      options.threads = std::max(1u, config_.http_threads);
      options.limits.max_connections = config_.max_connections;
      options.limits.max_body_bytes = config_.limits.max_body_bytes;
      options.limits.max_header_bytes = config_.limits.max_header_bytes;
      options.limits.header_timeout = config_.idle_timeout;
      options.limits.write_timeout = config_.write_timeout;
      options.limits.sse_ping_interval = config_.sse_ping_interval;
      options.openai = config_.limits;
      options.door = door_.get();
      options.on_answer = [this](std::string_view route, int status) {
        metrics_.answered("http", route, status);
      };
      auto started = HttpFront::start(std::move(options), gateway_);
      if (!started.ok()) return annotate(started.status(), "router.http_listen");
      std::lock_guard lock(mutex_);
      http_ = std::move(started).value();
    }
    if (!config_.grpc_listen.empty()) {
      GrpcFrontOptions options;
      options.listen = config_.grpc_listen;
      options.max_message_bytes = config_.limits.max_body_bytes;
      options.max_metadata_bytes = config_.limits.max_header_bytes;
      options.door = door_.get();
      options.on_answer = [this](std::string_view method, int code) {
        metrics_.answered("grpc", method, code);
      };
      ASSIGN_OR_RETURN(grpc_, GrpcFront::start(std::move(options), gateway_));
    }
    if (!config_.admin_listen.empty()) {
      AdminServer::Hooks hooks;
      hooks.open_requests = [this](size_t max) { return gateway_.open_requests(max); };
      hooks.drain = [this] { gateway_.begin_drain(); };
      hooks.reload_keys = [this] { return reload(); };
      hooks.timelines = [this](size_t max) { return gateway_.timelines().list(max); };
      hooks.timeline = [this](std::string_view name) { return timeline(name); };
      auto started = AdminServer::start(config_.admin_listen, std::move(hooks));
      if (!started.ok()) return annotate(started.status(), "router.admin_listen");
      admin_ = std::move(started).value();
    }
    watcher_ = std::thread([this] { watch(); });
    if (registry_ != nullptr)
      collector_ = registry_->add_collector([this](MetricSink& sink) { collect(sink); });
    return OkStatus();
  }

  std::string http_address() const override { return http_ ? http_->address() : ""; }
  std::string grpc_address() const override { return grpc_ ? grpc_->address() : ""; }
  uint16_t http_port() const override { return http_ ? http_->port() : 0; }
  uint16_t grpc_port() const override { return grpc_ ? grpc_->port() : 0; }

  std::string admin_address() const override { return admin_ ? admin_->address() : ""; }
  void reload_keys() override { (void)reload(); }

  Readiness readiness() const override {
    std::string why = message_of(gateway_.ready());
    if (why.empty()) why = warm_up_.not_warm();
    return why.empty() ? Readiness{} : Readiness{{why}};
  }

  Status wait_ready(Nanos limit) override {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::nanoseconds(limit), [this] { return serving_ || stopping_; }) &&
        serving_)
      return OkStatus();
    lock.unlock();
    const Readiness now = readiness();
    return unavailable(now.ready() ? "the router is shutting down" : now.reasons.front());
  }

  StartupStep startup_step() const override {
    const FleetInfo fleet = gateway_.fleet();
    if (fleet.ready) return {"warming up", kWarmUpBegins};
    return {fleet.loaded_permille == 0 ? "waiting for the cluster" : "loading weights",
            kFleetBegins + (kWarmUpBegins - kFleetBegins) * fleet.loaded_permille / 1000};
  }

  std::vector<std::shared_ptr<void>> watch_progress(ProgressWatch& watch) override {
    std::vector<std::shared_ptr<void>> guards;
    if (http_)
      guards.push_back(watch.executor("the threads for HTTP",
                                      [this](std::function<void()> task) { http_->post(std::move(task)); }));
    guards.push_back(watch.work(
        "the threads for texts",
        [this] {
          const gateway::GatewayCounts counts = gateway_.counts();
          return ProgressWatch::Work{counts.waiting_texts > 0, counts.done_texts,
                                     std::to_string(counts.waiting_texts) + " requests wait for them"};
        },
        true));
    return guards;
  }

  void drain() override {
    gateway_.begin_drain();
    stop_watching();
    if (grpc_) grpc_->set_serving(false);
    if (http_) http_->drain();
    const TimePoint until = steady_now() + config_.drain_time;
    if (!gateway_.wait_idle(config_.drain_time)) {
      log_warn(LogModule::kService, "ending requests that did not finish within the drain time",
               {{"requests", gateway_.counts().open}});
      gateway_.abort_all(unavailable("the router is shutting down"));
    }
    // What has ended is still on its way to the clients.
    while (http_ && http_->counts().connections_open > 0 && steady_now() < until + kDrainFlush) {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, std::chrono::milliseconds(10));
    }
    if (grpc_) grpc_->shutdown(std::max<Nanos>(until + kDrainFlush - steady_now(), 0));
  }

 private:
  static constexpr Nanos kDrainFlush = 1 * kSecond;
  static constexpr Nanos kStallLooks = 4;       // within stall_report
  static constexpr size_t kMaxStallLines = 32;  // of one look; the counters have them all
  static constexpr auto kHops = static_cast<size_t>(gateway::StallHop::kCount);

  StatusOr<size_t> reload() {
    auto keys = door_->reload_keys();
    if (keys.ok())
      log_info(LogModule::kKeys, "API keys read again", {{"keys", *keys}});
    else
      log_error(LogModule::kKeys, "API keys not read again; the old ones stay", {{"cause", keys.status()}});
    return keys;
  }

  void look_at_keys() {
    auto read = door_->reload_changed_keys();
    if (!read.ok())
      log_error(LogModule::kKeys, "API keys not read again; the old ones stay", {{"cause", read.status()}});
    else if (*read)
      log_info(LogModule::kKeys, "API keys read again", {{"keys", door_->counts().keys}});
  }

  // The scheduler port has no notification, and the health service wants one: look now and then. So it is
  // with the file of keys, which may lie on any kind of file system and be replaced by renames and links.
  void watch() {
    std::unique_lock lock(mutex_);
    for (int round = 0; !stopping_; ++round) {
      const bool serving = serving_;
      lock.unlock();
      warm_up_.poll(steady_now());
      const bool ready = readiness().ready();
      if (grpc_ && ready != serving) grpc_->set_serving(ready);
      if (round % kKeysEvery == 0) look_at_keys();
      look_for_stalls(steady_now());
      lock.lock();
      serving_ = ready;
      if (ready) changed_.notify_all();
      changed_.wait_for(lock, std::chrono::nanoseconds(kReadinessPeriod), [this] { return stopping_; });
    }
  }
  // Of the watcher's thread.
  void look_for_stalls(TimePoint now) {
    const Nanos limit = config_.stall_report;
    if (limit <= 0 || now < next_stall_look_) return;
    // A router that was itself stopped blames nobody for that time.
    const bool late = next_stall_look_ > 0 && now - next_stall_look_ > limit / kStallLooks;
    next_stall_look_ = now + limit / kStallLooks;
    if (late) return;
    std::array<uint64_t, kHops> found{};
    std::map<RequestId, gateway::StallHop> stalled;
    size_t lines = 0;
    for (const gateway::StalledRequest& one : gateway_.stalled(now, limit)) {
      const auto hop = static_cast<size_t>(one.hop);
      ++found[hop];
      stalled.emplace(one.id, one.hop);
      const auto before = stalled_.find(one.id);
      if (before != stalled_.end() && before->second == one.hop) continue;  // said already
      stall_reports_[hop].fetch_add(1);
      if (++lines > kMaxStallLines) continue;
      log_warn(LogModule::kRequests, "a request makes no progress",
               {{"stream", gateway::id_text(one.id)},
                {"request_id", one.request_id},
                {"hop", gateway::stall_hop_name(one.hop)},
                {"stalled_ms", one.time / kMillisecond}});
    }
    stalled_ = std::move(stalled);
    for (size_t hop = 0; hop < kHops; ++hop) stalled_now_[hop].store(found[hop]);
  }

  // What both processes know of a request. On the admin server's thread, which may wait.
  StatusOr<WholeTimeline> timeline(std::string_view name) const {
    WholeTimeline out;
    std::optional<RequestId> id;
    if (const auto own = gateway_.timelines().find(name)) {
      out.router = own->view();
      id = own->id();
      out.namesakes = gateway_.timelines().namesakes(name, *id, kMaxNamesakes);
    } else {
      id = gateway::parse_id(name);  // of another router, perhaps
    }
    if (!id) return not_found("no timeline of a request is kept that is called so");
    struct Answer {
      std::mutex mutex;
      std::condition_variable came;
      std::optional<StatusOr<SchedulerTimeline>> timeline;
    };
    const auto answer = std::make_shared<Answer>();
    gateway_.ask_timeline(*id, [answer](StatusOr<SchedulerTimeline> timeline) {
      std::lock_guard lock(answer->mutex);
      answer->timeline = std::move(timeline);
      answer->came.notify_all();
    });
    std::unique_lock lock(answer->mutex);
    answer->came.wait_for(lock, std::chrono::nanoseconds(kTimelineWait),
                          [&] { return answer->timeline.has_value(); });
    if (answer->timeline) {
      out.scheduler = *std::move(answer->timeline);
    } else {
      out.scheduler = unavailable("the scheduler does not answer");
    }
    if (!out.router && !out.scheduler.ok()) return out.scheduler.status();
    return out;
  }

  void stop_watching() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (watcher_.joinable()) watcher_.join();
  }

  void collect(MetricSink& sink) {
    const gateway::GatewayCounts gateway = gateway_.counts();
    sink.gauge("conclave_router_open_requests", "Requests open now (bound: router.max_requests)",
               static_cast<double>(gateway.open));
    sink.gauge("conclave_router_waiting_text_requests",
               "Requests waiting to be tokenized (bound: router.max_waiting_texts)",
               static_cast<double>(gateway.waiting_texts));
    sink.gauge("conclave_router_queued_requests",
               "Requests waiting for their first token (bound: router.max_queued_requests)",
               static_cast<double>(gateway.queued_requests));
    sink.gauge("conclave_router_queued_tokens", "Tokens of their prompts (bound: router.max_queued_tokens)",
               static_cast<double>(gateway.queued_tokens));
    const auto reached = [&sink](std::string_view limit, uint64_t count) {
      sink.counter("conclave_router_reached_limits_total",
                   "Times a limit of the router refused or cut a request", static_cast<double>(count),
                   {{"limit", std::string(limit)}});
    };
    for (size_t i = 0; i < static_cast<size_t>(gateway::Limit::kCount); ++i) {
      const auto limit = static_cast<gateway::Limit>(i);
      reached(gateway::limit_name(limit), gateway_.limits().count(limit));
    }
    for (size_t hop = 0; hop < kHops; ++hop) {
      const MetricLabels label = {
          {"hop", std::string(gateway::stall_hop_name(static_cast<gateway::StallHop>(hop)))}};
      sink.gauge("conclave_stalled_requests", "Requests without progress, by what they wait for",
                 static_cast<double>(stalled_now_[hop].load()), label);
      sink.counter("conclave_stall_reports_total", "Requests found without progress, by what they wait for",
                   static_cast<double>(stall_reports_[hop].load()), label);
    }
    const gateway::TimelineBook::Counts timelines = gateway_.timelines().counts();
    sink.gauge("conclave_router_timelines",
               "Requests whose timeline is kept, open or ended (bound: router.max_timelines)",
               static_cast<double>(timelines.kept));
    sink.counter("conclave_router_followed_requests_total", "Requests whose timeline was begun",
                 static_cast<double>(timelines.opened));
    sink.counter("conclave_router_refused_timelines_total",
                 "Timelines not begun since as many open requests had one (bound: router.max_timelines)",
                 static_cast<double>(timelines.refused));
    sink.counter("conclave_router_warm_ups_total",
                 "Warm-up tokens sent through a fleet that had become whole",
                 static_cast<double>(warm_up_.attempts()));
    sink.gauge("conclave_router_warm_up_seconds", "What the last warm-up token took",
               static_cast<double>(warm_up_.last_duration()) / kSecond);
    sink.gauge("conclave_router_ready_info", "1 while requests are answered, 0 while /readyz says no",
               readiness().ready() ? 1 : 0);
    const door::FrontDoorCounts door = door_->counts();
    reached("rate_limit", door.rate_limited);
    sink.gauge("conclave_router_api_keys", "API keys in use", static_cast<double>(door.keys));
    sink.counter("conclave_router_unauthenticated_requests_total", "Requests without a key that is known",
                 static_cast<double>(door.unauthenticated));
    sink.counter("conclave_router_key_reloads_total", "Times the file of API keys was read",
                 static_cast<double>(door.key_reloads));
    sink.counter("conclave_router_failed_key_reloads_total",
                 "Times the file of API keys had a fault, and the old keys stayed",
                 static_cast<double>(door.failed_key_reloads));
    std::lock_guard lock(mutex_);
    if (!http_) return;
    const http::HttpCounts http = http_->counts();
    reached("max_body_bytes", http.bodies_too_large);
    reached("max_header_bytes", http.headers_too_large);
    reached("max_connections", http.connections_refused);
    sink.gauge("conclave_router_http_open_connections",
               "HTTP connections open now (bound: router.max_connections)",
               static_cast<double>(http.connections_open));
    sink.counter("conclave_router_http_connections_total", "HTTP connections taken",
                 static_cast<double>(http.connections_opened));
    sink.counter("conclave_router_http_refused_connections_total", "HTTP connections refused at the bound",
                 static_cast<double>(http.connections_refused));
    sink.counter("conclave_router_http_malformed_requests_total",
                 "Requests that were not HTTP, too large or too slow", static_cast<double>(http.malformed));
    sink.counter("conclave_router_http_departed_clients_total",
                 "Clients that left before their answer was complete",
                 static_cast<double>(http.clients_gone));
    sink.counter("conclave_router_sse_pings_total", "Comments sent to event streams that were silent",
                 static_cast<double>(http.sse_pings));
    sink.counter("conclave_router_http_slow_clients_total", "Clients cut off for not reading",
                 static_cast<double>(http.slow_clients));
  }

  const RouterConfig config_;
  MetricsRegistry* const registry_;
  RouterMetrics metrics_;
  std::unique_ptr<door::FrontDoor> door_;  // before the gateway: requests hold visits of it
  gateway::Gateway gateway_;
  WarmUp warm_up_;
  mutable std::mutex mutex_;  // http_ (against the collector), stopping_, serving_
  std::condition_variable changed_;
  bool stopping_ = false;
  bool serving_ = false;  // whether the watcher found it ready
  std::unique_ptr<HttpFront> http_;
  std::unique_ptr<GrpcFront> grpc_;
  std::unique_ptr<AdminServer> admin_;
  std::thread watcher_;
  TimePoint next_stall_look_ = 0;                   // the watcher's
  std::map<RequestId, gateway::StallHop> stalled_;  // the watcher's: as last reported
  std::array<std::atomic<uint64_t>, kHops> stalled_now_{}, stall_reports_{};
  std::unique_ptr<MetricsRegistry::CollectorHandle> collector_;
};

}  // namespace

StatusOr<std::unique_ptr<RouterServer>> RouterServer::start(const RouterConfig& config, ModelSpec model,
                                                            SchedulerPort& scheduler,
                                                            const gateway::TextCodec& text,
                                                            MetricsRegistry* metrics) {
  auto server = std::make_unique<RouterServerImpl>(config, std::move(model), scheduler, text, metrics);
  RETURN_IF_ERROR(server->start());
  return std::unique_ptr<RouterServer>(std::move(server));
}

StatusOr<std::unique_ptr<gateway::TextCodec>> load_model_text(const std::string& model_dir,
                                                              const RouterConfig& config) {
  text::ChatTemplateOptions options;
  options.processes = static_cast<int>(config.template_processes);
  options.call_timeout = config.template_deadline;
  options.max_waiting = static_cast<int>(config.limits.max_waiting_texts);
  options.max_document_bytes = config.limits.max_body_bytes;
  std::string no_template;
  ASSIGN_OR_RETURN(auto loaded, ModelText::load(model_dir, std::move(options), &no_template));
  if (!no_template.empty())
    log_warn(LogModule::kModel, "chats will be refused: the model has no template", {{"cause", no_template}});
  return std::unique_ptr<gateway::TextCodec>(std::move(loaded));
}

}  // namespace conclave::router
