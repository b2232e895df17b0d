// conclave up: a supervised cluster on this machine, as separate processes or in one.
#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "cli/commands.h"
#include "cli/http_client.h"
#include "cli/in_process.h"
#include "cli/progress.h"
#include "cli/supervisor.h"
#include "libs/base/address.h"
#include "libs/config/load.h"
#include "libs/config/schema.h"

namespace conclave::cli {
namespace {

namespace fs = std::filesystem;

// Where `conclave status` and `conclave timeline` look if they are not told otherwise.
constexpr uint16_t kSchedulerPort = 7070;
constexpr uint16_t kAdminPort = 8003;

struct UpFlags {
  std::string model;
  std::string config;
  std::optional<std::string> http;
  std::optional<std::string> grpc;
  std::string run_dir;
  std::string ready_file;
  std::vector<std::string> sets;  // section.key=value
  int attention = 0;
  int experts = 0;
  bool in_process = false;
};

// Whether this is the only cluster of its network namespace that was started so; it stays that until this
// process ends. A look at the port alone would let two that start together choose the same.
bool first_cluster_here() {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  constexpr char kName[] = "conclave-up-7070";  // abstract: no file, gone with the process
  std::memcpy(name.sun_path + 1, kName, sizeof kName - 1);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + sizeof kName);
  if (bind(fd, reinterpret_cast<sockaddr*>(&name), length) == 0) return true;  // never closed
  close(fd);
  return false;
}

// `wanted` if nothing has it, else a free one; 0: any free one.
StatusOr<std::string> free_loopback_address(uint16_t wanted = 0) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(wanted);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const int reuse = 1;  // as the server will: a port that a cluster left a moment ago is free
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
  const bool ok = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  if (fd >= 0) close(fd);
  if (!ok && wanted != 0) return free_loopback_address();
  if (!ok) return unavailable("no free port on the loopback interface");
  return "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
}

// A flag that was given replaces the configured address; it must be one.
Status take_address(const std::optional<std::string>& flag, const char* name, std::string& address) {
  if (!flag) return OkStatus();
  if (flag->empty()) return invalid_field(name, "is empty; write HOST:PORT, or leave the flag out");
  if (Status parsed = parse_host_port(*flag).status(); !parsed.ok())
    return invalid_field(name, message_of(parsed));
  address = *flag;
  return OkStatus();
}

