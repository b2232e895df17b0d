// Connections of the exchange: who is up, who waits for credits, how long a dispatch may take.
#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "attention_service/core/expert_exchange.h"

namespace conclave {

void ExpertExchange::set_placement(PlacementTable table, bool lost) {
  if (!table.validate().ok() || table.epoch() <= epoch_floor_) return;
  epoch_floor_ = table.epoch();
  drop_next();
  next_ = std::move(table);
  for (const ShardEndpoint& shard : next_->shards()) {
    const auto [it, is_new] = peers_.try_emplace(shard.shard);
    it->second.address = shard.transport_address;
    it->second.name = shard.name;
    if (is_new) connect(shard.shard);
  }
  if (lost || !placement_.complete() || next_connected()) return use_next(lost);
  switch_timer_ =
      executor_.post_at(executor_.now() + options_.switch_wait, [this, alive = std::weak_ptr(alive_)] {
        if (alive.expired()) return;
        switch_timer_ = TimerId();
        use_next(false);
      });
}

bool ExpertExchange::next_connected() const {
  return std::all_of(next_->shards().begin(), next_->shards().end(),
                     [&](const ShardEndpoint& shard) { return is_up(shard.shard); });
}

void ExpertExchange::drop_next() {
  next_.reset();
  if (switch_timer_) executor_.cancel(std::exchange(switch_timer_, TimerId()));
}

void ExpertExchange::forget_epoch() {
  epoch_floor_ = Epoch();
  drop_next();
}

void ExpertExchange::use_next(bool lost) {
  placement_ = *std::exchange(next_, std::nullopt);
  drop_next();
  std::vector<Incarnation> gone;
  for (auto& [shard, peer] : peers_) {
    peer.leaving = placement_.find_shard(shard) < 0;
    if (peer.leaving) gone.push_back(shard);
  }
  for (const Incarnation shard : gone) {
    if (lost) {
      drop_peer(shard);
      lose_flights(shard);
    } else {
      close_idle(shard);
    }
  }
  count_peers();
  resume_all();
  if (callbacks_.on_switched) callbacks_.on_switched();
}

Epoch ExpertExchange::epoch() const {
  Epoch oldest = placement_.epoch();
  for (const auto& [seq, flight] : flights_) {
    if (flight.state == FlightState::kActive) oldest = std::min(oldest, flight.epoch);
  }
  return oldest;
}

void ExpertExchange::close_idle(Incarnation shard) {
  if (peers_.at(shard).outstanding_items == 0) drop_peer(shard);
}

void ExpertExchange::drop_peer(Incarnation shard) {
  transport_.close(shard);
  if (peers_.at(shard).reconnect) executor_.cancel(peers_.at(shard).reconnect);
  peers_.erase(shard);
  count_peers();
}

bool ExpertExchange::is_up(Incarnation shard) const {
  const auto it = peers_.find(shard);
  return it != peers_.end() && it->second.up;
}

HomeUse ExpertExchange::use_of(Incarnation shard) const {
  const auto it = peers_.find(shard);
  if (it == peers_.end() || !it->second.up) return HomeUse::kNo;
  return it->second.slow_until > executor_.now() ? HomeUse::kSlow : HomeUse::kYes;
}

uint32_t ExpertExchange::peers_up() const {
  return static_cast<uint32_t>(
      std::count_if(peers_.begin(), peers_.end(), [](const auto& p) { return p.second.up; }));
}

std::string ExpertExchange::waiting_for() const {
  std::map<Incarnation, size_t> owed;
  for (const auto& [seq, flight] : flights_) {
    if (flight.state == FlightState::kActive) owed[flight.shard] += flight.pairs.size();
  }
  std::string out;
  for (const auto& [shard, items] : owed) {
    const int at = placement_.find_shard(shard);
    out += (out.empty() ? "" : ", ") + std::to_string(items) + " rows are at " +
           (at < 0 ? "a shard that left" : placement_.shards()[static_cast<size_t>(at)].name);
  }
  size_t held = 0;
  for (const Lane& lane : lanes_) held += lane.held.size();
  if (held > 0) out += (out.empty() ? "" : ", ") + std::to_string(held) + " rows have no shard to go to";
  return out;
}

std::vector<ShardLink> ExpertExchange::links() const {
  std::vector<ShardLink> all;
  all.reserve(peers_.size());
  for (const auto& [shard, peer] : peers_) {
    all.push_back({shard, peer.name, peer.up, peer.outstanding_items, peer.replied_items, peer.compute_ns,
                   peer.replies});
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.shard < b.shard; });
  return all;
}

void ExpertExchange::count_peers() { metrics_.peers_up = peers_up(); }

void ExpertExchange::connect(Incarnation shard) {
  const auto it = peers_.find(shard);
  if (it == peers_.end()) return;
  transport_.connect(shard, it->second.address);
  if (transport_.is_up(shard)) it->second.up = true;  // an earlier connection that still stands
}

