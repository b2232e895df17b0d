#include "libs/service/service.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <thread>

#include "libs/base/cpu_set.h"
#include "libs/base/json_escape.h"
#include "libs/base/random.h"
#include "libs/config/load.h"
#include "libs/config/schema.h"
#include "libs/rpc/grpc_setup.h"
#include "libs/service/service_tls.h"
#include "libs/telemetry/host_facts.h"
#include "libs/telemetry/log.h"
#include "libs/telemetry/log_levels.h"
#include "libs/telemetry/process_metrics.h"

#ifndef CONCLAVE_VERSION
#error "the build must define CONCLAVE_VERSION"
#endif

namespace conclave {

// Outlives the ops server's calls.
struct ServiceState {
  ServiceState() : done(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~ServiceState() { close(done); }
  ServiceState(const ServiceState&) = delete;
  ServiceState& operator=(const ServiceState&) = delete;

  sigset_t signals;
  const int done;  // readable after end_wait()
  std::atomic<bool> stopping{false};
  std::mutex mutex;
  std::function<std::vector<std::string>()> reasons;              // guarded by mutex, called under it
  std::function<void()> reload;                                   // guarded by mutex, called under it
  std::map<std::string, std::function<std::string()>> described;  // guarded by mutex, called under it
};

namespace {

std::string made_name(const std::string& role) {
  char host[256] = "host";
  gethostname(host, sizeof(host) - 1);
  return role + "-" + host + "-" + std::to_string(getpid());
}

// One readable line for people; the same goes to no log, since nothing runs that would write one.
int fail(const std::string& program, const Status& status) {
  const std::string field = field_of(status);
  const std::string message = message_of(status);
  const bool named = field.empty() || message.find(field) != std::string::npos;
  std::fprintf(stderr, "%s: %s%s\n", program.c_str(), named ? "" : (field + ": ").c_str(), message.c_str());
  return kExitCannotStart;
}

}  // namespace

uint32_t compute_threads(uint32_t configured) {
  if (configured != 0) return configured;
  if (const auto cpus = allowed_cpus().size(); cpus > 0) return static_cast<uint32_t>(cpus);
  return std::max(1u, std::thread::hardware_concurrency());
}

const char* Service::version() { return CONCLAVE_VERSION; }

Status Service::start_ops(const std::string& listen, const std::string& key) {
  process_metrics_ = export_process(metrics_, CONCLAVE_VERSION, role_);
  startup_metrics_ = export_startup(metrics_, startup_);
  tls_metrics_ = metrics_.add_collector(export_tls);
  OpsServer::Hooks hooks;
  hooks.metrics = &metrics_;
  hooks.startup = &startup_;
  progress_ = std::make_unique<ProgressWatch>(config_.logging.stall_report);
  progress_->start(metrics_);
  hooks.liveness = [progress = progress_.get()] {
    Readiness liveness;
    for (const ProgressWatch::Stall& stall : progress->stalls())
      if (stall.executor) liveness.reasons.push_back(ProgressWatch::text(stall));
    return liveness;
  };
  hooks.readiness = [state = state_, progress = progress_.get()] {
    Readiness readiness;
    for (const ProgressWatch::Stall& stall : progress->stalls())
      readiness.reasons.push_back(ProgressWatch::text(stall));
    if (state->stopping) readiness.reasons.push_back("the service is stopping");
    std::lock_guard lock(state->mutex);
    if (!state->reasons) {
      if (!state->stopping)
        readiness.reasons.push_back("the service is starting; /startupz says how far it is");
    } else {
      for (std::string& reason : state->reasons()) readiness.reasons.push_back(std::move(reason));
    }
    return readiness;
  };
  hooks.report = reporter();
  hooks.remote_changes = config_.logging.remote_changes;
  auto ops = OpsServer::start(listen, std::move(hooks));
  if (!ops.ok()) {
    return with_field(annotate(ops.status(), key + ": cannot serve the operations port " + listen), key);
  }
  ops_ = *std::move(ops);
  addresses_.push_back({"ops", ops_->address()});
  return write_ready_file(false);
}

std::shared_ptr<void> Service::ready_unless(std::function<std::vector<std::string>()> reasons) {
  {
    std::lock_guard lock(state_->mutex);
    state_->reasons = std::move(reasons);
  }
  return std::shared_ptr<void>(nullptr, [state = state_](void*) {
    std::lock_guard lock(state->mutex);
    state->reasons = nullptr;
  });
}

std::shared_ptr<void> Service::describe(std::string key, std::function<std::string()> json) {
  {
    std::lock_guard lock(state_->mutex);
    state_->described[key] = std::move(json);
  }
  return std::shared_ptr<void>(nullptr, [state = state_, key](void*) {
    std::lock_guard lock(state->mutex);
    state->described.erase(key);
  });
}

std::function<std::string()> Service::reporter() const {
  char incarnation[20];
  std::snprintf(incarnation, sizeof incarnation, "%016llx",
                static_cast<unsigned long long>(incarnation_.value));
  const std::string begin = "{\"role\":" + json_quoted(role_) + ",\"name\":" + json_quoted(name_) +
                            ",\"pid\":" + std::to_string(getpid()) +
                            ",\"version\":" + json_quoted(CONCLAVE_VERSION) + ",\"incarnation\":\"" +
                            incarnation + "\"";
  return [state = state_, begin] {
    std::string out = begin;
    {
      std::lock_guard lock(state->mutex);
      for (const auto& [key, json] : state->described) out += "," + json_quoted(key) + ":" + json();
    }
    out += ",\"host\":" + host_facts_json(read_host_facts());
    // Last, so that it is as fresh as can be: others compare it with theirs.
    return out + ",\"wall_ns\":" + std::to_string(wall_now_ns()) + "}";
  };
}

std::shared_ptr<void> Service::on_hangup(std::function<void()> reload) {
  {
    std::lock_guard lock(state_->mutex);
    state_->reload = std::move(reload);
  }
  return std::shared_ptr<void>(nullptr, [state = state_](void*) {
    std::lock_guard lock(state->mutex);
    state->reload = nullptr;
  });
}

Status Service::write_ready_file(bool is_started) const {
  if (ready_file_.empty()) return OkStatus();
  std::string text = "{\"role\":" + json_quoted(role_) + ",\"name\":" + json_quoted(name_) +
                     ",\"pid\":" + std::to_string(getpid()) +
                     ",\"started\":" + (is_started ? "true" : "false");
  for (const auto& [what, address] : addresses_) text += "," + json_quoted(what) + ":" + json_quoted(address);
  // Written beside and renamed, so that nobody reads half of it.
  const std::string beside = ready_file_ + ".tmp" + std::to_string(getpid());
  {
    std::ofstream out(beside, std::ios::trunc);
    out << text << "}\n";
    if (!out.flush()) return invalid_field("--ready-file", "'" + ready_file_ + "' cannot be written");
  }
  if (std::rename(beside.c_str(), ready_file_.c_str()) != 0) {
    const std::string reason = std::strerror(errno);
    unlink(beside.c_str());
    return invalid_field("--ready-file", "'" + ready_file_ + "' cannot be written: " + reason);
  }
  return OkStatus();
}

void Service::started(const std::vector<std::pair<std::string, std::string>>& addresses, std::string phase,
                      std::function<StartupStep()> step) {
  addresses_.insert(addresses_.end(), addresses.begin(), addresses.end());
  if (phase.empty()) {
    startup_.done();
  } else {
    startup_.follow(
        [state = state_, phase = std::move(phase), step = std::move(step)](StartupProgress& progress) {
          std::lock_guard lock(state->mutex);
          const std::vector<std::string> why =
              state->reasons ? state->reasons() : std::vector<std::string>{"the service is stopping"};
          if (why.empty()) return progress.done();
          StartupStep now;
          if (step && state->reasons) now = step();
          progress.set(now.phase.empty() ? phase : now.phase, why.front(), now.fraction);
        });
  }
  // One field an address, so that scripts can find a chosen port in the log too.
  const auto field = [this](size_t i) { return LogField(addresses_[i].first, addresses_[i].second); };
  const LogField pid("pid", static_cast<int64_t>(getpid()));
  if (addresses_.size() >= 4) {
    log_info(LogModule::kService, "listening", {pid, field(0), field(1), field(2), field(3)});
  } else if (addresses_.size() == 3) {
    log_info(LogModule::kService, "listening", {pid, field(0), field(1), field(2)});
  } else if (addresses_.size() == 2) {
    log_info(LogModule::kService, "listening", {pid, field(0), field(1)});
  } else {
    log_info(LogModule::kService, "listening", {pid, field(0)});
  }
  if (Status written = write_ready_file(true); !written.ok())
    log_error(LogModule::kService, "no ready file", {{"cause", written}});
}

void Service::wait_for_stop() {
  int number = 0;
  while (sigwait(&state_->signals, &number) != 0 || number == SIGHUP) {
    if (number != SIGHUP) continue;
    number = 0;
    std::lock_guard lock(state_->mutex);
    if (state_->reload)
      state_->reload();
    else
      log_info(LogModule::kService, "SIGHUP: there is nothing to read again");
  }
  state_->stopping = true;
  log_info(LogModule::kService, "stopping", {{"signal", static_cast<int64_t>(number)}});
}

Service::Ending Service::wait_for_end(Nanos limit) {
  sigset_t stops;
  sigemptyset(&stops);
  sigaddset(&stops, SIGTERM);
  sigaddset(&stops, SIGINT);
  const int signals = signalfd(-1, &stops, SFD_CLOEXEC | SFD_NONBLOCK);
  const TimePoint end = steady_now() + limit;
  Ending ending = Ending::kTimeout;
  for (Nanos left = limit; left > 0; left = end - steady_now()) {
    pollfd waited[] = {{state_->done, POLLIN, 0}, {signals, POLLIN, 0}};
    const timespec timeout{left / kSecond, left % kSecond};
    if (ppoll(waited, 2, &timeout, nullptr) <= 0) continue;
    ending = (waited[0].revents & POLLIN) != 0 ? Ending::kDone : Ending::kSignal;
    break;
  }
  close(signals);
  return ending;
}

void Service::end_wait() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(state_->done, &one, sizeof one);
}

void Service::limit_end(Nanos limit) {
  std::thread([limit] {
    std::this_thread::sleep_for(std::chrono::nanoseconds(limit));
    log_error(LogModule::kService, "the end took too long; leaving at once",
              {{"limit_ms", limit / kMillisecond}});
    std::_Exit(1);
  }).detach();
}

int run_service(int argc, char** argv, const ServiceSpec& spec, const std::function<Status(Service&)>& body) {
  CLI::App app(spec.description, spec.program);
  std::string config_file, ready_file;
  std::vector<std::string> sets;
  app.add_option("--config", config_file, "Cluster configuration, YAML (docs/config.md)");
  app.add_option("--ready-file", ready_file,
                 "Where to write the addresses listened on, as JSON, once they are known");
  app.add_option("--set", sets, "Override a config key: section.key=value; may be repeated")
      ->allow_extra_args(false);
  app.set_version_flag("--version", spec.program + " " CONCLAVE_VERSION);
  std::map<std::string, std::string> overrides;  // key -> value
  for (const ServiceFlag& flag : spec.flags) {
    app.add_option_function<std::string>(
        flag.flag, [&overrides, key = flag.key](const std::string& value) { overrides[key] = value; },
        flag.help + " (" + flag.key + ")");
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    std::fprintf(stderr, "%s: %s; --help lists the flags\n", spec.program.c_str(), error.what());
    return kExitCannotStart;
  }

  // Every thread inherits this: signals are taken by sigwait alone, and a closed socket is an error, not an
  // end.
  auto state = std::make_shared<ServiceState>();
  sigemptyset(&state->signals);
  sigaddset(&state->signals, SIGTERM);
  sigaddset(&state->signals, SIGINT);
  sigaddset(&state->signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &state->signals, nullptr);
  signal(SIGPIPE, SIG_IGN);

  auto loaded = load_config_file(config_file, process_environment());
  if (!loaded.ok()) return fail(spec.program, loaded.status());
  Service service;
  service.config_ = loaded->config;
  std::map<std::string, std::string> set_values;  // the last of a key
  for (const std::string& set : sets) {
    const size_t equals = set.find('=');
    if (equals == std::string::npos) {
      return fail(spec.program, invalid_argument("--set " + set + ": write section.key=value"));
    }
    set_values[set.substr(0, equals)] = set.substr(equals + 1);
  }
  overrides.merge(set_values);  // a flag of its own comes before --set
  for (const auto& [key, value] : overrides) {
    if (Status set = set_config_key(service.config_, key, value); !set.ok()) return fail(spec.program, set);
  }
  if (Status valid = validate_config(service.config_); !valid.ok()) return fail(spec.program, valid);

  const std::string configured_name = spec.role == "attention" ? service.config_.attention.options.name
                                      : spec.role == "expert"  ? service.config_.experts.options.name
                                                               : std::string();
  service.role_ = spec.role;
  service.name_ = configured_name.empty() ? made_name(spec.role) : configured_name;
  service.ready_file_ = ready_file;
  service.incarnation_ = make_incarnation();
  service.state_ = state;
  auto level = parse_log_level(service.config_.logging.level, "logging.level");
  if (!level.ok()) return fail(spec.program, level.status());
  log_threshold(*level);
  if (Status modules = configure_log_modules(service.config_.logging.modules, "logging.modules");
      !modules.ok())
    return fail(spec.program, modules);
  log_texts(service.config_.logging.texts);
  log_identity(spec.role, service.name_, service.incarnation_);
  rpc::route_grpc_logs([](const char* file, int line, const char* message) {
    log_debug(LogModule::kGrpc, "grpc",
              {{"file", file}, {"line", static_cast<int64_t>(line)}, {"text", message}});
    note_grpc_line(message);
  });
  auto identity =
      start_tls(service.config_.tls, spec.role == "scheduler" ? tls::Use::kServer : tls::Use::kClient);
  if (!identity.ok()) return fail(spec.program, identity.status());
  service.config_.control.tls = *std::move(identity);
  for (const std::string& warning : loaded->warnings) log_warn(LogModule::kService, warning);

  const Status end = body(service);
  service.ops_.reset();
  service.progress_.reset();
  if (!end.ok()) return fail(spec.program, end);
  log_info(LogModule::kService, "stopped");
  return 0;
}

}  // namespace conclave
