// Only in builds with ThreadSanitizer. The installed Abseil is built without it, which therefore does not see that whoever
// drops the last reference to a status does so after all others: it reported races that are none. The same code here,
// compiled with it, takes the library's place when an executable is linked.
#include <atomic>
#include <cstdint>

#include "absl/status/status.h"

namespace absl {
ABSL_NAMESPACE_BEGIN

void Status::UnrefNonInlined(uintptr_t rep) {
  status_internal::StatusRep* const shared = RepToPointer(rep);
  if (shared->ref.load(std::memory_order_acquire) == 1 || shared->ref.fetch_sub(1, std::memory_order_acq_rel) == 1)
    delete shared;
}

ABSL_NAMESPACE_END
}  // namespace absl
