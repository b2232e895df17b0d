#include "attention_service/core/expert_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "libs/base/check.h"

namespace conclave {
namespace {

constexpr size_t kMaxSpareFlights = 1024;  // kept for their memory

}  // namespace

ExpertExchange::ExpertExchange(Executor& executor, ExpertTransport& transport, ExchangeOptions options,
                               uint32_t lanes, uint32_t hidden, RowDtype out_dtype, RowDtype wire_dtype,
                               ExchangeMetrics& metrics, Callbacks callbacks)
    : executor_(executor),
      transport_(transport),
      options_(options),
      hidden_(hidden),
      out_dtype_(out_dtype),
      wire_dtype_(wire_dtype),
      metrics_(metrics),
      callbacks_(std::move(callbacks)),
      lanes_(lanes) {}

ExpertExchange::~ExpertExchange() {
  for (uint32_t lane = 0; lane < lanes_.size(); ++lane) abandon(lane);
  for (auto& [shard, peer] : peers_) {
    if (peer.reconnect) executor_.cancel(peer.reconnect);
  }
  drop_next();
}

void ExpertExchange::begin(uint32_t index, uint32_t layer, uint32_t tokens, uint32_t top_k,
                           std::span<const uint16_t> ids, RowBuffer rows) {
  Lane& lane = lanes_[index];
  CONCLAVE_CHECK(!lane.active && lane.flights.empty());
  CONCLAVE_CHECK(ids.size() == static_cast<size_t>(tokens) * top_k);
  lane.active = true;
  lane.round = ++rounds_;
  lane.layer = layer;
  lane.tokens = tokens;
  lane.top_k = top_k;
  lane.attempt = 0;
  lane.retry_delay = 0;
  lane.ids.assign(ids.begin(), ids.end());
  lane.rows = std::move(rows);
  lane.held.clear();
  lane.tracker.reset(tokens, top_k);
  pairs_.clear();
  for (uint32_t token = 0; token < tokens; ++token) {
    for (uint32_t slot = 0; slot < top_k; ++slot) pairs_.push_back({token, slot});
  }
  send(index, pairs_, Incarnation(), Avoid::kNone);
  complete_if_done(index);
}

void ExpertExchange::mask(uint32_t index, uint32_t token) {
  Lane& lane = lanes_[index];
  if (!lane.active) return;
  lane.tracker.mask(token);
  complete_if_done(index);
}

void ExpertExchange::abandon(uint32_t index) {
  Lane& lane = lanes_[index];
  forget_flights(index);
  lane.active = false;
  lane.held.clear();
  lane.rows.reset();
  lane.tracker.release();
}

void ExpertExchange::send(uint32_t index, std::span<const DispatchPair> pairs, Incarnation avoid, Avoid how) {
  if (pairs.empty()) return;
  Lane& lane = lanes_[index];
  use_.clear();
  load_.clear();
  for (const ShardEndpoint& shard : placement_.shards()) {
    const auto it = peers_.find(shard.shard);
    load_.push_back(it == peers_.end() ? 0 : it->second.outstanding_items);
    use_.push_back(how == Avoid::kNone || shard.shard != avoid ? use_of(shard.shard) : HomeUse::kNo);
  }
  const DispatchPlan& plan = planner_.plan(placement_, lane.layer, pairs, lane.ids, lane.top_k, use_, load_);
  metrics_.split_experts += plan.split_experts;
  Status failed = send_plan(index, plan);
  if (how == Avoid::kIfOthers && !plan.homeless.empty()) {
    // Nobody else has these experts: ask the same shard once more.
    for (size_t s = 0; s < use_.size(); ++s) {
      const Incarnation shard = placement_.shards()[s].shard;
      use_[s] = shard == avoid ? use_of(avoid) : HomeUse::kNo;
    }
    const std::vector<DispatchPair> homeless = plan.homeless;
    const DispatchPlan& again =
        planner_.plan(placement_, lane.layer, homeless, lane.ids, lane.top_k, use_, load_);
    if (const Status sent = send_plan(index, again); !sent.ok()) failed = sent;
  }
  hold(index, plan.homeless);
  if (!failed.ok()) callbacks_.on_failed(index, failed);
}

Status ExpertExchange::send_plan(uint32_t index, const DispatchPlan& plan) {
  Status failed;
  for (const ShardWork& work : plan.work) {
    if (const Status sent = send_work(index, work); !sent.ok()) failed = sent;
  }
  return failed;
}

RowBuffer ExpertExchange::gather(const Lane& lane, std::span<const uint32_t> tokens) {
  // A shard that gets every row shares the micro-batch's own buffer.
  if (tokens.size() == lane.tokens) return lane.rows;
  const size_t row_bytes = conclave::row_bytes(wire_dtype_, hidden_);
  RowBuffer rows = pool_.get(tokens.size() * row_bytes);
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::memcpy(rows->data() + i * row_bytes, lane.rows->data() + tokens[i] * row_bytes, row_bytes);
  }
  return rows;
}

