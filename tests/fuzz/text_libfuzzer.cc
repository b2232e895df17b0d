#include "tests/fuzz/text_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 2, size - 2);
  switch (data[0] & 3) {
    case 0:
      conclave::fuzz::try_tokenizer_json(rest);
      break;
    case 1:
      conclave::fuzz::try_split_pattern(rest);
      break;
    case 2:
      conclave::fuzz::try_text(rest);
      break;
    default:
      conclave::fuzz::try_token_ids({data + 2, size - 2}, data[1]);
      break;
  }
  return 0;
}
