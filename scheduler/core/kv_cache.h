// The pages of one worker, counted exactly: free + cached + used = total.
//
// A full page whose 16 tokens and whose whole prefix are known is shareable: a node of a tree whose edges are
// the tokens themselves, so no hash can serve wrong keys. It is named by its parent page, or by the request's
// salt at the root: requests of different salts never share. A shareable page that no sequence uses is
// cached; it is given up leaf first, least recently used first, when a page is needed. Promised pages are
// always among the free and the cached ones.
//
// Costs: match is one look-up a page; take, publish and release are logarithmic in the cached leaves.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/model/plan.h"

namespace conclave::scheduler {

class KvCache {
 public:
  using PageTokens = std::array<TokenId, kBlockTokens>;

  explicit KvCache(uint32_t total);

  uint32_t total() const { return total_; }
  uint32_t free() const { return static_cast<uint32_t>(free_.size()); }
  uint32_t cached() const { return cached_; }
  uint32_t used() const { return total_ - free() - cached_; }
  uint32_t promised() const { return promised_; }
  // Free or cached, and promised to nobody.
  uint32_t available() const { return free() + cached_ - promised_; }
  uint64_t evictions() const { return evictions_; }

  // The longest chain of shareable pages that begins `tokens`, from the first page on; whole pages only.
  std::vector<BlockId> match(std::string_view salt, std::span<const TokenId> tokens) const;
  // How many of a match's pages are cached: using it makes so many fewer pages available.
  uint32_t cached_among(std::span<const BlockId> match) const;

  // Uses a match and promises `more` pages, both or neither: false when fewer are available.
  bool admit(std::span<const BlockId> match, uint32_t more);
  // Turns one promised page into a used one of the caller's own, giving up a cached one if none is free.
  BlockId take();
  void give_up_promise(uint32_t count);
  // A page of the caller's own, now full and computed, becomes shareable under the page before it (nullopt:
  // the first page of `salt`), which the caller uses and which is shareable. False: an equal page is there
  // already and this one stays the caller's own.
  bool publish(BlockId page, std::optional<BlockId> parent, std::string_view salt, const PageTokens& tokens);
  // How many of a caller's pages nobody else uses: so many become available when it releases them.
  uint32_t sole_use(std::span<const BlockId> pages) const;
  // The caller uses these pages no more, in the order of its table. Its own ones become free, shareable ones
  // that nobody else uses become cached.
  void release(std::span<const BlockId> pages);

  // Recounts; an error names the first difference.
  Status audit() const;

 private:
  static constexpr uint64_t kRoot = uint64_t{1} << 32;  // parents at and above it are salts

  struct Key {
    uint64_t parent = 0;
    PageTokens tokens{};
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  struct Page {
    uint32_t users = 0;     // sequences; 0: free or cached
    uint32_t children = 0;  // shareable pages under it
    uint64_t touched = 0;   // when it was last released, in releases
    bool shareable = false;
    Key key;  // shareable
  };
  struct Salt {
    uint64_t root = 0;
    uint32_t pages = 0;  // first pages
  };

  void evict_one();
  void forget_root(uint64_t root);
  bool is_leaf(const Page& page) const { return page.shareable && page.users == 0 && page.children == 0; }

  const uint32_t total_;
  uint32_t promised_ = 0;
  uint32_t cached_ = 0;
  uint64_t clock_ = 0;
  uint64_t evictions_ = 0;
  uint64_t next_root_ = kRoot;
  std::vector<Page> pages_;
  std::vector<BlockId> free_;  // a stack: pages used last are warm
  std::unordered_map<Key, BlockId, KeyHash> index_;
  std::unordered_map<std::string, Salt> salts_;
  std::unordered_map<uint64_t, std::string> salt_of_root_;
  std::set<std::pair<uint64_t, BlockId>> leaves_;  // cached leaves by when they were released
};

}  // namespace conclave::scheduler
