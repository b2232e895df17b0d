#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tests/fuzz/http_body_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  if ((data[0] & 2) != 0)
    conclave::fuzz::try_text_body(body, (data[0] & 1) != 0);
  else
    conclave::fuzz::try_http_body(body, (data[0] & 1) != 0);
  return 0;
}
