// conclave diag: what stands in the way of a cluster, on this host and in its processes.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <boost/json.hpp>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <limits>
#include <memory>
#include <utility>

#include "cli/cluster_control.h"
#include "cli/cluster_watch.h"
#include "cli/commands.h"
#include "cli/diag_checks.h"
#include "cli/http_client.h"
#include "libs/base/random.h"
#include "libs/config/load.h"
#include "libs/kernels/ops.h"
#include "libs/runtime/loop_executor.h"
#include "libs/telemetry/host_facts.h"
#include "libs/transport/ucx_transport.h"

namespace conclave::cli {
namespace {

namespace json = boost::json;

constexpr Nanos kReportLimit = 3 * kSecond;
constexpr int kClockProbes = 5;         // of which the fastest counts
constexpr size_t kMaxProcesses = 1024;  // that are asked
constexpr size_t kAtOnce = 16;
// Exit codes beside those of a command that failed.
constexpr int kExitWarnings = 3;
constexpr int kExitProblems = 4;

struct DiagFlags {
  SchedulerFlags scheduler;
  std::string config;
  bool local = false;
  bool json = false;
  bool named = false;
};

// What a library writes to stdout goes to stderr meanwhile: UCX logs there, and stdout is ours.
class QuietStdout {
 public:
  QuietStdout() : saved_(dup(STDOUT_FILENO)) {
    std::fflush(stdout);
    if (saved_ >= 0) dup2(STDERR_FILENO, STDOUT_FILENO);
  }
  ~QuietStdout() {
    std::fflush(stdout);
    if (saved_ < 0) return;
    dup2(saved_, STDOUT_FILENO);
    close(saved_);
  }
  QuietStdout(const QuietStdout&) = delete;
  QuietStdout& operator=(const QuietStdout&) = delete;

