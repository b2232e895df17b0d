// The worker's side of the data plane: sends each micro-batch layer's rows to the shards that hold their
// experts, collects the outputs, and sees to it that every (token, slot) is answered whatever happens to a
// shard.
//
// A lane carries one micro-batch layer at a time. Each open (token, slot) of a lane is in exactly one place:
// an active flight (a dispatch under its deadline) or the lane's held list. A flight that failed is
// superseded, not forgotten: its late combine may still fill slots that are open, until the lane completes.
// Identities are never used again.
//
// Threading: the executor only. Callbacks run inside calls into the exchange.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "attention_service/core/combine_tracker.h"
#include "attention_service/core/dispatch_plan.h"
#include "attention_service/core/options.h"
#include "attention_service/core/step_shards.h"
#include "libs/model/row_pool.h"
#include "libs/ports/executor.h"
#include "libs/ports/expert_transport.h"

namespace conclave {

class ExpertExchange {
 public:
  struct Callbacks {
    // Every slot of the lane's tokens that are not masked has its output; the tracker keeps them until the
    // next begin().
    std::function<void(uint32_t lane)> on_complete;
    // A shard's endpoint failed or its dispatch ran past the deadline.
    std::function<void(Incarnation shard, const std::string& cause)> on_trouble;
    // The lane's rows cannot be sent at all (the transport calls them invalid). The lane goes on when they
    // are masked.
    std::function<void(uint32_t lane, const Status& cause)> on_failed;
    // Another placement is in use than before.
    std::function<void()> on_switched = nullptr;
  };

  // `executor`, `transport` and `metrics` are borrowed.
  ExpertExchange(Executor& executor, ExpertTransport& transport, ExchangeOptions options, uint32_t lanes,
                 uint32_t hidden, RowDtype out_dtype, RowDtype wire_dtype, ExchangeMetrics& metrics,
                 Callbacks callbacks);
  ~ExpertExchange();

  // Starts a layer on an idle lane: `rows` holds the tokens' rows as they travel, `ids` tokens * top_k
  // experts (copied).
  void begin(uint32_t lane, uint32_t layer, uint32_t tokens, uint32_t top_k, std::span<const uint16_t> ids,
             RowBuffer rows);
  const CombineTracker& tracker(uint32_t lane) const { return lanes_[lane].tracker; }
  bool busy(uint32_t lane) const { return lanes_[lane].active; }
  // The token's outputs are no longer wanted; it is not sent again. No-op on an idle lane.
  void mask(uint32_t lane, uint32_t token);
  // Abandons the lane without on_complete.
  void abandon(uint32_t lane);

  // Connects to the table's shards and uses it once they are connected, after `switch_wait` in any case: the
  // one in use serves as well until then. At once if that one lacks homes, or if shards that the new one does
  // not name are `lost`. Shards that it does not name are closed once they have answered what they were
  // asked; if `lost` at once, and that goes elsewhere.
  void set_placement(PlacementTable table, bool lost);
  // The oldest placement in use: of the table, or of a dispatch that is on its way.
  Epoch epoch() const;
  Epoch placement_epoch() const { return placement_.epoch(); }
  // A new scheduler counts epochs from 1: accept any table. The one in use stays until then.
  void forget_epoch();
  // Shards whose connection stands.
  uint32_t peers_up() const;
  // The shards whose answers are due, and rows that no shard is asked for, in words; empty: nothing is.
  std::string waiting_for() const;
  // Every shard that it knows, in order of its incarnation.
  std::vector<ShardLink> links() const;
  // From now on what shards do is noted there too; null: nowhere. Borrowed.
  void time_shards(StepShards* timed) { timed_ = timed; }

  void handle(TransportEvent& event);

