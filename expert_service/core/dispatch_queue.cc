#include "expert_service/core/dispatch_queue.h"

#include <utility>

#include "libs/base/check.h"

namespace conclave {

DispatchQueue::DispatchQueue(uint32_t layers, uint64_t max_items) : max_items_(max_items), layers_(layers) {
  CONCLAVE_CHECK(layers > 0 && max_items > 0);
}

void DispatchQueue::push(WaitingDispatch dispatch) {
  CONCLAVE_CHECK(dispatch.batch.layer < layers_.size());
  dispatch.arrival = next_arrival_++;
  items_ += dispatch.batch.expert_ids.size();
  ++messages_;
  layers_[dispatch.batch.layer].push_back(std::move(dispatch));
}

void DispatchQueue::forget(const WaitingDispatch& dispatch) {
  items_ -= dispatch.batch.expert_ids.size();
  --messages_;
}

bool DispatchQueue::cancel(DispatchId id) {
  for (auto& waiting : layers_) {
    for (auto it = waiting.begin(); it != waiting.end(); ++it) {
      if (it->batch.id != id) continue;
      forget(*it);
      waiting.erase(it);
      return true;
    }
  }
  return false;
}

uint64_t DispatchQueue::drop_worker(Incarnation worker) {
  uint64_t dropped = 0;
  for (auto& waiting : layers_) {
    std::erase_if(waiting, [&](const WaitingDispatch& d) {
      if (d.worker != worker) return false;
      forget(d);
      ++dropped;
      return true;
    });
  }
  return dropped;
}

void DispatchQueue::take(TimePoint now, uint64_t max_items, uint64_t& expired,
                         std::vector<WaitingDispatch>& taken) {
  taken.clear();
  while (taken.empty() && messages_ > 0) {
    std::vector<WaitingDispatch>* oldest = nullptr;
    for (auto& waiting : layers_) {
      if (!waiting.empty() && (oldest == nullptr || waiting.front().arrival < oldest->front().arrival)) {
        oldest = &waiting;
      }
    }
    uint64_t items = 0;
    auto next = oldest->begin();
    for (; next != oldest->end(); ++next) {
      const bool is_expired = next->expires <= now;
      if (!is_expired && !taken.empty() && items + next->batch.expert_ids.size() > max_items) break;
      forget(*next);
      if (is_expired) {
        ++expired;
      } else {
        items += next->batch.expert_ids.size();
        taken.push_back(std::move(*next));
      }
    }
    oldest->erase(oldest->begin(), next);
  }
}

}  // namespace conclave
