// What the fault programs are told on their command line (fault_main.cc), and where their tables go.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libs/base/ids.h"

namespace conclave {

struct FaultFlags {
  uint64_t seed = 1;
  std::string only;       // cells whose names contain it
  uint32_t kills = 20;    // of each kind, for the stall figures
  uint32_t seconds = 60;  // of the soak
  std::string checkpoint;  // of the real geometry, for the shard without replica; empty: made (13.5 GB)
  std::string markdown;   // file that tables are appended to, beside the standard output
};

FaultFlags& fault_flags();
// One line of a table.
void table_line(const std::string& line);
// Tokens of numbered requests on the demo checkpoint, without faults; made once.
const std::vector<std::vector<TokenId>>& fault_free_tokens();

}  // namespace conclave
