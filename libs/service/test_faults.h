// Faults of the data plane on purpose, in a real process: CONCLAVE_TEST_FAULTS in the environment of a worker
// or shard, for tests. A build without CONCLAVE_FAULT_INJECTION (release images) refuses to start with it.
#pragma once

#include <optional>
#include <string_view>

#include "libs/base/status.h"
#include "libs/transport/fault_transport.h"

namespace conclave {

struct TestFaults {
  uint64_t seed = 1;
  FaultPlan plan;
};

// "seed=7,corrupt_in=0.01,drop_out=0.001": probabilities by the names of FaultPlan, each in [0, 1].
// INVALID_ARGUMENT names the word that is not understood.
StatusOr<TestFaults> parse_test_faults(std::string_view text);

// Of the process; nothing where the variable is not set. FAILED_PRECONDITION where this build has no faults.
StatusOr<std::optional<TestFaults>> test_faults_of_environment();

}  // namespace conclave
