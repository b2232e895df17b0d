#include <array>
#include <cstdlib>

#include "libs/base/check.h"
#include "libs/kernels/cpu/table.h"

namespace conclave::kernels {
namespace {

struct Buffers {
  struct Buffer {
    void* data = nullptr;
    size_t bytes = 0;
  };
  std::array<Buffer, static_cast<size_t>(Scratch::kCount)> slots;
  ~Buffers() {
    for (auto& slot : slots) std::free(slot.data);
  }
};

}  // namespace

void* thread_scratch(Scratch slot, size_t bytes) {
  thread_local Buffers buffers;
  auto& buffer = buffers.slots[static_cast<size_t>(slot)];
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer.bytes = (bytes + 4095) & ~size_t{4095};
    buffer.data = std::aligned_alloc(4096, buffer.bytes);
    CONCLAVE_CHECK(buffer.data != nullptr);
  }
  return buffer.data;
}

}  // namespace conclave::kernels
