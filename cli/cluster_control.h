// The scheduler's control service, as commands ask it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "conclave/v1/cluster.grpc.pb.h"
#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/tls/options.h"

namespace CLI {
class App;
}

namespace conclave::cli {

// Where the scheduler is, and what it takes to be let in.
struct SchedulerFlags {
  std::string address = "127.0.0.1:7070";
  tls::Options tls;
};

// --scheduler, --tls-ca, --tls-cert, --tls-key and --tls-server-name, or the environment variables that
// override the same keys of a service's configuration: CONCLAVE_SCHEDULER_ADDRESS, CONCLAVE_TLS_CA_FILE and
// so on.
void add_scheduler_flag(CLI::App& command, SchedulerFlags& flags);

class ClusterControl {
 public:
  // Connects at the first call, which also reports flags for TLS that are not in order.
  explicit ClusterControl(const SchedulerFlags& flags);

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
  std::unique_ptr<v1::Cluster::Stub> stub_;
  Status flags_;  // whether there can be a connection
  bool tls_ = false;
};

const char* role_name(v1::Role role);

// The member that `id`, a name or an incarnation, means. NOT_FOUND with the names there are; a name that
// several have is INVALID_ARGUMENT with their incarnations.
StatusOr<v1::MemberStatus> find_member(const v1::StatusReply& cluster, const std::string& id);

}  // namespace conclave::cli
