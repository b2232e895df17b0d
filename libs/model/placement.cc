#include "libs/model/placement.h"

#include <algorithm>

#include "libs/base/check.h"

namespace conclave {

PlacementTable::PlacementTable(Epoch epoch, uint32_t layers, uint32_t experts,
                               std::vector<ShardEndpoint> shards)
    : epoch_(epoch),
      layers_(layers),
      experts_(experts),
      shards_(std::move(shards)),
      homes_(static_cast<size_t>(layers) * experts) {}

void PlacementTable::add_home(uint32_t layer, uint32_t expert, uint16_t shard_index) {
  CONCLAVE_CHECK(layer < layers_ && expert < experts_);
  homes_[static_cast<size_t>(layer) * experts_ + expert].push_back(shard_index);
}

bool PlacementTable::complete() const {
  return !homes_.empty() &&
         std::none_of(homes_.begin(), homes_.end(), [](const auto& h) { return h.empty(); });
}

int PlacementTable::find_shard(Incarnation shard) const {
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (shards_[i].shard == shard) return static_cast<int>(i);
  }
  return -1;
}

Status PlacementTable::validate() const {
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (!shards_[i].shard) return invalid_field("placement.shards", "a shard without an incarnation");
    if (find_shard(shards_[i].shard) != static_cast<int>(i)) {
      return invalid_field("placement.shards", "the same shard twice: " + shards_[i].name);
    }
  }
  for (const auto& homes : homes_) {
    for (uint16_t index : homes) {
      if (index >= shards_.size()) return invalid_field("placement.homes", "a shard index out of range");
    }
  }
  return OkStatus();
}

PlacementTable even_placement(Epoch epoch, uint32_t layers, uint32_t experts,
                              std::vector<ShardEndpoint> shards) {
  const uint64_t count = shards.size();
  PlacementTable table(epoch, layers, experts, std::move(shards));
  if (count == 0) return table;
  for (uint32_t layer = 0; layer < layers; ++layer) {
    for (uint32_t e = 0; e < experts; ++e) {
      table.add_home(layer, e, static_cast<uint16_t>(static_cast<uint64_t>(e) * count / experts));
    }
  }
  return table;
}

}  // namespace conclave
