// The processes of a cluster, as commands reach their operations ports.
#pragma once

#include <string>
#include <vector>

#include "conclave/v1/cluster.pb.h"
#include "libs/base/status.h"

namespace conclave::cli {

struct ProcessAddress {
  std::string role;         // router | scheduler | attention | expert; empty: unknown
  std::string name;         // as the scheduler knows it; of itself "scheduler"
  std::string ops_address;  // host:port; empty: it did not say
  std::string version, numerics_id;
  uint64_t incarnation = 0;
};

// The scheduler (asked at `scheduler`) first, then its members as they are listed.
std::vector<ProcessAddress> processes_of(const v1::StatusReply& reply, const std::string& scheduler);

// Those that `target` means: "all", a role, the name or incarnation of a member. NOT_FOUND lists what there
// is.
StatusOr<std::vector<ProcessAddress>> processes_named(const std::vector<ProcessAddress>& all,
                                                      const std::string& target);

// Whether `target` is the address of an operations port itself (host:port).
bool is_address(const std::string& target);

}  // namespace conclave::cli
