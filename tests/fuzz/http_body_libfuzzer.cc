#include <cstddef>
#include <cstdint>

#include "tests/fuzz/http_body_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  conclave::fuzz::try_http_body({reinterpret_cast<const char*>(data) + 1, size - 1}, (data[0] & 1) != 0);
  return 0;
}
