// What each shard had to do with one step, for a plan that asks. Times come from the worker's executor.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/model/plan.h"

namespace conclave {

class StepShards {
 public:
  // A dispatch is at the shard from `sent` to `left`, which says that it was answered or given up.
  void sent(Incarnation shard, TimePoint now) {
    Entry& entry = entries_[shard];
    if (entry.there++ == 0) entry.since = now;
  }
  void left(Incarnation shard, TimePoint now) {
    const auto it = entries_.find(shard);
    if (it == entries_.end() || it->second.there == 0) return;  // sent before the step: not of it
    if (--it->second.there == 0) it->second.timing.outstanding_ns += now - it->second.since;
  }
  void answered(Incarnation shard, Nanos latency, uint64_t items, Nanos compute) {
    ShardTiming& timing = entries_[shard].timing;
    ++timing.replies;
    timing.items += static_cast<uint32_t>(items);
    timing.slowest_ns = std::max(timing.slowest_ns, latency);
    timing.compute_ns += compute;
  }

  // Those with the most time outstanding first, kMaxTimedShards of them.
  std::vector<ShardTiming> list() const {
    std::vector<ShardTiming> all;
    all.reserve(entries_.size());
    for (const auto& [shard, entry] : entries_) {
      all.push_back(entry.timing);
      all.back().shard = shard;
    }
    std::stable_sort(all.begin(), all.end(), [](const ShardTiming& a, const ShardTiming& b) {
      return a.outstanding_ns > b.outstanding_ns;
    });
    if (all.size() > kMaxTimedShards) all.resize(kMaxTimedShards);
    return all;
  }

 private:
  struct Entry {
    ShardTiming timing;
    uint32_t there = 0;
    TimePoint since = 0;
  };
  std::map<Incarnation, Entry> entries_;
};

}  // namespace conclave
