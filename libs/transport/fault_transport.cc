#include "libs/transport/fault_transport.h"

#include <algorithm>
#include <utility>

#include "libs/transport/wire.h"

namespace conclave {

FaultTransport::FaultTransport(std::unique_ptr<ExpertTransport> inner, Executor& executor, uint64_t seed,
                               FaultPlan plan)
    : inner_(std::move(inner)), executor_(executor), random_(seed), plan_(plan) {}

FaultTransport::~FaultTransport() = default;

bool FaultTransport::active() const {
  const TimePoint now = executor_.now();
  return now >= plan_.from && now < plan_.until;
}

uint64_t FaultTransport::generation(Incarnation peer) const {
  auto it = generations_.find(peer);
  return it == generations_.end() ? 0 : it->second;
}

void FaultTransport::later(Incarnation peer, Nanos wait, std::function<void()> act) {
  executor_.post_at(executor_.now() + wait, [this, peer, was = generation(peer), act = std::move(act),
                                             alive = std::weak_ptr<int>(alive_)] {
    if (!alive.expired() && generation(peer) == was) act();
  });
}

// --- out ---

Status FaultTransport::send(Incarnation peer, const std::function<Status()>& now) {
  // Refusals (not up, no room, bad batch) stay visible: a message is only lost after it was taken. So faults
  // that do not send at once ask for an up peer first.
  if (!active() || !inner_->is_up(peer)) return now();
  if (random_.chance(plan_.drop_out)) {
    ++counts_.dropped;
    return OkStatus();
  }
  auto stall = stalled_until_.find(peer);
  const TimePoint t = executor_.now();
  if (stall == stalled_until_.end() || stall->second <= t) {
    if (random_.chance(plan_.stall)) {
      ++counts_.stalled;
      stall = stalled_until_.insert_or_assign(peer, t + plan_.stall_time).first;
    }
  }
  Nanos wait = stall != stalled_until_.end() && stall->second > t ? stall->second - t : 0;
  if (random_.chance(plan_.delay_out)) {
    ++counts_.delayed;
    wait += 1 + static_cast<Nanos>(random_.below(static_cast<uint64_t>(plan_.max_delay)));
  }
  const bool twice = random_.chance(plan_.duplicate_out);
  if (twice) ++counts_.duplicated;
  if (wait > 0) {
    // A refusal then is a loss.
    later(peer, wait, [now, twice] {
      (void)now();
      if (twice) (void)now();
    });
    return OkStatus();
  }
  Status s = now();
  if (s.ok() && twice) (void)now();
  if (s.ok() && !twice) ++counts_.passed;
  return s;
}

Status FaultTransport::submit(Incarnation peer, const DispatchBatch& batch) {
  if (!active()) return inner_->submit(peer, batch);
  return send(peer, [this, peer, batch] { return inner_->submit(peer, batch); });
}

Status FaultTransport::reply(Incarnation peer, const CombineBatch& batch) {
  if (!active()) return inner_->reply(peer, batch);
  return send(peer, [this, peer, batch] { return inner_->reply(peer, batch); });
}

void FaultTransport::cancel(Incarnation peer, DispatchId id) {
  if (active() && random_.chance(plan_.drop_out)) {
    ++counts_.dropped;
    return;
  }
  inner_->cancel(peer, id);
}

void FaultTransport::close(Incarnation peer) {
  ++generations_[peer];
  stalled_until_.erase(peer);
  std::erase_if(released_, [&](const TransportEvent& e) { return e.peer == peer; });
  inner_->close(peer);
}

void FaultTransport::take_down(Incarnation peer, const std::string& why) {
  close(peer);
  TransportEvent& event = released_.emplace_back();
  event.peer = peer;
  event.what.emplace<TransportEvent::PeerDown>().cause = unavailable(why);
  if (ready_) {
    executor_.post([this, alive = std::weak_ptr<int>(alive_)] {
      if (!alive.expired() && ready_) ready_();
    });
  }
}

// --- in ---

void FaultTransport::set_ready(std::function<void()> ready) {
  ready_ = std::move(ready);
  inner_->set_ready(ready_);
}

bool FaultTransport::is_batch(const TransportEvent& e) const {
  return std::holds_alternative<TransportEvent::Dispatch>(e.what) ||
         std::holds_alternative<TransportEvent::Combine>(e.what);
}

void FaultTransport::corrupt(TransportEvent& event) {
  const wire::Envelope envelope{event.peer, 1, 0, 0};
  wire::Bytes message;
  RowBuffer rows;
  if (const auto* d = std::get_if<TransportEvent::Dispatch>(&event.what)) {
    wire::encode(envelope, d->batch, true, message);
    rows = d->batch.rows;
  } else {
    const auto& c = std::get<TransportEvent::Combine>(event.what);
    wire::encode(envelope, c.batch, true, message);
    rows = c.batch.outputs;
  }
  if (rows) message.insert(message.end(), rows->begin(), rows->end());
  const uint64_t bit = random_.below(message.size() * 8);
  message[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  Status found = OkStatus();
  TransportLimits limits;
  if (auto h = wire::read_header(message, limits); !h.ok()) {
    found = h.status();
  } else {
    found = wire::check_rows(*h, wire::View(message).subspan(h->header_bytes));
  }
  if (found.ok()) {
    ++counts_.undetected;
    return;
  }
  event.what.emplace<TransportEvent::Rejected>().cause = found;
}

void FaultTransport::admit(TransportEvent event, std::vector<TransportEvent>& out) {
  if (std::holds_alternative<TransportEvent::PeerDown>(event.what)) ++generations_[event.peer];
  if (!is_batch(event) || !active()) {
    out.push_back(std::move(event));
    return;
  }
  const Incarnation peer = event.peer;
  if (random_.chance(plan_.drop_in)) {
    ++counts_.dropped;
  } else if (random_.chance(plan_.peer_down)) {
    ++counts_.peers_downed;
    take_down(peer, "injected: the endpoint failed");
    // What came before it in this poll stays; its PeerDown goes out now, what came after it must not.
    out.push_back(std::move(released_.back()));
    released_.pop_back();
  } else if (random_.chance(plan_.corrupt_in)) {
    ++counts_.corrupted;
    corrupt(event);
    out.push_back(std::move(event));
  } else if (random_.chance(plan_.delay_in)) {
    ++counts_.delayed;
    auto held = std::make_shared<TransportEvent>(std::move(event));
    later(peer, 1 + static_cast<Nanos>(random_.below(static_cast<uint64_t>(plan_.max_delay))), [this, held] {
      released_.push_back(std::move(*held));
      if (ready_) ready_();
    });
  } else {
    const bool twice = random_.chance(plan_.duplicate_in);
    if (twice) {
      ++counts_.duplicated;
      out.push_back(event);
    }
    out.push_back(std::move(event));
    const size_t n = out.size();
    if (n >= 2 && is_batch(out[n - 2]) && random_.chance(plan_.reorder_in)) {
      ++counts_.reordered;
      std::swap(out[n - 1], out[n - 2]);
    } else if (!twice) {
      ++counts_.passed;
    }
  }
}

void FaultTransport::poll(std::vector<TransportEvent>& out) {
  while (!released_.empty()) {
    out.push_back(std::move(released_.front()));
    released_.pop_front();
  }
  std::vector<TransportEvent> fresh;
  inner_->poll(fresh);
  std::vector<Incarnation> downed;  // by us in this very poll: the rest of what they sent is gone
  for (TransportEvent& event : fresh) {
    const Incarnation peer = event.peer;
    if (std::find(downed.begin(), downed.end(), peer) != downed.end()) continue;
    const uint64_t before = counts_.peers_downed;
    admit(std::move(event), out);
    if (counts_.peers_downed != before) downed.push_back(peer);
  }
}

}  // namespace conclave
