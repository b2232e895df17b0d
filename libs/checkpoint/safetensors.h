// The safetensors format, read strictly: 8 bytes little-endian header length, a JSON header, then the
// tensors' bytes back to back (https://github.com/huggingface/safetensors, "Format"). Nothing is trusted
// before it was checked; no input crashes. Not thread-safe; results are plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"
#include "libs/checkpoint/faults.h"

namespace conclave {

// The format's own limit on the header.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
// Bounds of ours, far above what any checkpoint has.
inline constexpr size_t kMaxTensorsPerFile = 1'000'000;
inline constexpr size_t kMaxTensorDims = 8;

struct TensorInfo {
  std::string name;
  std::string dtype;  // as in the file: "BF16", "F8_E4M3" ... possibly one we do not know
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // offset in its file
  uint64_t bytes = 0;
  const std::byte* data = nullptr;  // set by the file's owner; alignment is the file's
};

// Bytes of one element; 0 when the dtype is unknown or smaller than a byte (then the size cannot be checked
// here).
uint32_t safetensors_dtype_bytes(std::string_view dtype);

// Parses and checks a whole file's bytes: header length, JSON, every entry's dtype, shape and byte range, no
// overlap, no hole, nothing after the last tensor, no name twice. Each fault goes to `faults` as "<label>:
// <tensor>"; tensors whose entries are sound are returned even when others are not (data pointers set into
// `file`), in the header's order.
std::vector<TensorInfo> parse_safetensors(std::span<const std::byte> file, std::string_view label,
                                          FaultList& faults);

// A file mapped read-only and shared, so processes of one host share the page cache. A file that is cut short
// while it is mapped ends the process with SIGBUS when the lost part is read, as with any mapped file.
class MappedFile {
 public:
  // NOT_FOUND or INVALID_ARGUMENT naming the path.
  static StatusOr<std::unique_ptr<MappedFile>> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

 private:
  MappedFile() = default;
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace conclave
