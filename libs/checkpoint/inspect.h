// What a checkpoint is, for people and scripts: `conclave model inspect`.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "libs/base/status.h"
#include "libs/model/model_spec.h"

namespace conclave {

struct DtypeTotals {
  uint64_t tensors = 0;
  uint64_t elements = 0;
  uint64_t bytes = 0;
};

struct Inspection {
  std::string directory;
  ModelSpec spec;
  size_t tensors = 0;
  size_t files = 0;
  std::map<std::string, DtypeTotals> dtypes;  // by name in the file, block scales included
  uint64_t parameters = 0;                    // elements without block scales
  uint64_t parameters_per_token = 0;          // with experts_per_token experts of each layer
  uint64_t bytes = 0;
  uint64_t expert_bytes = 0;        // of one expert of one layer; 0 when the checkpoint is broken
  uint64_t kv_bytes_per_token = 0;  // BF16
  std::string fingerprint;          // empty when the checkpoint is broken
  std::vector<std::string> unused;
  std::vector<std::string> faults;  // at most kMaxFaultsListed
  size_t fault_count = 0;
};

// A Status when there is no checkpoint or its config.json cannot be used; a broken checkpoint is an
// Inspection with faults.
StatusOr<Inspection> inspect_checkpoint(const std::string& dir);
// Both end with a newline.
std::string inspection_table(const Inspection& inspection);
std::string inspection_json(const Inspection& inspection);

}  // namespace conclave
