// A request's id as people and clients see it.
#pragma once

#include <cstdio>
#include <string>

#include "libs/base/ids.h"

namespace conclave {

// 32 hexadecimal digits.
inline std::string id_text(RequestId id) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%016llx%016llx", static_cast<unsigned long long>(id.hi),
                static_cast<unsigned long long>(id.lo));
  return buffer;
}

}  // namespace conclave
