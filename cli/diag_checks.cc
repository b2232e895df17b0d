#include "cli/diag_checks.h"

#include <algorithm>
#include <boost/json.hpp>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "cli/diag_judge.h"
#include "cli/status_page.h"

namespace conclave::cli {
namespace {

namespace json = boost::json;
using diag::joined;
using diag::Judge;
using diag::member;
using diag::number;
using diag::object;
using diag::parse;
using diag::text;

template <class F>
bool any(const std::vector<std::string>& all, const F& is) {
  return std::any_of(all.begin(), all.end(), is);
}

void judge_process(Judge& judge, const ProcessReport& one, bool many_hosts) {
  const std::string& name = one.process.name;
  if (one.json.empty()) {
    judge.warn(name, "reached", "its operations port does not answer: " + one.error,
               "run `conclave diag` where that port is reached (metrics ports are often open to the "
               "monitoring only)");
    return;
  }
  const json::value report = parse(one.json);
  const json::value h = object(report, "host"), compute = object(report, "compute"),
                    plane = object(report, "data_plane");
  const std::string words = text(plane, "ucx"), tls = text(plane, "tls");
  const bool member_of_plane = member(report, "data_plane") != nullptr;
  const UcxTransports seen = ucx_transports(words);
  const std::vector<std::string>& used = seen.in_use.empty() ? seen.available : seen.in_use;
  if (member_of_plane) {
    if (words.empty()) {
      judge.warn(name, "data plane", "its loop did not say within half a second what UCX selected",
                 "is it stuck? see its /livez");
    } else {
      judge.data_plane(name, words, tls, text(plane, "interface"), h, many_hosts);
    }
    judge.memlock(name, h, any(used, diag::is_rdma));
    judge.shared_memory(name, h, any(used, diag::is_shared_memory));
  }
  if (one.process.role == "router") {
    judge.open_files(name, h, 8192, "each client of router.max_connections needs one");
  } else {
    judge.open_files(name, h, 1024, "connections, event descriptors, and one for each file of weights");
  }
  judge.processors(name, h, number(compute, "threads"));
  judge.kernels_isa(name, h, text(compute, "isa"));
}

template <class Get>
void judge_same(Judge& judge, const std::vector<ProcessReport>& processes, const char* check, const Get& get,
                Severity severity, const std::string& advice) {
  std::map<std::string, std::vector<std::string>> by_value;
  for (const ProcessReport& one : processes)
    if (const std::string value = get(one); !value.empty()) by_value[value].push_back(one.process.name);
  if (by_value.empty()) return;
  if (by_value.size() == 1) return judge.ok("cluster", check, by_value.begin()->first + ", all of them");
  std::string what;
  for (const auto& [value, names] : by_value)
    what += (what.empty() ? "" : "; ") + value + ": " +
            (names.size() > 6 ? std::to_string(names.size()) + " processes" : joined(names));
  judge.add(severity, "cluster", check, what, advice);
}

void judge_cluster(Judge& judge, const StatusView& cluster) {
  if (!cluster.ready) {
    judge.problem("cluster", "ready", "not ready: " + cluster.not_ready,
                  "docs/runbooks/ConclaveFleetNotReady.md");
  } else {
    judge.ok("cluster", "ready", "ready, " + std::to_string(cluster.members.size()) + " members");
  }
  for (const MemberView& m : cluster.members) {
    if (m.state == "suspect")
      judge.warn(m.name, "state", "suspect: it did not renew its lease",
                 "its host is overloaded, or the network between: docs/runbooks/ConclaveMembersFlap.md");
  }
  size_t faults = 0;
  std::string last;
  for (const EventView& event : cluster.events) {
    if (!event.fault() || event.age_s > kEventMinutes * 60) continue;
    faults += event.times;
    last = event.kind + (event.who.empty() ? "" : " " + event.who) +
           (event.detail.empty() ? "" : ": " + event.detail);
  }
  if (faults > 0) {
    judge.warn(
        "cluster", "faults",
        std::to_string(faults) + " in the last " + short_age(kEventMinutes * 60) + ", the last: " + last,
        "`conclave status` lists them; docs/runbooks");
  } else {
    judge.ok("cluster", "faults", "none in the last " + short_age(kEventMinutes * 60));
  }
}

}  // namespace

const char* severity_name(Severity severity) {
  constexpr const char* kNames[] = {"ok", "warning", "problem"};
  return kNames[static_cast<size_t>(severity)];
}

UcxTransports ucx_transports(const std::string& words) {
  UcxTransports out;
  const auto add = [](std::vector<std::string>& to, const std::string& one) {
    if (std::find(to.begin(), to.end(), one) == to.end()) to.push_back(one);
  };
  std::istringstream lines(words);
  for (std::string line; std::getline(lines, line);) {
    const bool resource =
        line.find("resource ") != std::string::npos && line.find(" -- ") != std::string::npos;
    const size_t lane = line.find("lane[");
    if (!resource && lane == std::string::npos) continue;
    // "resource 0 : md 1 dev 0 flags -- tcp/lo", "lane[0]: 0:tcp/lo.0 md[0] -> ..."
    const size_t begin = resource ? line.find(" -- ") + 4 : line.find(':', line.find(']', lane)) + 1;
    std::istringstream rest(line.substr(begin));
    std::string word;
    rest >> word;
    if (!resource) {
      if (const size_t colon = word.find(':'); colon != std::string::npos) word.erase(0, colon + 1);
      if (const size_t dot = word.rfind('.'); dot != std::string::npos) word.erase(dot);
    }
    if (word.find('/') == std::string::npos || word.starts_with("self/")) continue;
    add(resource ? out.available : out.in_use, word);
  }
  return out;
}

Severity worst_of(const std::vector<Finding>& findings) {
  Severity worst = Severity::kOk;
  for (const Finding& finding : findings) worst = std::max(worst, finding.severity);
  return worst;
}

std::vector<Finding> judge(const DiagInput& input) {
  Judge judge;
  const json::value local = object(parse(input.local_json), "host");
  const std::string here = text(local, "host").empty() ? "this host" : text(local, "host");
  judge.host(here, local);
  if (!input.local_ucx_error.empty()) {
    judge.problem(here, "data plane", input.local_ucx_error,
                  "set transport.interface and transport.tls to what is here; `ucx_info -d` lists it");
  } else if (!input.local_ucx.empty()) {
    judge.data_plane(here, input.local_ucx, input.tls, input.interface, local, false);
  }
  const UcxTransports seen = ucx_transports(input.local_ucx);
  judge.memlock(here, local, any(seen.available, diag::is_rdma));
  judge.shared_memory(here, local, any(seen.available, diag::is_shared_memory));
  judge.open_files(here, local, 1024, "connections, event descriptors, and one for each file of weights");
  judge.processors(here, local, std::nullopt);
  judge.kernels_isa(here, local, input.local_isa);

  std::set<std::string> hosts;
  for (const ProcessReport& one : input.processes)
    if (const std::string host = text(object(parse(one.json), "host"), "host"); !host.empty())
      hosts.insert(host);
  std::set<std::string> judged = {text(local, "host")};
  for (const ProcessReport& one : input.processes) {
    const json::value h = object(parse(one.json), "host");
    if (!one.json.empty() && judged.insert(text(h, "host")).second) judge.host(text(h, "host"), h);
  }
  for (const ProcessReport& one : input.processes) judge_process(judge, one, hosts.size() > 1);

  if (input.cluster) {
    judge_cluster(judge, *input.cluster);
    judge_same(
        judge, input.processes, "version", [](const ProcessReport& one) { return one.process.version; },
        Severity::kWarning,
        "an upgrade is under way, or was left half done: neighbouring releases work together, others do not");
    judge_same(
        judge, input.processes, "numerics", [](const ProcessReport& one) { return one.process.numerics_id; },
        Severity::kProblem, "model.precision and model.fp8_wire must be the same for all");
    judge.clocks(input.processes);
  } else if (!input.scheduler.empty()) {
    if (input.scheduler_named) {
      judge.problem("cluster", "reached", input.cluster_error, "docs/runbooks/ConclaveRoleDown.md");
    } else {
      judge.ok("cluster", "reached",
               "no scheduler answers at " + input.scheduler + ": only this host was looked at");
    }
  }
  return std::move(judge.findings);
}

}  // namespace conclave::cli
