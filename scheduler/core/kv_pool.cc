#include "scheduler/core/kv_pool.h"

#include "libs/base/check.h"

namespace conclave::scheduler {

KvPool::KvPool(uint32_t total) : total_(total), used_(total, false) {
  free_.reserve(total);
  for (uint32_t i = total; i-- > 0;) free_.push_back(i);
}

bool KvPool::promise(uint32_t count) {
  if (count > available()) return false;
  promised_ += count;
  return true;
}

BlockId KvPool::take() {
  CONCLAVE_CHECK(promised_ > 0 && !free_.empty());
  --promised_;
  const BlockId block = free_.back();
  free_.pop_back();
  CONCLAVE_CHECK(!used_[block]);
  used_[block] = true;
  return block;
}

void KvPool::give_up_promise(uint32_t count) {
  CONCLAVE_CHECK(count <= promised_);
  promised_ -= count;
}

void KvPool::release(std::span<const BlockId> blocks) {
  for (const BlockId block : blocks) {
    CONCLAVE_CHECK(block < total_ && used_[block]);
    used_[block] = false;
    free_.push_back(block);
  }
}

}  // namespace conclave::scheduler
