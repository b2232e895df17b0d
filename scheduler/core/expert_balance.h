// Which shards an expert should live on, from what each expert is asked for and what each shard can hold.
// Pure: equal arguments give equal answers. What is there stays where it is as far as possible, since each
// new home means weights to be mapped.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "libs/base/ids.h"

namespace conclave::scheduler {

struct BalanceShard {
  Incarnation shard;
  uint64_t slots = 0;    // (layer, expert) pairs its memory holds; UINT64_MAX: no limit
  bool leaving = false;  // gets nothing and loses all
};

struct BalanceOptions {
  uint32_t min_replicas = 2;  // homes of every expert, where slots and shards allow
  uint32_t max_replicas = 8;  // homes of a hot one
  // Something moves for load only where a layer's busiest shard is beyond this multiple of the mean, and only
  // when that shard's load falls by this factor. Homes that are missing, and shards that hold nothing of a
  // layer, do not wait for it.
  double improve_ratio = 1.10;
  // Only what is missing is made (and what leaves, moved): nothing moves for load, and a shard that joined
  // gets no more than that.
  bool repair_only = false;
};

struct Balance {
  // [layer * experts + expert]: indices into `shards`, the first one preferred. Homes that stay keep their
  // order; new ones follow.
  std::vector<std::vector<uint16_t>> homes;
  uint64_t added = 0;    // homes that `current` lacks
  uint64_t removed = 0;  // homes of `current` that are gone
  // Of the worst layer: the busiest shard's load over the mean, an expert's load split evenly over its homes.
  double busiest_before = 0;
  double busiest_after = 0;
  bool complete = false;  // every expert has a home
};

// `load`: layers * experts numbers, in any unit, negative ones and NaN taken as 0; empty, or all zero in a
// layer: unknown there, and taken as even. `current`: the homes of today, indexed like Balance::homes; empty:
// none at all.
//
// First every expert gets one home, then min_replicas as far as slots go; for a first home another expert's
// second one gives way. Then, layer by layer (layers run one after another, so each must be even by itself),
// shards that hold nothing of a layer get their share, and a busiest shard beyond improve_ratio is relieved:
// by moves, and where those are not enough by further homes for its hot experts. A shard's free slots are
// shared evenly among the layers before any layer takes more. Called again with its own answer and the same
// loads it changes nothing.
//
// 62 layers of 256 experts take 5 to 30 ms on 8 shards, up to half a second on 64.
Balance balance_experts(uint32_t layers, uint32_t experts, std::span<const double> load,
                        const std::vector<BalanceShard>& shards,
                        const std::vector<std::vector<uint16_t>>& current, const BalanceOptions& options);

}  // namespace conclave::scheduler
