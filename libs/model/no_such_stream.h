// The one answer to whoever asks for a stream that is not there for them: the same at routers and the
// scheduler, so that it does not tell whether another tenant has it.
#pragma once

#include "libs/base/status.h"

namespace conclave {

inline Status no_such_stream() {
  return not_found(
      "no stream of this id can be resumed: there was none, or it ended or lost its client longer ago than "
      "gateway_grace_ms, or newer ones took its room (max_resumable_requests)");
}

}  // namespace conclave