Status ExpertExchange::send_work(uint32_t index, const ShardWork& work) {
  Lane& lane = lanes_[index];
  const Incarnation shard = placement_.shards()[work.shard].shard;
  Peer& peer = peers_.at(shard);
  Status failed;
  for (size_t row = 0; row < work.tokens.size();) {
    size_t end = row + 1;
    while (end < work.tokens.size() && end - row < options_.max_dispatch_rows &&
           work.begin[end + 1] - work.begin[row] <= options_.max_dispatch_items) {
      ++end;
    }
    const uint32_t first = work.begin[row];
    const uint32_t last = work.begin[end];
    DispatchBatch& batch = outgoing_;
    batch.id = {transport_.self(), next_seq_++};
    batch.epoch = placement_.epoch();
    batch.layer = lane.layer;
    batch.hidden = hidden_;
    batch.dtype = wire_dtype_;
    batch.expert_begin.clear();
    for (size_t r = row; r <= end; ++r) batch.expert_begin.push_back(work.begin[r] - first);
    batch.expert_ids.assign(work.expert_ids.begin() + first, work.expert_ids.begin() + last);
    batch.rows = gather(lane, std::span(work.tokens).subspan(row, end - row));
    batch.time_left = deadline_for(shard, last - first, lane.attempt);
    const std::span<const DispatchPair> pairs = std::span(work.pairs).subspan(first, last - first);
    row = end;

    // A peer with a queue is out of credits; order does not matter, but fairness does.
    const Status sent =
        peer.waiting.empty() ? transport_.submit(shard, batch) : resource_exhausted("credits");
    if (!sent.ok() && sent.code() != StatusCode::kResourceExhausted) {
      // UNAVAILABLE: its PeerDown is on the way. Anything else is a wrong batch.
      batch.rows.reset();
      hold(index, pairs);
      retry_later(index);
      if (sent.code() != StatusCode::kUnavailable) failed = sent;
      continue;
    }
    ++metrics_.dispatches;
    metrics_.dispatched_items += pairs.size();
    take_off(index, shard, pairs);
    if (sent.ok()) {
      batch.rows.reset();  // the transport holds them as long as it needs them
    } else {
      ++metrics_.credit_waits;
      peer.waiting.push_back(std::move(batch));
    }
  }
  return failed;
}

// outgoing_ is on its way, or will be.
void ExpertExchange::take_off(uint32_t index, Incarnation shard, std::span<const DispatchPair> pairs) {
  Lane& lane = lanes_[index];
  const uint64_t seq = outgoing_.id.seq;
  if (spare_flights_.empty()) {
    flights_.try_emplace(seq);
  } else {
    spare_flights_.back().key() = seq;
    flights_.insert(std::move(spare_flights_.back()));
    spare_flights_.pop_back();
  }
  Flight& flight = flights_.at(seq);
  flight.lane = index;
  flight.layer = lane.layer;
  flight.shard = shard;
  flight.epoch = outgoing_.epoch;
  flight.state = FlightState::kActive;
  flight.sent = executor_.now();
  flight.pairs.assign(pairs.begin(), pairs.end());
  flight.round = lane.round;
  // Cancelled when the flight is no longer active, at the latest in the destructor. What it holds is small
  // enough to need no memory of its own.
  flight.deadline = executor_.post_at(flight.sent + outgoing_.time_left, [this, seq] { on_deadline(seq); });
  peers_.at(shard).outstanding_items += pairs.size();
  if (timed_ != nullptr) timed_->sent(shard, flight.sent);
  lane.flights.push_back(seq);
}

