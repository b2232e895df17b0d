#include "expert_service/core/expert_store.h"

#include "libs/base/check.h"

namespace conclave {
namespace {

constexpr size_t kPageBytes = 4096;

uint64_t touch(const void* data, size_t bytes) {
  const auto* p = static_cast<const volatile unsigned char*>(data);
  for (size_t i = 0; i < bytes; i += kPageBytes) (void)p[i];
  return bytes;
}

uint64_t touch(const WeightView& w) {
  uint64_t touched = touch(w.data, w.bytes());
  if (w.scales != nullptr) {
    const size_t scale_rows = (w.rows + 127) / 128;
    touched += touch(w.scales, scale_rows * w.scale_cols * sizeof(float));
  }
  return touched;
}

}  // namespace

ExpertStore::ExpertStore(const ExpertTable& table, uint32_t num_experts)
    : table_(table), num_experts_(num_experts), held_(table.size() * num_experts) {
  for (const auto& layer : table_) CONCLAVE_CHECK(layer.size() == num_experts);
}

void ExpertStore::assign(const PlacementTable& placement, Incarnation shard) {
  const int self = placement.find_shard(shard);
  if (self < 0) return;
  for (uint32_t layer = 0; layer < placement.layers() && layer < table_.size(); ++layer) {
    for (uint32_t expert = 0; expert < placement.experts() && expert < num_experts_; ++expert) {
      for (uint16_t home : placement.homes(layer, expert)) {
        if (home != self || held_[index(layer, expert)]) continue;
        held_[index(layer, expert)] = true;
        ++held_count_;
        cold_.push_back(&table_[layer][expert]);
      }
    }
  }
}

uint64_t ExpertStore::warm(uint64_t bytes) {
  uint64_t touched = 0;
  while (!cold_.empty() && touched < bytes) {
    const ExpertWeights& w = *cold_.front();
    cold_.pop_front();
    touched += touch(w.w1) + touch(w.w3) + touch(w.w2);
  }
  return touched;
}

}  // namespace conclave
