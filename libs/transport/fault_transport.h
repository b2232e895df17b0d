// A seeded fault injector around any ExpertTransport: what the network and dying peers can do to a data
// plane, done on purpose and again in the same way for the same seed (in simulation; with real threads the
// faults are the same ones per message, but messages come in another order).
//
// Faults apply at this end: to what its owner sends (drop, delay, duplicate, stall) and to what it receives
// (drop, delay, duplicate, reorder, corrupt, sudden PeerDown). An inner transport's promises stay true for
// the rest. A corrupted message is encoded, has a bit flipped and is decoded again: the codec's own checks
// must find it.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "libs/base/random.h"
#include "libs/ports/executor.h"
#include "libs/ports/expert_transport.h"

namespace conclave {

// Probabilities are per message (batches; cancels count as messages for drop alone).
struct FaultPlan {
  double drop_out = 0, drop_in = 0;
  double duplicate_out = 0, duplicate_in = 0;
  double delay_out = 0, delay_in = 0;  // held back for a uniform time up to max_delay
  Nanos max_delay = 5 * kMillisecond;
  double reorder_in = 0;  // swapped with the message before it in the same poll
  double corrupt_in = 0;  // a bit flipped: arrives as Rejected
  double peer_down = 0;   // per message received: instead of it, its peer goes down
  double stall = 0;       // per message sent: everything to that peer waits for stall_time
  Nanos stall_time = 20 * kMillisecond;

  // Faults only in [from, until); outside, traffic passes untouched. What is held back still comes out.
  TimePoint from = 0;
  TimePoint until = kNever;
};

// What was injected, so that a test knows it tested something.
struct FaultCounts {
  uint64_t dropped = 0, duplicated = 0, delayed = 0, reordered = 0, corrupted = 0, peers_downed = 0,
           stalled = 0;
  uint64_t undetected = 0;  // corrupted messages that passed every check: a fault of the codec
  uint64_t passed = 0;      // messages that nothing happened to
  uint64_t total() const {
    return dropped + duplicated + delayed + reordered + corrupted + peers_downed + stalled;
  }
};

class FaultTransport final : public ExpertTransport {
 public:
  FaultTransport(std::unique_ptr<ExpertTransport> inner, Executor& executor, uint64_t seed,
                 FaultPlan plan = {});
  ~FaultTransport() override;

  // From the executor.
  void set_plan(FaultPlan plan) { plan_ = plan; }
  const FaultCounts& counts() const { return counts_; }
  // Faults on a schedule of the caller's: the peer goes down now, as if its endpoint had failed.
  void take_down(Incarnation peer, const std::string& why);
  ExpertTransport& inner() { return *inner_; }

  std::string address() const override { return inner_->address(); }
  Incarnation self() const override { return inner_->self(); }
  void connect(Incarnation peer, std::string_view address) override { inner_->connect(peer, address); }
  void close(Incarnation peer) override;
  bool is_up(Incarnation peer) const override { return inner_->is_up(peer); }
  Status submit(Incarnation peer, const DispatchBatch& batch) override;
  Status reply(Incarnation peer, const CombineBatch& batch) override;
  void cancel(Incarnation peer, DispatchId id) override;
  void poll(std::vector<TransportEvent>& out) override;
  void set_ready(std::function<void()> ready) override;
  void recycle(DispatchBatch batch) override { inner_->recycle(std::move(batch)); }
  void recycle(CombineBatch batch) override { inner_->recycle(std::move(batch)); }

 private:
  bool active() const;
  // Sends now, later, twice or never.
  Status send(Incarnation peer, const std::function<Status()>& now);
  void later(Incarnation peer, Nanos wait, std::function<void()> act);
  void admit(TransportEvent event, std::vector<TransportEvent>& out);
  bool is_batch(const TransportEvent& event) const;
  void corrupt(TransportEvent& event);
  uint64_t generation(Incarnation peer) const;

  std::unique_ptr<ExpertTransport> inner_;
  Executor& executor_;
  SplitMix64 random_;
  FaultPlan plan_;
  FaultCounts counts_;
  std::function<void()> ready_;
  std::deque<TransportEvent> released_;  // held back, now due; each once
  std::unordered_map<Incarnation, uint64_t>
      generations_;  // raised when a peer is closed or down: voids what is held
  std::unordered_map<Incarnation, TimePoint> stalled_until_;
  std::shared_ptr<int> alive_ = std::make_shared<int>(0);
};

}  // namespace conclave