 private:
  const int saved_;
};

// UCX is asked, with the settings that services here would have.
void ask_ucx(const TransportConfig& transport, DiagInput& input) {
  input.tls = transport.ucx.tls;
  input.interface = transport.ucx.net_devices;
  transport.ucx.export_to_environment();
  const QuietStdout quiet;
  LoopThread thread(LoopExecutor::Options{.spin_ns = 0});
  thread.loop().call([&] {
    TransportOptions options = transport.options;
    options.self = make_incarnation();
    auto made = UcxTransport::create(thread.loop(), options, transport.ucx);
    if (made.ok()) {
      input.local_ucx = (*made)->describe();
    } else {
      input.local_ucx_error = message_of(made.status());
    }
  });
  thread.stop();
}

ProcessReport ask_process(const ProcessAddress& process) {
  ProcessReport out;
  out.process = process;
  if (process.ops_address.empty()) {
    out.error = "it did not say where its operations port is";
    return out;
  }
  const auto url = parse_url(process.ops_address);
  if (!url.ok()) {
    out.error = message_of(url.status());
    return out;
  }
  double best = std::numeric_limits<double>::infinity();
  for (int probe = 0; probe < kClockProbes; ++probe) {
    const TimePoint begin = steady_now();
    const int64_t wall_begin = wall_now_ns();
    const auto answer = http_request(*url, "GET", "/debug/process", "", kReportLimit);
    const double took = static_cast<double>(steady_now() - begin) / kSecond;
    if (!answer.ok() || answer->status != 200) {
      if (out.json.empty())
        out.error = answer.ok() ? "HTTP " + std::to_string(answer->status) + ": of an older release?"
                                : message_of(answer.status());
      return out;
    }
    boost::system::error_code error;
    const json::value body = json::parse(answer->body, error);
    if (error || !body.is_object()) {
      out.error = "its answer is no JSON object";
      return out;
    }
    out.json = answer->body;
    const json::value* wall = body.as_object().if_contains("wall_ns");
    if (wall == nullptr || !wall->is_int64() || took >= best) continue;
    best = took;
    // Somewhere between the two looks at our clock.
    out.clock =
        ClockOffset{static_cast<double>(wall->as_int64() - wall_begin) / kSecond - took / 2, took / 2};
  }
  return out;
}

void ask_cluster(const DiagFlags& flags, DiagInput& input) {
  input.scheduler = flags.scheduler.address;
  input.scheduler_named = flags.named;
  const StatusOr<v1::StatusReply> reply =
      ClusterControl(flags.scheduler).status(flags.named ? 5 * kSecond : kSecond);
  if (!reply.ok()) {
    input.cluster_error = message_of(reply.status());
    return;
  }
  input.cluster = view_of(*reply, flags.scheduler.address);
  std::vector<ProcessAddress> processes = processes_of(*reply, flags.scheduler.address);
  if (processes.size() > kMaxProcesses) processes.resize(kMaxProcesses);
  for (size_t begin = 0; begin < processes.size(); begin += kAtOnce) {
    std::vector<std::future<ProcessReport>> reports;
    for (size_t i = begin; i < std::min(processes.size(), begin + kAtOnce); ++i)
      reports.push_back(
          std::async(std::launch::async, [&processes, i] { return ask_process(processes[i]); }));
    for (auto& report : reports) input.processes.push_back(report.get());
  }
}

void print_text(const std::vector<Finding>& findings) {
  constexpr const char* kMarks[] = {"ok     ", "WARNING", "PROBLEM"};
  std::string subject;
  size_t counts[3] = {};
  for (const Finding& finding : findings) {
    ++counts[static_cast<size_t>(finding.severity)];
    if (finding.subject != subject) std::printf("%s\n", finding.subject.c_str());
    subject = finding.subject;
    std::printf("  %s %-10s %s\n", kMarks[static_cast<size_t>(finding.severity)], finding.check.c_str(),
                finding.what.c_str());
    if (!finding.advice.empty()) std::printf("  %7s %-10s -> %s\n", "", "", finding.advice.c_str());
  }
  std::printf("%zu problems, %zu warnings, %zu checks in order\n", counts[2], counts[1], counts[0]);
}

void print_json(const DiagInput& input, const std::vector<Finding>& findings) {
  json::array list, processes;
  for (const Finding& finding : findings) {
    list.push_back(json::object{{"severity", severity_name(finding.severity)},
                                {"subject", finding.subject},
                                {"check", finding.check},
                                {"what", finding.what},
                                {"advice", finding.advice}});
  }
  for (const ProcessReport& one : input.processes) {
    json::object process{{"role", one.process.role},
                         {"name", one.process.name},
                         {"ops_address", one.process.ops_address},
                         {"version", one.process.version},
                         {"numerics_id", one.process.numerics_id},
                         {"error", one.error},
                         {"clock_offset_s", nullptr},
                         {"clock_bound_s", nullptr}};
    if (one.clock) {
      process["clock_offset_s"] = one.clock->offset_s;
      process["clock_bound_s"] = one.clock->bound_s;
    }
    process["report"] = one.json.empty() ? json::value(nullptr) : json::parse(one.json);
    processes.push_back(std::move(process));
  }
  const json::object out{{"worst", severity_name(worst_of(findings))},
                         {"findings", std::move(list)},
                         {"host", json::parse(input.local_json).at("host")},
                         {"processes", std::move(processes)}};
  std::printf("%s\n", json::serialize(out).c_str());
}

Status run_diag(const DiagFlags& flags) {
  ASSIGN_OR_RETURN(const LoadedConfig loaded, load_config_file(flags.config, process_environment()));
  DiagInput input;
  // First, while there are no threads that UCX's environment could disturb.
  input.local_json = "{\"host\":" + host_facts_json(read_host_facts()) + "}";
  const auto isa = kernels::choose_isa();
  RETURN_IF_ERROR(isa.status());
  input.local_isa = std::string(kernels::isa_name(*isa));
  ask_ucx(loaded.config.transport, input);
  if (!flags.local) ask_cluster(flags, input);
  const std::vector<Finding> findings = judge(input);
  flags.json ? print_json(input, findings) : print_text(findings);
  const Severity worst = worst_of(findings);
  exit_code = worst == Severity::kOk ? 0 : worst == Severity::kWarning ? kExitWarnings : kExitProblems;
  return OkStatus();
}

}  // namespace

void add_diag_command(CLI::App& app, Command& chosen) {
  auto* command = app.add_subcommand(
      "diag",
      "Look for what stands in the way: limits, devices, clocks, versions; on this host and in a cluster");
  auto flags = std::make_shared<DiagFlags>();
  add_scheduler_flag(*command, flags->scheduler);
  command->add_option("--config", flags->config, "Cluster configuration (YAML), for this host's data plane");
  command->add_flag("--local", flags->local, "Look at this host only");
  command->add_flag("--json", flags->json, "As one JSON object, with the reports of all processes");
  command->footer("Exit code: 0 all is well, 3 there are warnings, 4 there are problems.");
  command->callback([&chosen, flags, command] {
    flags->named = command->count("--scheduler") > 0 || std::getenv("CONCLAVE_SCHEDULER_ADDRESS") != nullptr;
    chosen = [flags] { return run_diag(*flags); };
  });
}

}  // namespace conclave::cli
