// Byte-pair merging of one pre-token: the pair of lowest rank is merged first, the leftmost among equals.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "libs/base/ids.h"

namespace conclave::text {

struct Merge {
  TokenId left = 0;
  TokenId right = 0;
  TokenId result = 0;
};

// Immutable once built; every member is thread-safe.
class Bpe {
 public:
  static constexpr TokenId kNoToken = 0xffffffff;

  // `byte_ids`: the token of each single byte, kNoToken where the vocabulary has none (such bytes vanish).
  // `merges` in order of rank; of equal pairs the last counts, as in the reference.
  Bpe(const std::array<TokenId, 256>& byte_ids, const std::vector<Merge>& merges);

  // Appends the tokens of `word` to `out`. O(n log n) in the word's length.
  void encode(std::string_view word, std::vector<TokenId>& out) const;

 private:
  struct Entry {
    uint64_t pair;
    uint32_t rank;
    TokenId result;
  };
  // The entry of a pair, or one with rank kNoRank.
  const Entry& find(TokenId left, TokenId right) const;
  void encode_short(std::string_view word, std::vector<TokenId>& out) const;
  void encode_long(std::string_view word, std::vector<TokenId>& out) const;

  std::array<TokenId, 256> byte_ids_;
  std::vector<Entry> table_;  // open addressing; a power of two, at most half full
  uint64_t mask_ = 0;
};

}  // namespace conclave::text
