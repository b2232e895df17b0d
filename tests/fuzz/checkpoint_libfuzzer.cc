#include <cstdint>
#include <span>
#include <string>

#include "tests/fuzz/checkpoint_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 2, size - 2);
  switch (data[0] % 3) {
    case 0:
      conclave::fuzz::try_safetensors(std::as_bytes(std::span(data + 2, size - 2)));
      break;
    case 1:
      conclave::fuzz::try_safetensors_header(text, data[1]);
      break;
    default:
      conclave::fuzz::try_config(text);
  }
  return 0;
}
