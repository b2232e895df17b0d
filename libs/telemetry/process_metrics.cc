#include "libs/telemetry/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

namespace conclave {
namespace {

// Field `number` of /proc/self/stat as proc(5) counts them, from 3 on; the second may hold spaces.
double stat_field(const std::string& stat, int number) {
  std::istringstream rest(stat.substr(stat.rfind(')') + 1));
  std::string field;
  for (int at = 3; at <= number; ++at) rest >> field;
  std::istringstream text(field);
  double value = 0;
  text >> value;
  return value;
}

// When the machine started, in seconds since 1970; 0: unknown.
double boot_time() {
  std::ifstream in("/proc/stat");
  for (std::string key; in >> key; in.ignore(1 << 20, '\n')) {
    double value = 0;
    if (key == "btime" && in >> value) return value;
  }
  return 0;
}

// When this process started, in seconds since 1970; the same at each look, as boot_time() may move by a
// second when the clock is set. 0: unknown.
double start_time(const std::string& stat) {
  static const double time = [&stat] {
    const double boot = boot_time();
    return boot > 0 ? boot + stat_field(stat, 22) / static_cast<double>(sysconf(_SC_CLK_TCK)) : 0;
  }();
  return time;
}

void collect(MetricSink& sink) {
  std::ifstream in("/proc/self/stat");
  const std::string stat{std::istreambuf_iterator<char>(in), {}};
  if (stat.find(')') != std::string::npos) {
    sink.gauge("process_threads", "Threads of this process", stat_field(stat, 20));
    sink.gauge("process_virtual_memory_bytes", "Virtual memory, mapped files included", stat_field(stat, 23));
    sink.gauge("process_resident_memory_bytes", "Resident memory, pages of mapped files included",
               stat_field(stat, 24) * static_cast<double>(sysconf(_SC_PAGESIZE)));
    if (const double time = start_time(stat); time > 0)
      sink.gauge("process_start_time_seconds", "When this process started, seconds since 1970", time);
  }
  rusage used{};
  if (getrusage(RUSAGE_SELF, &used) == 0) {
    const auto seconds = [](const timeval& t) {
      return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
    };
    sink.counter("process_cpu_seconds_total", "Processor time, user and system",
                 seconds(used.ru_utime) + seconds(used.ru_stime));
  }
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0)
    sink.gauge("process_max_fds", "Bound of open file descriptors", static_cast<double>(files.rlim_cur));
  std::error_code error;
  uint64_t open = 0;
  for (std::filesystem::directory_iterator at("/proc/self/fd", error), end; !error && at != end;
       at.increment(error))
    ++open;
  if (!error && open > 0)
    sink.gauge("process_open_fds", "Open file descriptors", static_cast<double>(open - 1));  // not our look
}

}  // namespace

std::unique_ptr<MetricsRegistry::CollectorHandle> export_process(MetricsRegistry& metrics,
                                                                 const std::string& version,
                                                                 const std::string& role) {
  return metrics.add_collector([version, role](MetricSink& sink) {
    sink.gauge("conclave_build_info", "1; what this process is", 1, {{"version", version}, {"role", role}});
    collect(sink);
  });
}

std::unique_ptr<MetricsRegistry::CollectorHandle> export_startup(MetricsRegistry& metrics,
                                                                 StartupProgress& startup) {
  return metrics.add_collector([&startup](MetricSink& sink) {
    startup.refresh();
    const StartupStep now = startup.now();
    sink.gauge("conclave_start_phase_info", "1; the phase of its start that this process is in", 1,
               {{"phase", now.phase}});
    if (now.fraction >= 0)
      sink.gauge("conclave_start_fraction_ratio", "How much of its start is done", now.fraction);
  });
}

}  // namespace conclave
