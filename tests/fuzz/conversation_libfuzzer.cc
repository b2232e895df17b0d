#include <cstdint>
#include <cstring>
#include <string_view>

#include "tests/fuzz/conversation_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 4, size - 4);
  switch (data[0] & 3) {
    case 0:
    case 1:
      conclave::fuzz::try_output(rest, data[1], data[2] | (data[3] << 8));
      break;
    case 2: {
      const size_t end = rest.find('\0');
      if (end != std::string_view::npos)
        conclave::fuzz::try_coercion(rest.substr(0, end), rest.substr(end + 1));
      break;
    }
    default:
      conclave::fuzz::try_history(rest, data[1]);
  }
  return 0;
}
