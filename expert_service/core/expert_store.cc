#include "expert_service/core/expert_store.h"

#include <algorithm>

#include "libs/base/check.h"
#include "libs/model/page_in.h"

namespace conclave {
namespace {

uint64_t bytes_of(const ExpertWeights& w) {
  uint64_t sum = 0;
  for (const WeightView* view : {&w.w1, &w.w3, &w.w2}) sum += view->bytes() + scale_bytes(*view);
  return sum;
}

}  // namespace

ExpertStore::ExpertStore(const ExpertTable& table, uint32_t num_experts, Options options)
    : table_(table),
      num_experts_(num_experts),
      options_(options),
      state_(table.size() * num_experts, State::kNone),
      assigned_(state_.size()) {
  for (const auto& layer : table_) CONCLAVE_CHECK(layer.size() == num_experts);
}

uint64_t ExpertStore::largest_bytes() const {
  uint64_t largest = 0;
  for (const auto& layer : table_) {
    for (const ExpertWeights& w : layer) largest = std::max(largest, bytes_of(w));
  }
  return largest;
}

void ExpertStore::assign(const PlacementTable& placement, Incarnation shard) {
  assigned_.assign(assigned_.size(), false);
  const int self = placement.find_shard(shard);
  for (uint32_t layer = 0; self >= 0 && layer < placement.layers() && layer < table_.size(); ++layer) {
    for (uint32_t expert = 0; expert < placement.experts() && expert < num_experts_; ++expert) {
      const auto& homes = placement.homes(layer, expert);
      if (std::find(homes.begin(), homes.end(), self) == homes.end()) continue;
      const size_t i = index(layer, expert);
      assigned_[i] = true;
      if (state_[i] != State::kNone) continue;
      state_[i] = State::kCold;
      ++held_;
      held_bytes_ += bytes_of(at(i));
    }
  }
  queue_cold();
}

void ExpertStore::queue_cold() {
  cold_.clear();
  asked_ = 0;
  asked_bytes_ = 0;
  for (size_t i = 0; i < state_.size(); ++i) {
    if (assigned_[i] && state_[i] == State::kCold) cold_.push_back(i);
  }
}

uint64_t ExpertStore::release() {
  uint64_t released = 0;
  for (size_t i = 0; i < state_.size(); ++i) {
    if (assigned_[i] || state_[i] == State::kNone) continue;
    const ExpertWeights& w = at(i);
    const uint64_t bytes = bytes_of(w);
    if (state_[i] == State::kWarm) warm_bytes_ -= bytes;
    held_bytes_ -= bytes;
    --held_;
    ++released;
    state_[i] = State::kNone;
    if (options_.mapped) {
      page_out(w.w1);
      page_out(w.w3);
      page_out(w.w2);
    }
  }
  queue_cold();
  return released;
}

uint64_t ExpertStore::warm(uint64_t bytes) {
  uint64_t touched = 0;
  while (!cold_.empty() && touched < bytes) {
    if (options_.capacity_bytes > 0 && warm_bytes_ + bytes_of(at(cold_.front())) > options_.capacity_bytes) {
      cold_.clear();
      break;
    }
    for (; asked_ < cold_.size() && asked_bytes_ < kReadAheadBytes; ++asked_) {
      const ExpertWeights& next = at(cold_[asked_]);
      for (const WeightView* w : {&next.w1, &next.w3, &next.w2}) will_need(*w);
      asked_bytes_ += bytes_of(next);
    }
    const size_t i = cold_.front();
    cold_.pop_front();
    const ExpertWeights& w = at(i);
    const uint64_t more = bytes_of(w);
    --asked_;
    asked_bytes_ -= more;
    touched += page_in(w.w1) + page_in(w.w3) + page_in(w.w2);
    warm_bytes_ += more;
    state_[i] = State::kWarm;
  }
  return touched;
}

}  // namespace conclave
