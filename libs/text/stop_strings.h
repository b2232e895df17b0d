// Finds stop strings in text that arrives in pieces, and holds back what might become one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"

namespace conclave::text {

// For one stream; not thread-safe. The stop string whose last byte comes first wins, the longest among those
// that end together, so the outcome does not depend on how the text is cut.
class StopStringMatcher {
 public:
  static constexpr size_t kMaxStops = 64;
  static constexpr size_t kMaxStopBytes = 4096;  // of each

  // INVALID_ARGUMENT for an empty or over-long string, or too many of them. None at all is fine.
  // `keep_stop`: the stop string itself is emitted too.
  static StatusOr<StopStringMatcher> create(std::vector<std::string> stops, bool keep_stop = false);

  struct Match {
    size_t stop = 0;     // index of the stop string
    uint64_t begin = 0;  // byte offsets in the whole text: what precedes `begin` has all been emitted
    uint64_t end = 0;
    uint64_t token_index = 0;  // of the push that completed it
  };
  // Takes the text of token `token_index` and returns what may be shown by now: everything but the longest
  // suffix that may still become a stop string. After a match it returns "" for ever.
  std::string push(std::string_view piece, uint64_t token_index);
  // The end of the text without a match: what was held back. The object then takes no more text.
  std::string flush();
  const std::optional<Match>& match() const { return match_; }
  // Bytes held back, fewer than the longest stop string has.
  size_t held() const { return pending_.size(); }

 private:
  struct Stop {
    std::string text;
    std::vector<uint32_t> border;  // Knuth-Morris-Pratt failure function
    uint32_t matched = 0;          // bytes of `text` that end the text so far
  };
  std::vector<Stop> stops_;
  bool keep_stop_ = false;
  std::string pending_;    // not yet emitted
  uint64_t consumed_ = 0;  // bytes taken so far
  std::optional<Match> match_;
};

}  // namespace conclave::text
