// The worker's KV cache: one page per (layer, block). Memory is reserved, not used, until a page is written.
#pragma once

#include <cstddef>
#include <cstdint>

#include "libs/base/status.h"
#include "libs/kernels/ops.h"
#include "libs/model/model_spec.h"
#include "libs/model/plan.h"

namespace conclave {

class KvStore {
 public:
  // RESOURCE_EXHAUSTED when the address space cannot be reserved.
  static StatusOr<KvStore> reserve(const ModelSpec& spec, Precision precision, uint32_t blocks);
  ~KvStore();
  KvStore(KvStore&& other) noexcept;
  KvStore& operator=(KvStore&&) = delete;

  const kernels::KvShape& shape() const { return shape_; }
  uint32_t blocks() const { return blocks_; }
  std::byte* page(uint32_t layer, BlockId block) {
    return base_ + (static_cast<size_t>(layer) * blocks_ + block) * page_bytes_;
  }
  // Keys and values of one page onto another, in every layer. Both in range and different.
  void copy(BlockId from, BlockId to);

 private:
  KvStore(kernels::KvShape shape, uint32_t layers, uint32_t blocks, size_t page_bytes, std::byte* base)
      : shape_(shape), layers_(layers), blocks_(blocks), page_bytes_(page_bytes), base_(base) {}
  size_t bytes() const { return page_bytes_ * blocks_ * layers_; }

  kernels::KvShape shape_;
  uint32_t layers_;
  uint32_t blocks_;
  size_t page_bytes_;
  std::byte* base_;
};

// Pages whose keys and values, of every layer, fit into `bytes`; at most `most`, which is what the scheduler
// keeps books of. INVALID_ARGUMENT naming attention.kv_bytes when not even one does.
StatusOr<uint32_t> kv_blocks_within(const ModelSpec& spec, Precision precision, uint64_t bytes,
                                    uint32_t most);

}  // namespace conclave
