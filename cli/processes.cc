#include "cli/processes.h"

#include <algorithm>
#include <utility>

#include "cli/cluster_control.h"
#include "cli/cluster_watch.h"
#include "libs/base/address.h"

namespace conclave::cli {

std::vector<ProcessAddress> processes_of(const v1::StatusReply& reply, const std::string& scheduler) {
  std::vector<ProcessAddress> out;
  out.push_back({"scheduler", "scheduler", ops_address_at(reply.ops_address(), scheduler), reply.version(),
                 "", reply.scheduler_incarnation()});
  for (const v1::MemberStatus& member : reply.members()) {
    out.push_back({role_name(member.role()), member.name(), member.ops_address(), member.version(),
                   member.numerics_id(), member.incarnation()});
  }
  return out;
}

StatusOr<std::vector<ProcessAddress>> processes_named(const std::vector<ProcessAddress>& all,
                                                      const std::string& target) {
  std::vector<ProcessAddress> out;
  for (const ProcessAddress& one : all) {
    if (target == "all" || target == one.role || target == one.name ||
        target == std::to_string(one.incarnation))
      out.push_back(one);
  }
  if (!out.empty()) return out;
  std::string names;
  for (const ProcessAddress& one : all) names += ", " + one.name;
  return not_found("no process is called " + target +
                   "; there are all, router, scheduler, attention, expert" + names +
                   ", or write the HOST:PORT of an operations port");
}

bool is_address(const std::string& target) {
  const auto address = parse_host_port(target);
  return address.ok() && address->port != 0;
}

}  // namespace conclave::cli