// Ends a flight's being active: its timer and its share of the peer's load.
void ExpertExchange::retire(Flight& flight, FlightState state) {
  if (flight.state == FlightState::kActive) {
    if (flight.deadline) executor_.cancel(flight.deadline);
    flight.deadline = TimerId();
    if (timed_ != nullptr) timed_->left(flight.shard, executor_.now());
    if (const auto it = peers_.find(flight.shard); it != peers_.end()) {
      it->second.outstanding_items -= flight.pairs.size();
      if (it->second.leaving) close_idle(flight.shard);
    }
  }
  flight.state = state;
}

std::vector<DispatchPair> ExpertExchange::open_pairs(const Flight& flight) const {
  const CombineTracker& tracker = lanes_[flight.lane].tracker;
  std::vector<DispatchPair> open;
  for (const DispatchPair pair : flight.pairs) {
    if (tracker.open(pair.token, pair.slot)) open.push_back(pair);
  }
  return open;
}

void ExpertExchange::on_deadline(uint64_t seq) {
  const auto it = flights_.find(seq);
  if (it == flights_.end() || it->second.state != FlightState::kActive) return;
  Flight& flight = it->second;
  const Incarnation shard = flight.shard;
  const uint32_t lane = flight.lane;
  flight.deadline = TimerId();  // it is this one
  retire(flight, FlightState::kSuperseded);
  ++metrics_.deadlines;
  transport_.cancel(shard, {transport_.self(), seq});
  bool tell = false;
  if (const auto it_peer = peers_.find(shard); it_peer != peers_.end()) {
    Peer& peer = it_peer->second;
    std::erase_if(peer.waiting, [&](const DispatchBatch& b) { return b.id.seq == seq; });
    if (peer.slow_until <= executor_.now()) {
      ++metrics_.peers_slow;
      peer.slow_for = std::clamp(peer.slow_for * 2, options_.slow_peer, options_.slow_peer_cap);
      peer.slow_until = executor_.now() + peer.slow_for;
    }
    tell = peer.trouble_told == 0 || executor_.now() - peer.trouble_told >= options_.trouble_interval;
    if (tell) peer.trouble_told = executor_.now();
  }
  std::vector<DispatchPair> open = open_pairs(flight);
  metrics_.retried_items += open.size();
  ++lanes_[lane].attempt;
  send(lane, open, shard, Avoid::kIfOthers);
  if (tell) callbacks_.on_trouble(shard, "a dispatch ran past its deadline");
}

Status ExpertExchange::check_combine(Incarnation peer, const CombineBatch& batch,
                                     const Flight& flight) const {
  if (peer != flight.shard || batch.shard != peer)
    return invalid_field("combine.shard", "not the shard asked");
  if (batch.layer != flight.layer) return invalid_field("combine.layer", "not the layer asked");
  if (batch.hidden != hidden_ || batch.dtype != out_dtype_)
    return invalid_field("combine.hidden", "wrong row format");
  for (size_t i = 0; i < batch.items.size(); ++i) {
    if (batch.items[i] >= flight.pairs.size() || (i > 0 && batch.items[i] <= batch.items[i - 1])) {
      return invalid_field("combine.items", "not ascending indices of the dispatch");
    }
  }
  const size_t bytes = batch.items.size() * batch.row_bytes();
  if ((batch.outputs == nullptr ? 0 : batch.outputs->size()) != bytes) {
    return invalid_field("combine.outputs", "wrong number of bytes");
  }
  return OkStatus();
}

void ExpertExchange::on_combine(Incarnation peer, const CombineBatch& batch) {
  ++metrics_.combines;
  const auto it = flights_.find(batch.id.seq);
  if (it == flights_.end() || batch.id.worker != transport_.self()) {
    ++metrics_.late_combines;
    return;
  }
  Flight& flight = it->second;
  if (!check_combine(peer, batch, flight).ok()) {
    ++metrics_.rejected_combines;
    return;
  }
  const uint32_t index = flight.lane;
  Lane& lane = lanes_[index];
  const size_t row_bytes = batch.row_bytes();
  uint64_t accepted = 0;
  for (size_t i = 0; i < batch.items.size(); ++i) {
    const DispatchPair pair = flight.pairs[batch.items[i]];
    if (take(flight, pair, batch.outputs->data() + i * row_bytes)) ++accepted;
  }
  metrics_.accepted_items += accepted;
  metrics_.duplicate_items += batch.items.size() - accepted;
  if (accepted > 0) lane.tracker.keep(batch.outputs);
  if (flight.state == FlightState::kActive) {
    note_latency(peer, executor_.now() - flight.sent, flight.pairs.size(), batch.compute_ns);
    retire(flight, FlightState::kAnswered);
    std::vector<DispatchPair> missing = open_pairs(flight);
    if (!missing.empty()) {
      metrics_.missing_items += missing.size();
      metrics_.retried_items += missing.size();
      send(index, missing, peer, Avoid::kAlways);
      if (!lanes_[index].held.empty()) retry_later(index);
    }
  }
  complete_if_done(index);
}

