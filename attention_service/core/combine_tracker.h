// Accepts each (token, slot) of one micro-batch layer exactly once, whoever computed it and however often.
// Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "libs/model/dispatch.h"

namespace conclave {

class CombineTracker {
 public:
  // Begins a layer: `tokens` rows of `slots` each, none accepted.
  void reset(uint32_t tokens, uint32_t slots);

  // True when this (token, slot) was open and now points at `row`. The memory must be kept by keep().
  bool accept(uint32_t token, uint32_t slot, const std::byte* row);
  bool accepted(uint32_t token, uint32_t slot) const { return bit(index(token, slot)); }
  // The token is no longer wanted: its open slots count as done.
  void mask(uint32_t token);
  bool masked(uint32_t token) const { return masked_[token]; }
  // Whether a slot still needs an output.
  bool open(uint32_t token, uint32_t slot) const { return !masked_[token] && !bit(index(token, slot)); }

  // Holds the memory that accepted rows point into until the next reset.
  void keep(RowBuffer buffer) { kept_.push_back(std::move(buffer)); }
  void release() { kept_.clear(); }

  bool complete() const { return remaining_ == 0; }
  uint64_t remaining() const { return remaining_; }
  // The outputs of a token in slot order; all accepted.
  const std::byte* const* rows(uint32_t token) const { return rows_.data() + index(token, 0); }

 private:
  size_t index(uint32_t token, uint32_t slot) const { return static_cast<size_t>(token) * slots_ + slot; }
  bool bit(size_t i) const { return (bits_[i / 64] >> (i % 64)) & 1u; }

  uint32_t slots_ = 0;
  uint64_t remaining_ = 0;  // open slots of tokens that are not masked
  std::vector<uint64_t> bits_;
  std::vector<bool> masked_;
  std::vector<const std::byte*> rows_;
  std::vector<RowBuffer> kept_;
};

}  // namespace conclave
