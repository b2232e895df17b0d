// The splitting step of a tokenizer file: a literal string or a regular expression in Oniguruma's (Ruby)
// syntax, run by PCRE2. Constructs whose meaning differs between the two engines are translated, or refused
// by name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"

namespace conclave::text {

// Half-open range of bytes.
struct ByteRange {
  uint32_t begin = 0;
  uint32_t end = 0;
  bool operator==(const ByteRange&) const = default;
};

// The PCRE2 equivalent of an Oniguruma pattern; INVALID_ARGUMENT names the construct that has none.
StatusOr<std::string> oniguruma_to_pcre2(std::string_view pattern);

class SplitPattern {
 public:
  static StatusOr<SplitPattern> regex(std::string_view oniguruma_pattern);
  static StatusOr<SplitPattern> literal(std::string_view text);
  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  // Appends the successive matches in `text` (valid UTF-8, under 4 GiB) to `out`, in order; empty matches
  // included, as the reference iterates them. Thread-safe. RESOURCE_EXHAUSTED when the engine hits its
  // limits.
  Status find_all(std::string_view text, std::vector<ByteRange>& out) const;

 private:
  struct Compiled;
  SplitPattern();
  std::string literal_;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace conclave::text