bool ExpertExchange::take(const Flight& flight, DispatchPair pair, const std::byte* row) {
  Lane& lane = lanes_[flight.lane];
  if (options_.faults.accept_late && pair.token >= lane.tokens) return false;
  bool taken = lane.tracker.accept(pair.token, pair.slot, row);
  if (!taken && options_.faults.count_twice) {
    for (uint32_t at = 0; at < lane.tokens * lane.top_k && !taken; ++at)
      taken = lane.tracker.accept(at / lane.top_k, at % lane.top_k, row);
  }
  if (taken && options_.taken_observer) {
    options_.taken_observer({lane.round, flight.round, pair.token, pair.slot, flight.shard});
  }
  return taken;
}

void ExpertExchange::hold(uint32_t index, std::span<const DispatchPair> pairs) {
  if (pairs.empty()) return;
  ++metrics_.holds;
  if (options_.faults.lose_hold) return;
  Lane& lane = lanes_[index];
  lane.held.insert(lane.held.end(), pairs.begin(), pairs.end());
}

// A shard lacks what the placement says it has: one of the two is about to change, but not in a loop of
// messages.
void ExpertExchange::retry_later(uint32_t index) {
  Lane& lane = lanes_[index];
  if (lane.retry || !lane.active) return;
  lane.retry_delay = std::clamp(lane.retry_delay * 2, options_.missing_retry, options_.missing_retry_cap);
  lane.retry =
      executor_.post_at(executor_.now() + lane.retry_delay, [this, index, alive = std::weak_ptr(alive_)] {
        if (alive.expired()) return;
        lanes_[index].retry = TimerId();
        resume(index);
      });
}

void ExpertExchange::resume(uint32_t index) {
  Lane& lane = lanes_[index];
  if (!lane.active || lane.held.empty()) return;
  std::vector<DispatchPair> pairs = std::exchange(lane.held, {});
  std::erase_if(pairs, [&](DispatchPair p) { return !lane.tracker.open(p.token, p.slot); });
  std::sort(pairs.begin(), pairs.end(), [](DispatchPair a, DispatchPair b) {
    return a.token != b.token ? a.token < b.token : a.slot < b.slot;
  });
  send(index, pairs, Incarnation(), Avoid::kNone);
}

void ExpertExchange::resume_all() {
  for (uint32_t lane = 0; lane < lanes_.size(); ++lane) resume(lane);
}

void ExpertExchange::complete_if_done(uint32_t index) {
  Lane& lane = lanes_[index];
  if (!lane.active || !lane.tracker.complete()) return;
  forget_flights(index);
  lane.active = false;
  lane.held.clear();
  lane.rows.reset();
  callbacks_.on_complete(index);
}

void ExpertExchange::forget_flights(uint32_t index) {
  Lane& lane = lanes_[index];
  for (uint64_t seq : lane.flights) {
    const auto it = flights_.find(seq);
    if (it == flights_.end()) continue;
    if (it->second.state == FlightState::kActive) {
      transport_.cancel(it->second.shard, {transport_.self(), seq});
      if (const auto peer = peers_.find(it->second.shard); peer != peers_.end()) {
        std::erase_if(peer->second.waiting, [&](const DispatchBatch& b) { return b.id.seq == seq; });
      }
      retire(it->second, FlightState::kSuperseded);
    }
    if (options_.faults.accept_late) continue;
    if (spare_flights_.size() < kMaxSpareFlights) {
      spare_flights_.push_back(flights_.extract(it));
    } else {
      flights_.erase(it);
    }
  }
  lane.flights.clear();
  if (lane.retry) executor_.cancel(lane.retry);
  lane.retry = TimerId();
}

}  // namespace conclave
