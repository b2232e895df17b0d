// Writes arrays as NumPy's .npy files (format 1.0).
#pragma once

#include <span>
#include <string>

#include "libs/base/status.h"

namespace conclave::cli {

// A float32 matrix in C order. `values` has rows * cols elements.
Status write_npy(const std::string& path, std::span<const float> values, size_t rows, size_t cols);

}  // namespace conclave::cli
