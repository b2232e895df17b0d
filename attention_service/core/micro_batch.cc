#include "attention_service/core/micro_batch.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace conclave {

void MicroBatch::index_rows() {
  rows = 0;
  positions.clear();
  for (const MicroBatchSlice& slice : slices) {
    for (uint32_t i = 0; i < slice.count; ++i) positions.push_back(slice.start + i);
    rows += slice.count;
  }
}

uint32_t MicroBatch::drop_rows(uint32_t hidden, const std::function<bool(const Sequence&)>& gone) {
  if (std::none_of(slices.begin(), slices.end(), [&](const auto& s) { return gone(*s.sequence); })) return 0;
  uint32_t from = 0;
  uint32_t to = 0;
  std::vector<MicroBatchSlice> kept;
  for (MicroBatchSlice& slice : slices) {
    if (!gone(*slice.sequence)) {
      if (from != to) {
        std::memmove(x.data() + static_cast<size_t>(to) * hidden,
                     x.data() + static_cast<size_t>(from) * hidden,
                     static_cast<size_t>(slice.count) * hidden * sizeof(float));
      }
      to += slice.count;
      kept.push_back(std::move(slice));
      from += kept.back().count;
    } else {
      from += slice.count;
    }
  }
  slices = std::move(kept);
  index_rows();
  return from - to;
}

std::vector<MicroBatch> split_step(std::vector<MicroBatchSlice> slices, uint32_t max_batches,
                                   uint32_t min_rows) {
  uint64_t total = 0;
  for (const MicroBatchSlice& slice : slices) total += slice.count;
  const uint64_t wanted = std::clamp<uint64_t>(total / std::max(min_rows, 1u), 1, std::max(max_batches, 1u));
  std::vector<MicroBatch> batches(1);
  uint64_t placed = 0;  // rows so far
  for (MicroBatchSlice& slice : slices) {
    while (slice.count > 0) {
      const uint64_t border = total * batches.size() / wanted;  // where the current batch ends
      if (placed == border && batches.size() < wanted) {
        batches.emplace_back();
        continue;
      }
      const uint32_t take = static_cast<uint32_t>(std::min<uint64_t>(slice.count, border - placed));
      MicroBatchSlice part = slice;
      part.count = take;
      part.sample = slice.sample && take == slice.count;
      MicroBatch& batch = batches.back();
      if (batch.slices.empty() && batches.size() > 1) {
        batch.after_previous = batches[batches.size() - 2].slices.back().sequence == slice.sequence;
      }
      batch.slices.push_back(std::move(part));
      slice.start += take;
      slice.count -= take;
      placed += take;
    }
  }
  for (MicroBatch& batch : batches) batch.index_rows();
  return batches;
}

}  // namespace conclave
