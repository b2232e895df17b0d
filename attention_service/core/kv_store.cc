#include "attention_service/core/kv_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace conclave {

StatusOr<KvStore> KvStore::reserve(const ModelSpec& spec, Precision precision, uint32_t blocks) {
  if (blocks == 0) return invalid_field("kv_blocks", "must be at least 1");
  const kernels::KvShape shape{spec.num_heads, spec.num_kv_heads, spec.head_dim, precision};
  const size_t page_bytes = kernels::kv_page_bytes(shape);
  const size_t bytes = page_bytes * blocks * spec.num_layers;
  void* base =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return resource_exhausted("cannot reserve " + std::to_string(bytes >> 20) + " MiB for " +
                              std::to_string(blocks) + " KV blocks: " + std::strerror(errno));
  }
  return KvStore(shape, spec.num_layers, blocks, page_bytes, static_cast<std::byte*>(base));
}

KvStore::~KvStore() {
  if (base_ != nullptr) munmap(base_, bytes());
}

KvStore::KvStore(KvStore&& other) noexcept
    : shape_(other.shape_),
      layers_(other.layers_),
      blocks_(other.blocks_),
      page_bytes_(other.page_bytes_),
      base_(std::exchange(other.base_, nullptr)) {}

void KvStore::copy(BlockId from, BlockId to) {
  for (uint32_t layer = 0; layer < layers_; ++layer) {
    std::memcpy(page(layer, to), page(layer, from), page_bytes_);
  }
}

StatusOr<uint32_t> kv_blocks_within(const ModelSpec& spec, Precision precision, uint64_t bytes,
                                    uint32_t most) {
  const uint64_t page =
      spec.num_layers * kernels::kv_page_bytes({spec.num_heads, spec.num_kv_heads, spec.head_dim, precision});
  const uint64_t pages = bytes / std::max<uint64_t>(page, 1);
  if (pages == 0) {
    return invalid_field("attention.kv_bytes", "attention.kv_bytes: " + std::to_string(bytes) +
                                                   " bytes hold no page of this model, which takes " +
                                                   std::to_string(page));
  }
  return static_cast<uint32_t>(std::min<uint64_t>(pages, most));
}

}  // namespace conclave
