// Finds added tokens in text: at each position the longest one, from left to right.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "libs/text/split_pattern.h"
#include "libs/text/tokenizer_spec.h"

namespace conclave::text {

// A stretch of text, or one added token.
struct Section {
  ByteRange range;
  bool is_token = false;
  TokenId token = 0;
};

class AddedTokenMatcher {
 public:
  // Keeps copies of those `tokens` whose `normalized` flag equals `normalized`; their content is brought to
  // NFC first when `nfc` and `normalized` are set.
  AddedTokenMatcher(const std::vector<AddedToken>& tokens, bool normalized, bool nfc);
  bool empty() const { return tokens_.empty(); }

  // Cuts `text` into sections, which are appended to `out`. No token is found that overlaps a range of
  // `literal` (ascending, disjoint).
  void split(std::string_view text, std::span<const ByteRange> literal, std::vector<Section>& out) const;

 private:
  struct Node {
    // Children in one contiguous run, ordered by byte.
    std::vector<std::pair<uint8_t, uint32_t>> children;
    int32_t token = -1;
  };
  struct Found {
    const AddedToken* token = nullptr;
    size_t end = 0;
  };
  void insert(std::string_view content, size_t index);
  Found longest_at(std::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  std::array<bool, 256> first_byte_{};
};

}  // namespace conclave::text