// Flags over --set over environment over file over defaults. Addresses that nobody chose get free ports, so
// that several clusters live side by side.
StatusOr<ClusterConfig> effective_config(const UpFlags& flags) {
  const Environment environment = process_environment();
  ASSIGN_OR_RETURN(LoadedConfig loaded, load_config_file(flags.config, environment));
  for (const auto& warning : loaded.warnings) std::fprintf(stderr, "conclave: %s\n", warning.c_str());
  ClusterConfig config = std::move(loaded.config);
  // Set for `conclave status`, the address would lead our members past our own scheduler.
  if (flags.config.empty() && !environment.contains("CONCLAVE_SCHEDULER_LISTEN"))
    config.scheduler.address.clear();
  std::set<std::string> chosen;  // keys, by environment or --set
  for (const ConfigField& field : config_fields(config))
    if (environment.contains(field.environment_name())) chosen.insert(field.name());
  for (const std::string& set : flags.sets) {
    const size_t equals = set.find('=');
    if (equals == std::string::npos) return invalid_field("--set", "'" + set + "': write section.key=value");
    const std::string key = set.substr(0, equals);
    if (Status taken = set_config_key(config, key, set.substr(equals + 1)); !taken.ok())
      return invalid_field("--set", message_of(taken));
    chosen.insert(key);
  }
  if (!flags.model.empty()) config.model.path = flags.model;
  if (config.model.path.empty())
    return invalid_field("--model", "name a checkpoint directory (or model.path in --config)");
  config.model.path = fs::absolute(config.model.path).lexically_normal().string();
  if (!fs::exists(fs::path(config.model.path) / "config.json")) {
    return invalid_field("--model",
                         "no config.json in " + config.model.path +
                             "; `conclave model make --geometry tiny-m2 --out DIR` makes a checkpoint");
  }
  RETURN_IF_ERROR(take_address(flags.http, "--http", config.router.http_listen));
  RETURN_IF_ERROR(take_address(flags.grpc, "--grpc", config.router.grpc_listen));
  if (flags.attention > 0) config.supervisor.attention_workers = static_cast<uint32_t>(flags.attention);
  if (flags.experts > 0) config.supervisor.expert_shards = static_cast<uint32_t>(flags.experts);
  if (flags.config.empty()) {
    struct Address {
      const char* key;
      std::string* value;
      uint16_t of_first;  // the port that the first cluster of this machine has; 0: any
    };
    const Address addresses[] = {{"scheduler.listen", &config.scheduler.listen, kSchedulerPort},
                                 {"scheduler.ops_listen", &config.scheduler.ops_listen, 0},
                                 {"router.ops_listen", &config.router.ops_listen, 0},
                                 {"router.admin_listen", &config.router.admin_listen, kAdminPort}};
    const bool first = first_cluster_here();
    for (const auto& [key, value, of_first] : addresses) {
      if (chosen.contains(key)) continue;
      ASSIGN_OR_RETURN(*value, free_loopback_address(first ? of_first : 0));
    }
  }
  // A restarted process must come back where others look for it, so port 0 is settled once, here.
  for (std::string* address :
       {&config.router.http_listen, &config.router.grpc_listen, &config.router.ops_listen,
        &config.router.admin_listen, &config.scheduler.listen, &config.scheduler.ops_listen}) {
    if (*address == "127.0.0.1:0" || *address == "localhost:0") {
      ASSIGN_OR_RETURN(*address, free_loopback_address());
    }
  }
  RETURN_IF_ERROR(validate_config(config));
  return config;
}

// A directory for the config of the run and its logs; removed at a clean end when we made it.
class RunDirectory {
 public:
  static StatusOr<std::unique_ptr<RunDirectory>> make(const std::string& wanted) {
    std::error_code error;
    if (!wanted.empty()) {
      fs::create_directories(wanted, error);
      if (error) return invalid_field("--run-dir", "cannot make " + wanted + ": " + error.message());
      std::unique_ptr<RunDirectory> run(new RunDirectory(fs::absolute(wanted), false));
      // Held until the process ends: two clusters in one directory would start each other's children.
      run->lock_ = open(run->file("lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
      if (run->lock_ < 0 || flock(run->lock_, LOCK_EX | LOCK_NB) != 0) {
        return invalid_field("--run-dir", "another cluster runs in " + wanted + ", or it is not writable");
      }
      return run;
    }
    std::string pattern = (fs::temp_directory_path(error) / "conclave-up-XXXXXX").string();
    if (error || !mkdtemp(pattern.data()))
      return failed_precondition("cannot make a directory in the temporary folder");
    return std::unique_ptr<RunDirectory>(new RunDirectory(pattern, true));
  }
  ~RunDirectory() {
    std::error_code ignored;
    if (ours_ && !keep_) fs::remove_all(path_, ignored);
    if (lock_ >= 0) close(lock_);
  }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  void keep() { keep_ = true; }
  std::string path() const { return path_.string(); }

 private:
  RunDirectory(fs::path path, bool ours) : path_(std::move(path)), ours_(ours) {}
  fs::path path_;
  bool ours_;
  bool keep_ = false;
  int lock_ = -1;
};

Status write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::trunc);
  out << text;
  return out.flush() ? OkStatus() : failed_precondition("cannot write " + path);
}

// " --flag ADDRESS" where a command would look elsewhere without it.
std::string where(const char* flag, const std::string& address, uint16_t usual_port) {
  const bool usual = address == "127.0.0.1:" + std::to_string(usual_port);
  return usual ? "" : " " + std::string(flag) + " " + address;
}

