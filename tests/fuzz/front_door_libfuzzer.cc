#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tests/fuzz/front_door_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] & 3) {
    case 0:
      conclave::fuzz::try_authorization(text);
      break;
    case 1:
      conclave::fuzz::try_timeout(text);
      break;
    case 2:
      conclave::fuzz::try_request_id(text);
      break;
    default:
      conclave::fuzz::try_key_file(text);
  }
  return 0;
}