 private:
  enum class FlightState : uint8_t { kActive, kSuperseded, kAnswered };
  struct Flight {
    uint32_t lane = 0;
    uint32_t layer = 0;
    Incarnation shard;
    Epoch epoch;
    FlightState state = FlightState::kActive;
    TimePoint sent = 0;
    TimerId deadline;
    std::vector<DispatchPair> pairs;  // entry i of the dispatch's expert_ids
    uint64_t round = 0;               // of its lane when it was sent
  };
  struct Lane {
    bool active = false;
    uint64_t round = 0;  // which begin() of the exchange it is in
    uint32_t layer = 0;
    uint32_t tokens = 0;
    uint32_t top_k = 0;
    uint32_t attempt = 0;  // deadlines missed in this layer; doubles the next deadline
    std::vector<uint16_t> ids;
    RowBuffer rows;
    CombineTracker tracker;
    std::vector<uint64_t> flights;
    std::vector<DispatchPair> held;
    TimerId retry;
    Nanos retry_delay = 0;
  };
  struct Peer {
    std::string name;
    std::string address;
    bool up = false;
    Nanos reconnect_delay = 0;
    TimerId reconnect;
    std::deque<DispatchBatch> waiting;  // for credits
    uint64_t outstanding_items = 0;
    bool leaving = false;      // not in the placement; closed when nothing is outstanding
    TimePoint slow_until = 0;  // missed a deadline: others are asked, where there are any
    Nanos slow_for = 0;        // the last such time; doubles until it answers in time
    TimePoint trouble_told = 0;
    Nanos latency = 0;  // recent maximum, decaying
    double latency_sum = 0;
    double item_sum = 0;
    uint64_t replied_items = 0;
    Nanos compute_ns = 0;
    MessageTimeHistogram replies;
  };
  enum class Avoid : uint8_t { kNone, kIfOthers, kAlways };

  // --- expert_exchange.cc: lanes and flights ---
  void send(uint32_t lane, std::span<const DispatchPair> pairs, Incarnation avoid, Avoid how);
  Status send_plan(uint32_t lane, const DispatchPlan& plan);
  Status send_work(uint32_t lane, const ShardWork& work);
  void take_off(uint32_t lane, Incarnation shard, std::span<const DispatchPair> pairs);
  RowBuffer gather(const Lane& lane, std::span<const uint32_t> tokens);
  void on_deadline(uint64_t seq);
  void on_combine(Incarnation peer, const CombineBatch& batch);
  // False: the slot has its output.
  bool take(const Flight& flight, DispatchPair pair, const std::byte* row);
  Status check_combine(Incarnation peer, const CombineBatch& batch, const Flight& flight) const;
  std::vector<DispatchPair> open_pairs(const Flight& flight) const;
  void hold(uint32_t lane, std::span<const DispatchPair> pairs);
  void resume(uint32_t lane);
  void resume_all();
  void retry_later(uint32_t lane);
  void complete_if_done(uint32_t lane);
  void forget_flights(uint32_t lane);
  void retire(Flight& flight, FlightState state);

  // --- exchange_peers.cc: connections, credits, latency ---
  void connect(Incarnation shard);
  void reconnect_later(Incarnation shard);
  void on_peer_up(Incarnation shard);
  void on_peer_down(Incarnation shard, const Status& cause);
  void lose_flights(Incarnation shard);
  void flush(Incarnation shard);
  void count_peers();
  bool is_up(Incarnation shard) const;
  HomeUse use_of(Incarnation shard) const;
  void use_next(bool lost);
  bool next_connected() const;
  void drop_next();
  void close_idle(Incarnation shard);
  void drop_peer(Incarnation shard);
  Nanos deadline_for(Incarnation shard, uint64_t items, uint32_t attempt) const;
  void note_latency(Incarnation shard, Nanos latency, uint64_t items, Nanos compute);

  Executor& executor_;
  ExpertTransport& transport_;
  const ExchangeOptions options_;
  const uint32_t hidden_;
  const RowDtype out_dtype_;   // of experts' outputs
  const RowDtype wire_dtype_;  // of rows sent to shards
  ExchangeMetrics& metrics_;
  const Callbacks callbacks_;

  PlacementTable placement_;
  std::optional<PlacementTable> next_;  // waits for connections
  TimerId switch_timer_;
  Epoch epoch_floor_;
  std::vector<Lane> lanes_;
  std::unordered_map<uint64_t, Flight> flights_;
  // Kept from message to message for their memory: a layer allocates nothing here once it has seen its
  // largest.
  std::vector<std::unordered_map<uint64_t, Flight>::node_type> spare_flights_;
  DispatchPlanner planner_;
  std::vector<DispatchPair> pairs_;
  std::vector<HomeUse> use_;
  std::vector<uint64_t> load_;
  DispatchBatch outgoing_;
  std::unordered_map<Incarnation, Peer> peers_;
  uint64_t next_seq_ = 1;
  uint64_t rounds_ = 0;
  StepShards* timed_ = nullptr;
  RowPool pool_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // timers hold it weakly
};

}  // namespace conclave
