#include "libs/model/page_in.h"

#include <sys/mman.h>

namespace conclave {

void will_need(const void* data, size_t bytes) {
  if (data == nullptr || bytes == 0) return;
  constexpr uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(data) & ~(kPage - 1);
  const auto end = reinterpret_cast<uintptr_t>(data) + bytes;
  // Advice: where it is refused (memory of no file, on some kernels) touching reads all the same.
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
}

void page_out(const void* data, size_t bytes) {
  constexpr uintptr_t kPage = 4096;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) & ~(kPage - 1);
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kPage - 1);
  // A kernel that refuses only keeps them longer.
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace conclave
