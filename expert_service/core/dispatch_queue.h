// Dispatches that wait for their computation, of all workers, by layer. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "libs/base/clock.h"
#include "libs/model/dispatch.h"

namespace conclave {

struct WaitingDispatch {
  Incarnation worker;
  DispatchBatch batch;
  TimePoint expires = kNever;
  uint64_t arrival = 0;  // set by the queue
};

class DispatchQueue {
 public:
  // `max_items`: (row, expert) pairs at which full() turns true; a push is never refused, since what was read
  // from the transport must go somewhere. The owner stops reading at full().
  DispatchQueue(uint32_t layers, uint64_t max_items);

  bool full() const { return items_ >= max_items_; }
  bool empty() const { return messages_ == 0; }
  uint64_t items() const { return items_; }
  uint64_t messages() const { return messages_; }

  // The batch was checked: its layer is below `layers`.
  void push(WaitingDispatch dispatch);
  // Drops a dispatch that waits; false when it does not.
  bool cancel(DispatchId id);
  // Drops what a worker has waiting; returns how many dispatches.
  uint64_t drop_worker(Incarnation worker);

  // Takes the layer whose oldest message has waited longest, and of that layer all messages in order of
  // arrival until the next would pass `max_items` pairs (one message at least). Expired ones are dropped on
  // the way and counted. `taken` is emptied first; its memory is used again.
  void take(TimePoint now, uint64_t max_items, uint64_t& expired, std::vector<WaitingDispatch>& taken);

 private:
  void forget(const WaitingDispatch& dispatch);

  const uint64_t max_items_;
  std::vector<std::vector<WaitingDispatch>> layers_;  // each in order of arrival
  uint64_t items_ = 0;
  uint64_t messages_ = 0;
  uint64_t next_arrival_ = 1;
};

}  // namespace conclave
