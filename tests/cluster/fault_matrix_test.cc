// Faults of every kind in every role: a seeded few of the cells always, all of them with --all.
#include "tests/cluster/fault_matrix.h"

#include <gtest/gtest.h>

#include <iomanip>
#include <sstream>

#include "tests/cluster/fault_flags.h"

namespace conclave {
namespace {

std::string seconds(Nanos time) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2) << static_cast<double>(time) * 1e-9;
  return out.str();
}

void table_head() {
  table_line(
      "| fault | role | moment | outcome | requests | streams that broke and were resumed | longest gap, s | "
      "survivors ended | cell, s |");
  table_line("|---|---|---|---|---|---|---|---|---|");
}

void run_cells(const std::vector<FaultCell>& cells) {
  uint64_t seed = fault_flags().seed;
  std::unique_ptr<FaultMatrix> matrix;
  std::string of;
  uint32_t skipped = 0, run = 0;
  table_head();
  for (const FaultCell& cell : cells) {
    if (cell.name().find(fault_flags().only) == std::string::npos) continue;
    if (of != cell.cluster()) {
      matrix.reset();
      of = cell.cluster();
      auto started = FaultMatrix::start(cell, seed, fault_free_tokens());
      if (started.ok()) {
        matrix = *std::move(started);
      } else if (started.status().code() == StatusCode::kFailedPrecondition) {
        std::cout << "no cells of \"" << of << "\" here: " << started.status() << "\n";
      } else {
        ADD_FAILURE() << of << ": " << started.status();
      }
    }
    if (matrix == nullptr) {
      ++skipped;
      continue;
    }
    ++run;
    const CellResult result = matrix->run(cell, seed++);
    std::string outcome;
    for (const std::string& fault : result.faults) outcome += (outcome.empty() ? "" : "; ") + fault;
    EXPECT_EQ(outcome, "") << cell.name() << ", seed " << seed - 1;
    if (outcome.size() > 300) outcome = outcome.substr(0, 300) + "...";
    // Only with its router may a stream's connection go.
    const bool router_dies = cell.role == FaultRole::kRouter &&
                             (cell.kind == FaultKind::kKill || cell.moment == FaultMoment::kDuringLoad);
    EXPECT_EQ(result.resumed > 0, router_dies) << cell.name();
    EXPECT_GT(result.requests, 0u) << cell.name();
    if (!result.until_restart.empty())
      std::cout << "until the victim was started again: " << result.until_restart << "\n";
    for (const std::string& end : result.unexpected_ends) std::cout << end << "\n";
    table_line("| " + to_string(cell.kind) + " | " + to_string(cell.role) + " | " + to_string(cell.moment) +
               " | " + (outcome.empty() ? "passed" : outcome) + " | " + std::to_string(result.requests) +
               " | " + std::to_string(result.resumed) + " | " + seconds(result.longest_gap) + " | " +
               std::to_string(result.unexpected_ends.size()) + " | " + seconds(result.took) + " |");
    // What went wrong may be going on; the next cell is to start from a whole cluster.
    if (!outcome.empty()) {
      matrix.reset();
      of.clear();
    }
  }
  table_line("");
  std::cout << run << " cells, " << skipped << " not possible on this machine, seed " << fault_flags().seed
            << "\n";
  if (run == 0 && skipped > 0) GTEST_SKIP() << "no network of our own on this machine";
}

// The short ones of each role, one of each named moment, and of each fault of a link.
TEST(FaultMatrixTest, ASeededSubset) {
  using enum FaultRole;
  using enum FaultKind;
  using enum FaultMoment;
  run_cells({{kShard, kKill, kBeforeReply},
             {kOnlyWorker, kKill, kBeforeDispatch},
             {kScheduler, kKill, kDuringChange},
             {kOnlyWorker, kStopShort, kRandom},
             {kShard, kCorrupt, kRandom},
             {kWorkerOfTwo, kKill, kRandom},
             {kShardWithReplica, kKill, kBeforeReply},
             {kShard, kKill, kDuringLoad},
             {kRouter, kKill, kRandom},
             {kShard, kCutShort, kRandom},
             {kScheduler, kLoss, kRandom},
             {kShard, kDelay, kRandom}});
}

TEST(FaultMatrixTest, LongEveryCell) { run_cells(all_fault_cells()); }

}  // namespace
}  // namespace conclave
