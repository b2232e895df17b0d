// What the cells of the fault matrix are.
#include <algorithm>

#include "tests/cluster/fault_matrix.h"

namespace conclave {
namespace {

bool of_link(FaultKind kind) {
  return kind == FaultKind::kCutShort || kind == FaultKind::kCutLong || kind == FaultKind::kDelay ||
         kind == FaultKind::kLoss || kind == FaultKind::kPartition;
}

}  // namespace

bool of_two(FaultRole role) {
  return role == FaultRole::kShardWithReplica || role == FaultRole::kWorkerOfTwo;
}

std::string to_string(FaultRole role) {
  switch (role) {
    case FaultRole::kShardWithReplica:
      return "shard with replica";
    case FaultRole::kShard:
      return "shard without replica";
    case FaultRole::kWorkerOfTwo:
      return "worker of two";
    case FaultRole::kOnlyWorker:
      return "only worker";
    case FaultRole::kScheduler:
      return "scheduler";
    case FaultRole::kRouter:
      return "router";
  }
  return "?";
}

std::string to_string(FaultKind kind) {
  switch (kind) {
    case FaultKind::kKill:
      return "SIGKILL";
    case FaultKind::kStopShort:
      return "SIGSTOP 0.3 s";
    case FaultKind::kStopLong:
      return "SIGSTOP 5 s";
    case FaultKind::kCutShort:
      return "link down 1 s";
    case FaultKind::kCutLong:
      return "link down 10 s";
    case FaultKind::kDelay:
      return "50 ms delay";
    case FaultKind::kLoss:
      return "1% loss";
    case FaultKind::kPartition:
      return "link to one worker down 10 s";
    case FaultKind::kCorrupt:
      return "corrupted bytes";
  }
  return "?";
}

std::string to_string(FaultMoment moment) {
  switch (moment) {
    case FaultMoment::kRandom:
      return "random";
    case FaultMoment::kBeforeDispatch:
      return "before dispatch";
    case FaultMoment::kBeforeReply:
      return "between dispatch and reply";
    case FaultMoment::kDuringChange:
      return "during a placement change";
    case FaultMoment::kDuringLoad:
      return "during its start";
  }
  return "?";
}

std::string FaultCell::name() const {
  return to_string(kind) + ", " + to_string(role) + ", " + to_string(moment);
}

bool FaultCell::exists() const {
  const bool of_rows = role != FaultRole::kScheduler && role != FaultRole::kRouter;
  if (kind == FaultKind::kPartition && role != FaultRole::kShard && role != FaultRole::kShardWithReplica) {
    return false;
  }
  if (kind == FaultKind::kCorrupt) return of_rows && moment == FaultMoment::kRandom;
  if (moment == FaultMoment::kBeforeDispatch || moment == FaultMoment::kBeforeReply) return of_rows;
  if (moment == FaultMoment::kDuringChange) return role != FaultRole::kRouter;
  return true;
}

bool FaultCell::networked() const { return of_link(kind); }

std::string FaultCell::cluster() const {
  return std::string(of_two(role)                 ? "two"
                     : role == FaultRole::kRouter ? "router"
                                                  : "one") +
         (networked() ? " networked" : "");
}

std::vector<FaultCell> all_fault_cells() {
  std::vector<FaultCell> out;
  for (const FaultKind kind : kFaultKinds) {
    for (const FaultRole role : kFaultRoles) {
      for (const FaultMoment moment : kFaultMoments) {
        if (const FaultCell cell{role, kind, moment}; cell.exists()) out.push_back(cell);
      }
    }
  }
  // One cluster after the other.
  std::stable_sort(out.begin(), out.end(),
                   [](const FaultCell& a, const FaultCell& b) { return a.cluster() < b.cluster(); });
  return out;
}

}  // namespace conclave
