#include <cstddef>
#include <cstdint>
#include <span>

#include "tests/fuzz/text_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 0) conclave::fuzz::try_token_ids({data + 1, size - 1}, data[0]);
  return 0;
}
