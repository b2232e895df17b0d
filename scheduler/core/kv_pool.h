// The pages of one worker, counted exactly: free + used = total, and promised pages are always among the free
// ones.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "libs/base/ids.h"

namespace conclave::scheduler {

class KvPool {
 public:
  explicit KvPool(uint32_t total);

  uint32_t total() const { return total_; }
  uint32_t free() const { return static_cast<uint32_t>(free_.size()); }
  uint32_t used() const { return total_ - free(); }
  uint32_t promised() const { return promised_; }
  // Free and promised to nobody.
  uint32_t available() const { return free() - promised_; }

  // Promises `count` pages to a sequence; false (and nothing changes) when fewer are available.
  bool promise(uint32_t count);
  // Turns one promised page into a used one.
  BlockId take();
  void give_up_promise(uint32_t count);
  // Used pages become free. CHECKs that each is used.
  void release(std::span<const BlockId> blocks);

 private:
  uint32_t total_;
  uint32_t promised_ = 0;
  std::vector<BlockId> free_;  // a stack: pages used last are warm
  std::vector<bool> used_;
};

}  // namespace conclave::scheduler
