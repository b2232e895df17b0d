// Says things once: whether a key is seen for the first time. Bounded, so that clients cannot fill memory (or
// the log) with names; past the bound every key counts as seen.
#pragma once

#include <mutex>
#include <set>
#include <string>
#include <string_view>

namespace conclave::router {

// Any thread.
class FirstTime {
 public:
  static constexpr size_t kMaxKeys = 256;

  bool operator()(std::string_view key) {
    std::lock_guard lock(mutex_);
    if (seen_.find(key) != seen_.end() || seen_.size() >= kMaxKeys) return false;
    seen_.emplace(key);
    return true;
  }

 private:
  std::mutex mutex_;
  std::set<std::string, std::less<>> seen_;
};

}  // namespace conclave::router
