// The fault matrix: a fault, the role it happens to, the moment. A cell is one fault under 32 streams, after
// which nothing may be lost, changed or left behind.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/cluster/keeper.h"
#include "tests/cluster/load.h"
#include "tests/cluster/relay/network.h"

namespace conclave {

enum class FaultRole { kShardWithReplica, kShard, kWorkerOfTwo, kOnlyWorker, kScheduler, kRouter };
enum class FaultKind {
  kKill,
  kStopShort,
  kStopLong,
  kCutShort,
  kCutLong,
  kDelay,
  kLoss,
  kPartition,
  kCorrupt
};
enum class FaultMoment { kRandom, kBeforeDispatch, kBeforeReply, kDuringChange, kDuringLoad };

inline constexpr FaultRole kFaultRoles[] = {FaultRole::kShardWithReplica, FaultRole::kShard,
                                            FaultRole::kWorkerOfTwo,      FaultRole::kOnlyWorker,
                                            FaultRole::kScheduler,        FaultRole::kRouter};
inline constexpr FaultKind kFaultKinds[] = {FaultKind::kKill,     FaultKind::kStopShort, FaultKind::kStopLong,
                                            FaultKind::kCutShort, FaultKind::kCutLong,   FaultKind::kDelay,
                                            FaultKind::kLoss,     FaultKind::kPartition, FaultKind::kCorrupt};
inline constexpr FaultMoment kFaultMoments[] = {FaultMoment::kRandom, FaultMoment::kBeforeDispatch,
                                                FaultMoment::kBeforeReply, FaultMoment::kDuringChange,
                                                FaultMoment::kDuringLoad};

// Whether the role is one of several that do the same.
bool of_two(FaultRole role);
std::string to_string(FaultRole role);
std::string to_string(FaultKind kind);
std::string to_string(FaultMoment moment);

struct FaultCell {
  FaultRole role;
  FaultKind kind;
  FaultMoment moment;

  std::string name() const;
  // Whether the combination has a meaning: the scheduler and the router send no rows that could be corrupted,
  // and have no dispatch to be before or after.
  bool exists() const;
  // Of links, so it needs a network of our own.
  bool networked() const;
  // Cells with the same one can share a cluster.
  std::string cluster() const;
};

std::vector<FaultCell> all_fault_cells();

struct CellResult {
  std::vector<std::string> faults;  // empty: passed
  uint64_t requests = 0;            // completed
  uint64_t resumed = 0;             // streams that their router took with it
  uint64_t refused = 0;             // never accepted
  Nanos longest_gap = 0;
  Nanos took = 0;
  std::string until_restart;                 // what came back only with the connection it belonged to
  std::vector<std::string> unexpected_ends;  // of survivors, with their logs
};

// A cluster for cells that share one, and the cells' course.
class FaultMatrix {
 public:
  // `expected`: of numbered requests on the demo checkpoint. FAILED_PRECONDITION without the rights for a
  // network.
  static StatusOr<std::unique_ptr<FaultMatrix>> start(const FaultCell& first, uint64_t seed,
                                                      std::vector<std::vector<TokenId>> expected);
  ~FaultMatrix();

  CellResult run(const FaultCell& cell, uint64_t seed);

 private:
  struct Course;

  // Long prompts for processes that are new: what is made once stays, and buffers keep the size of the
  // largest step, which for a replay is all tokens of all streams. A leak is what comes on top of that.
  Status warm_up();
  FaultMatrix() = default;

  std::unique_ptr<Network> network_;  // outlives the processes in it
  std::vector<std::vector<TokenId>> expected_;
  std::vector<std::string> texts_;  // the same as the router writes them, where there is one
  std::unique_ptr<ProcessCluster> cluster_;
  std::unique_ptr<Keeper> keeper_;
  std::vector<pid_t> warm_;
};

}  // namespace conclave
