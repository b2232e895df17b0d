// How often this program has asked for memory by `operator new`, on all its threads.
#pragma once

#include <cstdint>

namespace conclave::testing {

uint64_t allocations();

}  // namespace conclave::testing
