#include "attention_service/core/combine_tracker.h"

namespace conclave {

void CombineTracker::reset(uint32_t tokens, uint32_t slots) {
  slots_ = slots;
  const size_t count = static_cast<size_t>(tokens) * slots;
  remaining_ = count;
  bits_.assign((count + 63) / 64, 0);
  masked_.assign(tokens, false);
  rows_.assign(count, nullptr);
  kept_.clear();
}

bool CombineTracker::accept(uint32_t token, uint32_t slot, const std::byte* row) {
  const size_t i = index(token, slot);
  if (bit(i) || masked_[token]) return false;
  bits_[i / 64] |= uint64_t{1} << (i % 64);
  rows_[i] = row;
  --remaining_;
  return true;
}

void CombineTracker::mask(uint32_t token) {
  if (masked_[token]) return;
  for (uint32_t slot = 0; slot < slots_; ++slot) {
    if (!bit(index(token, slot))) --remaining_;
  }
  masked_[token] = true;
}

}  // namespace conclave
