#include "scheduler/core/kv_cache.h"

#include <algorithm>

#include "libs/base/check.h"

namespace conclave::scheduler {

KvCache::KvCache(uint32_t total) : total_(total), pages_(total) {
  free_.reserve(total);
  for (uint32_t i = total; i-- > 0;) free_.push_back(i);
}

size_t KvCache::KeyHash::operator()(const Key& key) const {
  size_t h = internal::mix64(key.parent + 0x9e3779b97f4a7c15ull);
  for (size_t i = 0; i < key.tokens.size(); i += 2) {
    h = internal::mix64(h ^ (uint64_t{key.tokens[i]} << 32 | key.tokens[i + 1]));
  }
  return h;
}

std::vector<BlockId> KvCache::match(std::string_view salt, std::span<const TokenId> tokens) const {
  std::vector<BlockId> chain;
  const auto root = salts_.find(std::string(salt));
  if (root == salts_.end()) return chain;
  Key key;
  key.parent = root->second.root;
  for (; tokens.size() >= kBlockTokens; tokens = tokens.subspan(kBlockTokens)) {
    std::copy_n(tokens.begin(), kBlockTokens, key.tokens.begin());
    const auto it = index_.find(key);
    if (it == index_.end()) break;
    chain.push_back(it->second);
    key.parent = it->second;
  }
  return chain;
}

uint32_t KvCache::cached_among(std::span<const BlockId> match) const {
  return static_cast<uint32_t>(
      std::count_if(match.begin(), match.end(), [&](BlockId b) { return pages_[b].users == 0; }));
}

uint32_t KvCache::sole_use(std::span<const BlockId> pages) const {
  return static_cast<uint32_t>(
      std::count_if(pages.begin(), pages.end(), [&](BlockId b) { return pages_[b].users == 1; }));
}

bool KvCache::admit(std::span<const BlockId> match, uint32_t more) {
  if (uint64_t{cached_among(match)} + more > available()) return false;
  for (const BlockId block : match) {
    Page& page = pages_[block];
    CONCLAVE_CHECK(page.shareable);
    if (page.users++ > 0) continue;
    --cached_;
    leaves_.erase({page.touched, block});
  }
  promised_ += more;
  return true;
}

BlockId KvCache::take() {
  CONCLAVE_CHECK(promised_ > 0);
  if (free_.empty()) evict_one();
  --promised_;
  const BlockId block = free_.back();
  free_.pop_back();
  Page& page = pages_[block];
  CONCLAVE_CHECK(page.users == 0 && !page.shareable && page.children == 0);
  page.users = 1;
  return block;
}

void KvCache::give_up_promise(uint32_t count) {
  CONCLAVE_CHECK(count <= promised_);
  promised_ -= count;
}

bool KvCache::publish(BlockId block, std::optional<BlockId> parent, std::string_view salt,
                      const PageTokens& tokens) {
  CONCLAVE_CHECK(block < total_);
  Page& page = pages_[block];
  CONCLAVE_CHECK(page.users == 1 && !page.shareable);
  Key key;
  key.tokens = tokens;
  Salt* root = nullptr;
  if (parent) {
    CONCLAVE_CHECK(pages_[*parent].shareable && pages_[*parent].users > 0);
    key.parent = *parent;
  } else {
    root = &salts_[std::string(salt)];
    if (root->root == 0) {
      root->root = next_root_++;
      salt_of_root_.emplace(root->root, salt);
    }
    key.parent = root->root;
  }
  if (!index_.try_emplace(key, block).second) return false;
  page.shareable = true;
  page.key = key;
  if (parent) {
    ++pages_[*parent].children;
  } else {
    ++root->pages;
  }
  return true;
}

void KvCache::release(std::span<const BlockId> pages) {
  ++clock_;
  for (const BlockId block : pages) {
    CONCLAVE_CHECK(block < total_ && pages_[block].users > 0);
    Page& page = pages_[block];
    if (--page.users > 0) continue;
    if (!page.shareable) {
      free_.push_back(block);
      continue;
    }
    ++cached_;
    page.touched = clock_;
    if (page.children == 0) leaves_.insert({page.touched, block});
  }
}

void KvCache::evict_one() {
  // A page under a cached one is cached itself (who uses a page uses the ones before it), so there is a leaf.
  CONCLAVE_CHECK(!leaves_.empty());
  const BlockId block = leaves_.begin()->second;
  leaves_.erase(leaves_.begin());
  Page& page = pages_[block];
  CONCLAVE_CHECK(is_leaf(page));
  index_.erase(page.key);
  const uint64_t parent = page.key.parent;
  page.shareable = false;
  --cached_;
  ++evictions_;
  free_.push_back(block);
  if (parent >= kRoot) return forget_root(parent);
  Page& above = pages_[parent];
  --above.children;
  if (is_leaf(above)) leaves_.insert({above.touched, static_cast<BlockId>(parent)});
}

void KvCache::forget_root(uint64_t root) {
  const auto name = salt_of_root_.find(root);
  const auto salt = salts_.find(name->second);
  if (--salt->second.pages > 0) return;
  salts_.erase(salt);
  salt_of_root_.erase(name);
}

Status KvCache::audit() const {
  uint32_t cached = 0, shareable = 0;
  std::vector<uint32_t> children(total_, 0);
  std::vector<uint8_t> is_free(total_, 0);
  for (const BlockId block : free_) {
    if (is_free[block]++) return internal_error("page " + std::to_string(block) + " is free twice");
  }
  for (BlockId block = 0; block < total_; ++block) {
    const Page& page = pages_[block];
    const std::string name = "page " + std::to_string(block);
    if (is_free[block] && (page.users > 0 || page.shareable))
      return internal_error(name + " is free and used");
    if (!is_free[block] && page.users == 0 && !page.shareable) return internal_error(name + " is lost");
    if (!page.shareable) continue;
    ++shareable;
    const auto it = index_.find(page.key);
    if (it == index_.end() || it->second != block)
      return internal_error(name + " is not found by its tokens");
    if (page.key.parent < kRoot) {
      const Page& parent = pages_[page.key.parent];
      if (!parent.shareable) return internal_error(name + " hangs under a page that is not shareable");
      if (parent.users < page.users) return internal_error(name + " has users that do not use its prefix");
      ++children[page.key.parent];
    }
    if (page.users == 0) ++cached;
    if (is_leaf(page) != leaves_.contains({page.touched, block})) {
      return internal_error(name + " is wrongly listed as a cached leaf");
    }
  }
  for (BlockId block = 0; block < total_; ++block) {
    if (pages_[block].children != children[block])
      return internal_error("page " + std::to_string(block) + " miscounts the pages under it");
  }
  if (index_.size() != shareable) return internal_error("the index names pages that are not shareable");
  if (cached != cached_) return internal_error("the cached pages are miscounted");
  if (promised_ > free() + cached_) return internal_error("more pages are promised than free and cached");
  if (salts_.size() != salt_of_root_.size()) return internal_error("a salt is kept without its root");
  return OkStatus();
}

}  // namespace conclave::scheduler
