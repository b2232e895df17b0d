// What a request that makes no progress waits for, as far as the scheduler can tell.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::scheduler {

enum class StallHop : uint8_t {
  kNoWorker,   // no worker takes new work
  kPlacement,  // experts without a home
  kRoom,       // first in the queue, and no worker has room for it
  kTurn,       // others go first, in the queue or on its worker
  kWorker,     // its worker owes a step
  kShard,      // the same, while a shard is suspected or complained about
  kCount
};

constexpr std::string_view stall_hop_name(StallHop hop) {
  constexpr std::string_view kNames[] = {"no_worker", "placement", "room", "turn", "worker", "shard"};
  static_assert(std::size(kNames) == static_cast<size_t>(StallHop::kCount));
  return kNames[static_cast<size_t>(hop)];
}

template <class T>
using PerStallHop = std::array<T, static_cast<size_t>(StallHop::kCount)>;

}  // namespace conclave::scheduler
