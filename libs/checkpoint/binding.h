// Binds a checkpoint's tensors to the model's parameters, strictly: every parameter filled, every tensor used
// exactly once or known to be unused, shapes and dtypes checked, all faults reported together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libs/base/status.h"
#include "libs/checkpoint/faults.h"
#include "libs/checkpoint/tensor_directory.h"
#include "libs/model/model_spec.h"
#include "libs/model/weights.h"

namespace conclave {

// Data that a file holds at an odd address is copied, up to this much per checkpoint; past it the file is
// refused.
inline constexpr uint64_t kMaxRealignedBytes = 256ull << 20;

// A checkpoint ready for use. Owns the mappings and every copy; all views live as long as it does. Immutable
// after load: any thread may read. Weights are paged in by use, so a process pays only for the parts it
// touches.
struct BoundModel {
  ModelSpec spec;
  DenseWeights dense;
  ExpertTable experts;
  // Equal for equal checkpoints, however they are split into files: a hash over the geometry, every tensor's
  // name, dtype and shape, and the values of norms, selection biases and a sample of the large matrices. 32
  // hex digits.
  std::string fingerprint;
  std::string directory;
  size_t tensor_count = 0;
  size_t file_count = 0;
  uint64_t tensor_bytes = 0;
  // Tensors the file has and the model knowingly does not use (rotary tables, multi-token prediction).
  std::vector<std::string> unused;

  std::unique_ptr<TensorDirectory> tensors;
  std::vector<std::unique_ptr<std::byte[]>> copies;
};

// NOT_FOUND when there is no checkpoint; INVALID_ARGUMENT listing all faults (the first kMaxFaultsListed in
// words).
StatusOr<std::unique_ptr<BoundModel>> load_model(const std::string& dir);
// The same with the faults as a list, for tools: returns null when there were any, or a Status when nothing
// was read.
StatusOr<std::unique_ptr<BoundModel>> load_model(const std::string& dir, FaultList& faults);

}  // namespace conclave
