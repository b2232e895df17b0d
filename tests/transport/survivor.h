// A process that has its peers killed under it, again and again, and must live. Run as "--survivor": a test
// supervises it, because with UCX builds that have assertions on it may be aborted all the same.
#pragma once

namespace conclave::testing {

// --survivor traffic|connect ROUNDS SEED: prints "round N down_us T" on stdout for each kill survived, and at
// the end "memory_kb N". Exit code 0 when all rounds went as they must.
int run_survivor(int argc, char** argv);

}  // namespace conclave::testing
