// The last things that happened to a cluster, for people: who came, who went, what was noticed. Bounded; what
// happens again and again is one entry with a count, so that it does not push out the rest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "libs/base/clock.h"

namespace conclave::scheduler {

struct ClusterEvent {
  uint64_t number = 0;  // from 1; the newest of an entry with a count
  std::string kind;     // conclave/v1/cluster.proto lists them
  std::string who;      // a member, a router or a request; empty: the cluster
  std::string detail;
  TimePoint at = 0;  // the last time
  uint32_t times = 1;
};

class EventLog {
 public:
  static constexpr size_t kKept = 128;     // entries
  static constexpr size_t kLookBack = 16;  // entries within which an alike one is found
  static constexpr size_t kMaxText = 200;  // bytes of each text; the rest is cut off

  void add(std::string_view kind, std::string_view who, std::string_view detail, TimePoint now) {
    ClusterEvent event{++newest_, std::string(kind), cut(who), cut(detail), now};
    const size_t back = std::min(entries_.size(), kLookBack);
    for (auto it = entries_.end() - static_cast<ptrdiff_t>(back); it != entries_.end(); ++it) {
      if (it->kind != event.kind || it->who != event.who || it->detail != event.detail) continue;
      event.times = it->times + (it->times < UINT32_MAX ? 1 : 0);
      entries_.erase(it);
      break;
    }
    entries_.push_back(std::move(event));
    if (entries_.size() > kKept) entries_.pop_front();
  }

  // The oldest first.
  const std::deque<ClusterEvent>& entries() const { return entries_; }

 private:
  // Not inside of a UTF-8 sequence.
  static std::string cut(std::string_view text) {
    size_t length = std::min(text.size(), kMaxText);
    while (length > 0 && length < text.size() && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80)
      --length;
    return std::string(text.substr(0, length));
  }

  std::deque<ClusterEvent> entries_;
  uint64_t newest_ = 0;
};

}  // namespace conclave::scheduler
