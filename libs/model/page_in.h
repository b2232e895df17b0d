// Weights lie in mapped files: reading one byte of each page brings them into memory before they are needed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "libs/model/weights.h"

namespace conclave {

// Returns `bytes`.
inline uint64_t page_in(const void* data, size_t bytes) {
  constexpr size_t kPageBytes = 4096;
  const auto* p = static_cast<const volatile unsigned char*>(data);
  for (size_t i = 0; i < bytes; i += kPageBytes) (void)p[i];
  return bytes;
}

// Of the scales of an FP8 matrix; 0 for others.
inline size_t scale_bytes(const WeightView& w) {
  return w.scales == nullptr ? 0 : static_cast<size_t>((w.rows + 127) / 128) * w.scale_cols * sizeof(float);
}

inline uint64_t page_in(const WeightView& w) {
  return page_in(w.data, w.bytes()) + page_in(w.scales, scale_bytes(w));
}

// How far reading runs ahead of touching: enough requests in flight for a disk, little beside any machine's
// memory.
inline constexpr uint64_t kReadAheadBytes = 128ull << 20;

// Asks the kernel to begin to read the pages; returns at once. Touching pages one after the other alone reads
// at a fifth of a disk's speed.
void will_need(const void* data, size_t bytes);
inline void will_need(const WeightView& w) {
  will_need(w.data, w.bytes());
  will_need(w.scales, scale_bytes(w));
}

// Gives the pages that lie wholly within back to the system; the next access reads them from the file again.
// Only for weights in a mapped file: elsewhere this would lose them.
void page_out(const void* data, size_t bytes);
inline void page_out(const WeightView& w) {
  page_out(w.data, w.bytes());
  page_out(w.scales, scale_bytes(w));
}

}  // namespace conclave
