// What `conclave diag` makes of what it saw: pure judgement over reports, so that every finding can be tested
// without the machine it is about.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/processes.h"
#include "cli/status_view.h"

namespace conclave::cli {

enum class Severity : uint8_t { kOk, kWarning, kProblem };
const char* severity_name(Severity severity);  // ok | warning | problem

struct Finding {
  Severity severity = Severity::kOk;
  std::string subject;  // a host, a process, or "cluster"
  std::string check;    // "memlock", "clock", ...
  std::string what;     // what was seen
  std::string advice;   // what to do; empty where nothing is to be done
};

// The clock of a process against ours: its error is at most `bound_s`, half of the round trip.
struct ClockOffset {
  double offset_s = 0;
  double bound_s = 0;
};

struct ProcessReport {
  ProcessAddress process;
  std::string json;   // of /debug/process; empty: not reached
  std::string error;  // why not
  std::optional<ClockOffset> clock;
};

struct DiagInput {
  std::string local_json;  // this host's facts (host_facts.h), as a /debug/process of nobody: {"host":...}
  std::string local_ucx;   // what UCX says of itself with the settings of here; empty with local_ucx_error
  std::string local_ucx_error;
  std::string local_isa;       // of the kernels
  std::string tls, interface;  // the settings it was started with

  std::string scheduler;         // where it was asked; empty: it was not
  bool scheduler_named = false;  // by the user: it should be there
  std::string cluster_error;     // why it did not answer
  std::optional<StatusView> cluster;
  std::vector<ProcessReport> processes;
};

// In the order of subjects: this host, other hosts, processes, the cluster.
std::vector<Finding> judge(const DiagInput& input);
Severity worst_of(const std::vector<Finding>& findings);

// Of UCX's own words (ucp_context_print_info, ucp_ep_print_info): what it could use, and what the endpoints
// do use, each as "tcp/eth0". No repetitions, in order.
struct UcxTransports {
  std::vector<std::string> available;
  std::vector<std::string> in_use;
};
UcxTransports ucx_transports(const std::string& words);

// At most so far may clocks be apart before it is a warning or a problem: nothing of the protocol depends on
// them, but logs, timelines and incarnations are read by them.
inline constexpr double kSkewWarning_s = 0.5;
inline constexpr double kSkewProblem_s = 30;

}  // namespace conclave::cli
