#include <span>

#include "tests/fuzz/wire_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data, size));
  conclave::fuzz::try_wire_message(bytes.subspan(1), (data[0] & 1) != 0);
  return 0;
}
