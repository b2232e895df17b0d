// All tensors of a checkpoint directory: model.safetensors, or the files that model.safetensors.index.json
// names.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "libs/base/status.h"
#include "libs/checkpoint/faults.h"
#include "libs/checkpoint/safetensors.h"

namespace conclave {

inline constexpr size_t kMaxShardFiles = 10'000;

// Owns the mappings; tensors point into them. Immutable once opened, so any thread may read.
class TensorDirectory {
 public:
  // What is wrong with the files goes to `faults`; what is sound is kept, so that binding can list its own
  // faults too. A Status only when there is nothing to read at all (no weights file, an index that is not
  // JSON). Ordinals that the index does not name may be missing, as they are in published checkpoints.
  static StatusOr<std::unique_ptr<TensorDirectory>> open(const std::string& dir, FaultList& faults);

  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  // Index into tensors(), or -1.
  int64_t find(std::string_view name) const {
    const auto it = by_name_.find(name);
    return it == by_name_.end() ? -1 : static_cast<int64_t>(it->second);
  }
  size_t file_count() const { return files_.size(); }
  uint64_t file_bytes() const;

 private:
  TensorDirectory() = default;
  // Maps and parses one file; `expected` (may be null) is the index's own list of names for it.
  void add_file(const std::string& dir, const std::string& file,
                const std::vector<std::string_view>* expected, FaultList& faults);

  std::vector<std::unique_ptr<MappedFile>> files_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

}  // namespace conclave