// The flags that commands need to ask this cluster's scheduler.
std::string tls_flags(const tls::Options& tls) {
  if (!tls.enabled()) return "";
  std::string flags = " --tls-ca " + tls.ca_file + " --tls-cert " + tls.cert_file + " --tls-key " + tls.key_file;
  if (!tls.server_name.empty()) flags += " --tls-server-name " + tls.server_name;
  return flags;
}

std::string sibling_program(const std::string& name) {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  return error ? name : (self.parent_path() / name).string();
}

// `logs` is where the processes write theirs; empty when everything runs in this process.
void print_addresses(const ClusterConfig& config, const std::string& logs) {
  std::printf("ready: %s\n", config.model.path.c_str());
  std::printf("  HTTP      http://%s/v1\n", config.router.http_listen.c_str());
  std::printf("  gRPC      %s\n", config.router.grpc_listen.c_str());
  const std::string& admin = config.router.admin_listen;
  if (!admin.empty()) {
    std::printf("  admin     http://%s/admin/requests\n", admin.c_str());
    std::printf("  timeline  conclave timeline ID%s\n", where("--admin", admin, kAdminPort).c_str());
  }
  std::printf("  metrics   http://%s/metrics\n", config.router.ops_listen.c_str());
  if (!logs.empty()) {
    std::printf("            http://%s/metrics (scheduler)\n", config.scheduler.ops_listen.c_str());
    std::printf("  status    conclave status%s%s\n",
                where("--scheduler", config.scheduler.connect_address(), kSchedulerPort).c_str(),
                tls_flags(config.tls).c_str());
    std::printf("  logs      %s\n", logs.c_str());
  }
  std::fflush(stdout);
}

Status announce(const UpFlags& flags, const ClusterConfig& config, const std::string& logs) {
  print_addresses(config, logs);
  if (flags.ready_file.empty()) return OkStatus();
  return write_file(flags.ready_file, "http://" + config.router.http_listen + "\n");
}

// The children's configuration file holds what the environment said, and flags, which come before it.
void clear_overrides(ClusterConfig config) {
  for (const ConfigField& field : config_fields(config)) unsetenv(field.environment_name().c_str());
}

// Whether the router serves; `why` gets its reason when it does not.
bool router_ready(const ClusterConfig& config, std::string& why) {
  const auto server = parse_url(config.router.ops_listen);
  if (!server.ok()) return false;
  const auto response = http_request(*server, "GET", "/readyz", "", kSecond);
  if (!response.ok()) {
    why = "router is starting";
    return false;
  }
  why = response->body.substr(0, 200);
  while (!why.empty() && why.back() == '\n') why.pop_back();
  return response->status == 200;
}

