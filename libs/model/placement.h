// Which shard holds which expert of which layer. Experts are assigned at run time; an expert may have several
// homes, or none for the moment. Outputs never depend on it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/status.h"

namespace conclave {

struct ShardEndpoint {
  Incarnation shard;
  std::string name;               // for people: the configured or generated name
  std::string transport_address;  // opaque, from the shard's hello
};

class PlacementTable {
 public:
  PlacementTable() = default;
  PlacementTable(Epoch epoch, uint32_t layers, uint32_t experts, std::vector<ShardEndpoint> shards);

  Epoch epoch() const { return epoch_; }
  uint32_t layers() const { return layers_; }
  uint32_t experts() const { return experts_; }
  const std::vector<ShardEndpoint>& shards() const { return shards_; }

  // Indices into shards(); empty when the expert has no home now.
  const std::vector<uint16_t>& homes(uint32_t layer, uint32_t expert) const {
    return homes_[static_cast<size_t>(layer) * experts_ + expert];
  }
  void add_home(uint32_t layer, uint32_t expert, uint16_t shard_index);
  // Whether every expert of every layer has a home.
  bool complete() const;
  // Index of a shard by incarnation, or -1.
  int find_shard(Incarnation shard) const;
  // Checks what came from a peer: every index within bounds, no duplicate shard.
  Status validate() const;

 private:
  Epoch epoch_;
  uint32_t layers_ = 0;
  uint32_t experts_ = 0;
  std::vector<ShardEndpoint> shards_;
  std::vector<std::vector<uint16_t>> homes_;
};

// An even spread: for every layer, expert e of E goes to shard e*S/E (contiguous ranges), limited by nothing
// but the number of shards. The first form of placement; load-driven placement comes with the elasticity
// issue.
PlacementTable even_placement(Epoch epoch, uint32_t layers, uint32_t experts,
                              std::vector<ShardEndpoint> shards);

}  // namespace conclave
