// A small cache from words to their tokens: words of natural text repeat. Direct-mapped, fixed in size (256
// KiB a thread that encodes), without locks.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "libs/base/ids.h"

namespace conclave::text {

class WordCache {
 public:
  static WordCache& of_this_thread() {
    thread_local WordCache instance;
    return instance;
  }

  // Appends the tokens of `word` for the tokenizer `owner` and returns true when they are known.
  bool lookup(uint32_t owner, std::string_view word, std::vector<TokenId>& out) const {
    if (word.size() > kMaxWord) return false;
    const Key key(owner, word);
    const Entry& entry = entries_[key.slot()];
    if (!(entry.key == key)) return false;
    out.insert(out.end(), entry.ids, entry.ids + entry.count);
    return true;
  }
  void store(uint32_t owner, std::string_view word, std::span<const TokenId> ids) {
    if (word.size() > kMaxWord || ids.size() > kMaxIds) return;
    const Key key(owner, word);
    Entry& entry = entries_[key.slot()];
    entry.key = key;
    entry.count = static_cast<uint32_t>(ids.size());
    std::copy(ids.begin(), ids.end(), entry.ids);
  }

 private:
  static constexpr size_t kEntries = 4096;
  static constexpr size_t kMaxWord = 27;
  static constexpr size_t kMaxIds = 7;

  struct Key {
    uint64_t parts[4] = {};  // owner, length, and up to 27 bytes, zero-padded
    Key() = default;
    Key(uint32_t owner, std::string_view word) {
      auto* bytes = reinterpret_cast<char*>(parts);
      std::memcpy(bytes, &owner, sizeof(owner));
      bytes[4] = static_cast<char>(word.size());
      std::memcpy(bytes + 5, word.data(), word.size());
    }
    bool operator==(const Key& o) const { return std::memcmp(parts, o.parts, sizeof(parts)) == 0; }
    size_t slot() const {
      uint64_t h = 0;
      for (uint64_t part : parts) {
        h = (h ^ part) * 0x9e3779b97f4a7c15ull;
        h ^= h >> 32;
      }
      return static_cast<size_t>(h % kEntries);
    }
  };
  struct Entry {
    Key key;  // owner 0 is no tokenizer's
    uint32_t count = 0;
    TokenId ids[kMaxIds] = {};
  };
  WordCache() : entries_(std::make_unique<Entry[]>(kEntries)) {}
  std::unique_ptr<Entry[]> entries_;
};

}  // namespace conclave::text
