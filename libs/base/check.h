// CHECK is for our own bugs only: input, files and peers are answered with a Status (status.h), never with
// CHECK.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace conclave::internal {
[[noreturn]] inline void check_failed(const char* file, int line, const char* expression) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, expression);
  std::fflush(stderr);
  std::abort();
}
}  // namespace conclave::internal

#define CONCLAVE_CHECK(condition)         \
  (static_cast<bool>(condition) ? void(0) \
                                : ::conclave::internal::check_failed(__FILE__, __LINE__, #condition))
