// The scheduler's control service, as commands ask it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "conclave/v1/cluster.grpc.pb.h"
#include "libs/base/clock.h"
#include "libs/base/status.h"

namespace CLI {
class App;
}

namespace conclave::cli {

// The scheduler's address, from --scheduler or CONCLAVE_SCHEDULER_ADDRESS.
void add_scheduler_flag(CLI::App& command, std::string& address);

class ClusterControl {
 public:
  // Connects at the first call.
  explicit ClusterControl(std::string scheduler);

  // UNAVAILABLE, with what to do, when no scheduler answers within a few seconds.
  StatusOr<v1::StatusReply> status(Nanos limit = 5 * kSecond);
  // What the scheduler says to it: NOT_FOUND.
  Status drain(uint64_t incarnation);
  // Of one layer or all. INVALID_ARGUMENT: no such layer, or too many rows for one answer.
  StatusOr<v1::ExpertsReply> experts(std::optional<uint32_t> layer);
  // FAILED_PRECONDITION: nothing to balance, or another change is on its way.
  StatusOr<v1::RebalanceReply> rebalance(bool dry_run);

 private:
  Status explain(int code, const std::string& message) const;

  const std::string scheduler_;
  const std::unique_ptr<v1::Cluster::Stub> stub_;
};

const char* role_name(v1::Role role);

// The member that `id`, a name or an incarnation, means. NOT_FOUND with the names there are; a name that
// several have is INVALID_ARGUMENT with their incarnations.
StatusOr<v1::MemberStatus> find_member(const v1::StatusReply& cluster, const std::string& id);

}  // namespace conclave::cli
