// Finds stop strings in text that arrives in pieces, holding back only what may still become one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace conclave::gateway {

class StopStrings {
 public:
  // None may be empty.
  explicit StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // Appends to `out` what can no longer be part of a stop string. True when one is complete: `out` then got
  // the text before the one that ends first (of those, the one that starts first), and nothing more is taken.
  bool push(std::string_view piece, std::string& out);
  // Appends what was held back: the text ended without a stop string.
  void flush(std::string& out);

 private:
  std::vector<std::string> stops_;
  std::string held_;
};

}  // namespace conclave::gateway
