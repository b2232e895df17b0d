#include "expert_service/core/expert_store.h"

#include "libs/base/check.h"
#include "libs/model/page_in.h"

namespace conclave {
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
    for (; asked_ < cold_.size() && asked_bytes_ < kReadAheadBytes; ++asked_) {
      for (const WeightView* w : {&cold_[asked_]->w1, &cold_[asked_]->w3, &cold_[asked_]->w2}) {
        will_need(*w);
        asked_bytes_ += w->bytes();
      }
    }
    const ExpertWeights& w = *cold_.front();
    cold_.pop_front();
    --asked_;
    asked_bytes_ -= w.w1.bytes() + w.w3.bytes() + w.w2.bytes();
    touched += page_in(w.w1) + page_in(w.w3) + page_in(w.w2);
  }
  return touched;
}

}  // namespace conclave