Status run_processes(const UpFlags& flags, const ClusterConfig& config) {
  ASSIGN_OR_RETURN(const std::unique_ptr<RunDirectory> run, RunDirectory::make(flags.run_dir));
  const std::string config_path = run->file("cluster.yaml");
  RETURN_IF_ERROR(write_file(config_path, config_to_yaml(config)));

  clear_overrides(config);
  Supervisor::block_signals();
  SupervisorOptions options;
  options.backoff_min_ms = config.supervisor.restart_min / kMillisecond;
  options.backoff_max_ms = config.supervisor.restart_max / kMillisecond;
  options.healthy_after_ms = config.supervisor.healthy_after / kMillisecond;
  options.stop_grace_ms = config.supervisor.stop_deadline / kMillisecond;
  Supervisor supervisor(options);
  auto start = [&](const std::string& program, const std::string& name, bool named) {
    ChildSpec spec{name, {sibling_program(program), "--config", config_path}, run->file(name + ".log")};
    if (named) {
      spec.argv.insert(spec.argv.end(), {"--name", name, "--ops-listen", "127.0.0.1:0"});
    }
    return supervisor.start(std::move(spec));
  };
  RETURN_IF_ERROR(start("conclave-scheduler", "scheduler", false));
  for (uint32_t i = 0; i < config.supervisor.expert_shards; ++i) {
    RETURN_IF_ERROR(start("conclave-expert", "expert-" + std::to_string(i), true));
  }
  for (uint32_t i = 0; i < config.supervisor.attention_workers; ++i) {
    RETURN_IF_ERROR(start("conclave-attention", "attention-" + std::to_string(i), true));
  }
  RETURN_IF_ERROR(start("conclave-router", "router", false));

  const TimePoint begun = steady_now();
  const TimePoint deadline = begun + config.supervisor.start_deadline;
  bool ready = false;
  std::string why;
  auto on_restart = [&](const std::string& name, const std::string& how) {
    clear_line();
    std::fprintf(stderr, "conclave: %s ended (%s); restarting it\n", name.c_str(), how.c_str());
  };
  Status outcome = supervisor.run(
      on_restart,
      [&] {
        if (router_ready(config, why)) return ready = true;
        char line[320];
        std::snprintf(line, sizeof line, "starting, %.1f s: %s",
                      static_cast<double>(steady_now() - begun) / kSecond, why.c_str());
        show_line(line);
        return steady_now() > deadline;
      },
      100);
  clear_line();
  if (outcome.ok() && !ready && steady_now() > deadline) {
    outcome = deadline_exceeded("the cluster was not ready in time (supervisor.start_deadline_s): " + why);
  }
  if (outcome.ok() && ready) {
    supervisor.started();
    outcome = announce(flags, config, run->path());
    if (outcome.ok())
      outcome = supervisor.run(
          on_restart, [] { return false; }, 60'000);
  }
  if (ready && isatty(STDERR_FILENO) != 0) {
    std::fprintf(stderr, "conclave: stopping once open requests have ended; Ctrl-C again stops at once\n");
  }
  supervisor.stop();
  if (!outcome.ok()) {
    run->keep();
    return annotate(outcome, "logs in " + run->path());
  }
  return OkStatus();
}

Status run_up(const UpFlags& flags) {
  ASSIGN_OR_RETURN(const ClusterConfig config, effective_config(flags));
  if (flags.in_process) {
    return run_in_process(config, [&] { return announce(flags, config, ""); });
  }
  return run_processes(flags, config);
}

}  // namespace

void add_up_command(CLI::App& app, Command& chosen) {
  auto* command = app.add_subcommand("up", "Start a supervised cluster on this machine and keep it running");
  auto flags = std::make_shared<UpFlags>();
  command->add_option("--model", flags->model, "Checkpoint directory");
  command->add_option("--attention", flags->attention, "Attention workers (default 1)")
      ->check(CLI::Range(1, 64));
  command->add_option("--experts", flags->experts, "Expert shards (default 2)")->check(CLI::Range(1, 256));
  command->add_option("--http", flags->http,
                      "HTTP address, HOST:PORT; port 0 takes a free one (default 127.0.0.1:8000)");
  command->add_option("--grpc", flags->grpc, "gRPC address, HOST:PORT (default 127.0.0.1:8001)");
  command->add_flag("--in-process", flags->in_process,
                    "Everything in this process, hidden states over loopback");
  command->add_option("--config", flags->config, "Cluster configuration (YAML)");
  command
      ->add_option("--set", flags->sets,
                   "Override a config key of every process: section.key=value; may be repeated")
      ->allow_extra_args(false);
  command->add_option("--run-dir", flags->run_dir,
                      "Where configuration and logs of the run go (default: a new temporary folder)");
  command->add_option("--ready-file", flags->ready_file,
                      "Write the HTTP address here once the cluster answers");
  command->callback([&chosen, flags] { chosen = [flags] { return run_up(*flags); }; });
}

}  // namespace conclave::cli