void ExpertExchange::reconnect_later(Incarnation shard) {
  Peer& peer = peers_.at(shard);
  if (peer.reconnect) return;
  peer.reconnect_delay = std::clamp(peer.reconnect_delay * 2, options_.reconnect, options_.reconnect_cap);
  peer.reconnect =
      executor_.post_at(executor_.now() + peer.reconnect_delay, [this, shard, alive = std::weak_ptr(alive_)] {
        if (alive.expired()) return;
        const auto it = peers_.find(shard);
        if (it == peers_.end()) return;
        it->second.reconnect = TimerId();
        connect(shard);
      });
}

void ExpertExchange::on_peer_up(Incarnation shard) {
  const auto it = peers_.find(shard);
  if (it == peers_.end()) return;
  it->second.up = true;
  it->second.reconnect_delay = 0;
  count_peers();
  if (next_ && next_connected()) return use_next(false);
  resume_all();
}

void ExpertExchange::on_peer_down(Incarnation shard, const Status& cause) {
  const auto it = peers_.find(shard);
  if (it == peers_.end()) return;
  it->second.up = false;
  it->second.waiting.clear();
  ++metrics_.peers_down;
  count_peers();
  if (it->second.leaving) {
    drop_peer(shard);
    return lose_flights(shard);
  }
  reconnect_later(shard);
  lose_flights(shard);
  callbacks_.on_trouble(shard, message_of(cause));
}

// Rows that were on their way to a shard that is gone go elsewhere at once.
void ExpertExchange::lose_flights(Incarnation shard) {
  std::vector<std::vector<DispatchPair>> lost(lanes_.size());
  for (uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    for (uint64_t seq : lanes_[lane].flights) {
      const auto it = flights_.find(seq);
      if (it == flights_.end() || it->second.shard != shard || it->second.state != FlightState::kActive)
        continue;
      retire(it->second, FlightState::kSuperseded);
      const std::vector<DispatchPair> open = open_pairs(it->second);
      lost[lane].insert(lost[lane].end(), open.begin(), open.end());
    }
  }
  for (uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    if (lost[lane].empty()) continue;
    metrics_.retried_items += lost[lane].size();
    lanes_[lane].held.insert(lanes_[lane].held.end(), lost[lane].begin(), lost[lane].end());
    resume(lane);
  }
}

void ExpertExchange::flush(Incarnation shard) {
  const auto it = peers_.find(shard);
  if (it == peers_.end()) return;
  auto& waiting = it->second.waiting;
  while (!waiting.empty()) {
    const Status sent = transport_.submit(shard, waiting.front());
    if (sent.code() == StatusCode::kResourceExhausted) return;  // Writable comes again
    // Other failures: its PeerDown is on the way, or else the deadline.
    waiting.pop_front();
  }
}

Nanos ExpertExchange::deadline_for(Incarnation shard, uint64_t items, uint32_t attempt) const {
  const Peer& peer = peers_.at(shard);
  const double per_item = peer.item_sum > 0 ? peer.latency_sum / peer.item_sum : 0;
  double allowed = std::max(static_cast<double>(peer.latency), per_item * static_cast<double>(items));
  allowed = std::max(allowed * options_.deadline_multiple, static_cast<double>(options_.deadline_floor));
  for (uint32_t i = 0; i < attempt && allowed < static_cast<double>(options_.deadline_cap); ++i) allowed *= 2;
  return static_cast<Nanos>(std::min(allowed, static_cast<double>(options_.deadline_cap)));
}

void ExpertExchange::note_latency(Incarnation shard, Nanos latency, uint64_t items, Nanos compute) {
  compute = std::clamp<Nanos>(compute, 0, std::max<Nanos>(latency, 0));  // a peer's word
  if (timed_ != nullptr) timed_->answered(shard, latency, items, compute);
  const auto it = peers_.find(shard);
  if (it == peers_.end()) return;
  Peer& peer = it->second;
  peer.slow_for = 0;
  peer.latency = std::max(latency, peer.latency - peer.latency / 16);
  peer.latency_sum = peer.latency_sum * 0.9 + static_cast<double>(latency);
  peer.item_sum = peer.item_sum * 0.9 + static_cast<double>(items);
  peer.replied_items += items;
  peer.compute_ns += compute;
  peer.replies.observe(latency);
}

void ExpertExchange::handle(TransportEvent& event) {
  if (auto* combine = std::get_if<TransportEvent::Combine>(&event.what)) {
    on_combine(event.peer, combine->batch);
    transport_.recycle(std::move(combine->batch));
  } else if (std::holds_alternative<TransportEvent::PeerUp>(event.what)) {
    on_peer_up(event.peer);
  } else if (auto* down = std::get_if<TransportEvent::PeerDown>(&event.what)) {
    on_peer_down(event.peer, down->cause);
  } else if (std::holds_alternative<TransportEvent::Writable>(event.what)) {
    flush(event.peer);
  } else if (std::holds_alternative<TransportEvent::Rejected>(event.what)) {
    ++metrics_.rejected_messages;
  }
  // Dispatch and Cancel are for shards; a worker holds no experts.
}

}  // namespace conclave
