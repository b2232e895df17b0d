// Reads a worker's weights into memory, bit by bit, before requests need them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

#include "libs/model/page_in.h"

namespace conclave {

class WeightWarmer {
 public:
  // The weights are borrowed.
  explicit WeightWarmer(const DenseWeights& weights) {
    add(weights.embed);
    for (const DenseLayerWeights& layer : weights.layers)
      for (const WeightView* w : {&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj, &layer.gate})
        add(*w);
    if (weights.lm_head.data != weights.embed.data) add(weights.lm_head);
  }

  // Reads one byte of each page of the next `bytes` or fewer; returns how many were covered, 0 when all are.
  uint64_t warm(uint64_t bytes) {
    uint64_t covered = 0;
    while (!cold_.empty() && covered < bytes) {
      ask_ahead();
      Range& next = cold_.front();
      const uint64_t part = std::min(next.asked, bytes - covered);
      covered += page_in(next.data, part);
      next.data += part;
      next.bytes -= part;
      next.asked -= part;
      asked_bytes_ -= part;
      if (next.bytes == 0) cold_.pop_front();
    }
    done_ += covered;
    return covered;
  }
  bool done() const { return cold_.empty(); }
  uint64_t total() const { return total_; }
  uint32_t permille() const { return done() ? 1000 : static_cast<uint32_t>(1000 * done_ / total_); }

 private:
  struct Range {
    const unsigned char* data;
    uint64_t bytes;
    uint64_t asked = 0;  // of which the first are being read
  };
  void ask_ahead() {
    for (size_t i = 0; i < cold_.size() && asked_bytes_ < kReadAheadBytes; ++i) {
      Range& range = cold_[i];
      const uint64_t more = std::min(range.bytes - range.asked, kReadAheadBytes);
      will_need(range.data + range.asked, more);
      range.asked += more;
      asked_bytes_ += more;
    }
  }
  void add(const WeightView& w) {
    add(w.data, w.bytes());
    add(w.scales, scale_bytes(w));
  }
  void add(const void* data, uint64_t bytes) {
    if (data == nullptr || bytes == 0) return;
    cold_.push_back({static_cast<const unsigned char*>(data), bytes});
    total_ += bytes;
  }

  std::deque<Range> cold_;
  uint64_t asked_bytes_ = 0;
  uint64_t total_ = 0;
  uint64_t done_ = 0;
};

}  // namespace conclave
