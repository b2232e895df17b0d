#include "libs/transport/session_transport.h"

#include <algorithm>
#include <cstring>

#include "libs/base/check.h"
#include "libs/base/random.h"

namespace conclave {
namespace {
constexpr size_t kMaxSpareHeaders = 64;
constexpr size_t kMaxSpareBatches = 64;
// Cancels and rejections cost the peer no credit, so what waits for the owner needs a bound of its own;
// beyond it they are dropped (both are best effort).
constexpr size_t kMaxQueuedEvents = 65536;
constexpr size_t kMaxSpareHeaderBytes = 1 << 20;
}  // namespace

SessionTransport::SessionTransport(Executor& executor, TransportOptions options)
    : executor_(executor),
      options_(std::move(options)),
      secret_(options_.secret),
      other_secret_(options_.other_secret) {
  CONCLAVE_CHECK(options_.self);
  CONCLAVE_CHECK(options_.fleet.size() <= wire::kMaxFleetBytes);
}

SessionTransport::~SessionTransport() { CONCLAVE_CHECK(peers_.empty() && links_.empty()); }

void SessionTransport::shut_down() {
  alive_.reset();
  while (!peers_.empty()) forget_peer(peers_.begin()->first, true);
  for (auto& [link, timer] : refusals_) {
    executor_.cancel(timer);
    link_close(link);
  }
  refusals_.clear();
  for (TimerId timer : {ack_timer_, blocked_timer_, keepalive_timer_}) executor_.cancel(timer);
  events_.clear();
}

// --- events ---

void SessionTransport::set_ready(std::function<void()> ready) {
  ready_ = std::move(ready);
  if (!events_.empty()) signal();
}

void SessionTransport::signal() {
  if (ready_pending_ || !ready_) return;
  ready_pending_ = true;
  executor_.post([this, alive = std::weak_ptr<int>(alive_)] {
    if (alive.expired()) return;
    ready_pending_ = false;
    if (ready_) ready_();
  });
}

void SessionTransport::poll(std::vector<TransportEvent>& out) {
  bool owes = false;
  for (Queued& q : events_) {
    if (q.bytes > 0) {
      Peer* peer = find(q.event.peer);
      if (peer && peer->session_in == q.session) {
        peer->consumed_messages += 1;
        peer->consumed_bytes += q.bytes;
        owes = true;
      }
    }
    out.push_back(std::move(q.event));
  }
  events_.clear();
  if (owes) arm_ack_timer();
}

void SessionTransport::recycle(DispatchBatch batch) {
  batch.rows.reset();
  if (spare_dispatches_.size() < kMaxSpareBatches) spare_dispatches_.push_back(std::move(batch));
}

void SessionTransport::recycle(CombineBatch batch) {
  batch.outputs.reset();
  if (spare_combines_.size() < kMaxSpareBatches) spare_combines_.push_back(std::move(batch));
}

// --- sending ---

wire::Bytes SessionTransport::take_header_buffer() {
  if (spare_headers_.empty()) return {};
  wire::Bytes b = std::move(spare_headers_.back());
  spare_headers_.pop_back();
  return b;
}

void SessionTransport::recycle(wire::Bytes&& header) {
  if (spare_headers_.size() < kMaxSpareHeaders && header.capacity() <= kMaxSpareHeaderBytes) {
    spare_headers_.push_back(std::move(header));
  }
}

wire::Envelope SessionTransport::envelope(Peer& peer) {
  peer.told_messages = peer.consumed_messages;
  peer.told_bytes = peer.consumed_bytes;
  return {options_.self, peer.session_out, peer.consumed_messages, peer.consumed_bytes};
}

bool SessionTransport::has_room(const Peer& peer, uint64_t bytes) const {
  const uint64_t messages = peer.sent_messages - peer.acked_messages;
  const uint64_t inflight = peer.sent_bytes - peer.acked_bytes;
  // A message larger than the whole window may go when nothing else is on its way, or it could never go.
  return messages < peer.window_messages && (messages == 0 || inflight + bytes <= peer.window_bytes);
}

template <class Batch>
Status SessionTransport::send_batch(Incarnation id, const Batch& batch) {
  Peer* peer = find(id);
  if (!peer || peer->state != State::kUp) return unavailable("the peer is not up");
  RETURN_IF_ERROR(wire::validate(batch, options_.limits));
  const uint64_t bytes = wire::message_bytes(batch);
  if (!has_room(*peer, bytes)) {
    peer->blocked = true;
    ++stats_.blocked;
    arm_blocked_timer();
    return resource_exhausted("max_inflight_bytes or max_inflight_messages of this peer is reached");
  }
  OutMessage message;
  message.header = take_header_buffer();
  wire::encode(envelope(*peer), batch, options_.rows_crc, message.header);
  if constexpr (std::is_same_v<Batch, DispatchBatch>) {
    message.rows = batch.rows;
  } else {
    message.rows = batch.outputs;
  }
  peer->sent_messages += 1;
  peer->sent_bytes += bytes;
  stats_.sent_messages += 1;
  stats_.sent_bytes += bytes;
  if (link_send(peer->link, std::move(message)) == SendResult::kLost) {
    peer->acked_messages += 1;  // it takes no room at the peer
    peer->acked_bytes += bytes;
  }
  return OkStatus();
}

Status SessionTransport::submit(Incarnation peer, const DispatchBatch& batch) {
  if (batch.id.worker != options_.self) return invalid_field("id.worker", "is not this process");
  return send_batch(peer, batch);
}

Status SessionTransport::reply(Incarnation peer, const CombineBatch& batch) {
  if (batch.shard != options_.self) return invalid_field("shard", "is not this process");
  if (batch.id.worker != peer) return invalid_field("id.worker", "is not the peer replied to");
  return send_batch(peer, batch);
}

void SessionTransport::cancel(Incarnation id, DispatchId dispatch) {
  Peer* peer = find(id);
  if (!peer || peer->state != State::kUp) return;
  OutMessage message{.header = take_header_buffer(), .rows = nullptr, .control = true};
  wire::encode_cancel(envelope(*peer), dispatch, message.header);
  link_send(peer->link, std::move(message));
}

void SessionTransport::send_ack(Peer& peer) {
  OutMessage message{.header = take_header_buffer(), .rows = nullptr, .control = true};
  wire::encode_ack(envelope(peer), message.header);
  link_send(peer.link, std::move(message));
}

void SessionTransport::send_ping(Peer& peer) {
  peer.asked = executor_.now();
  OutMessage message{.header = take_header_buffer(), .rows = nullptr, .control = true};
  wire::encode(envelope(peer), wire::PingBody{peer.sent_messages, peer.sent_bytes}, message.header);
  link_send(peer.link, std::move(message));
}

// --- receiving ---

void SessionTransport::receive(wire::View message, const RowBuffer& rows) {
  auto header_or = wire::read_header(message, options_.limits);
  if (!header_or.ok()) {
    // Attributed to whom it claims to be from only where that connection exists; else it is merely counted.
    const wire::Envelope claimed = wire::claimed_envelope(message);
    Peer* peer = find(claimed.sender);
    if (peer && peer->session_in == claimed.session) {
      reject(peer->id, peer->session_in, 0, header_or.status());
    } else {
      ++stats_.rejected_messages;
    }
    return;
  }
  const wire::Header& h = *header_or;
  const wire::View header = message.first(h.header_bytes);
  if (h.kind == wire::Kind::kHello) return on_hello(h, header);
  if (h.kind == wire::Kind::kHelloAck) return on_hello_ack(h, header);
  if (h.kind == wire::Kind::kBye) return on_bye(h, header);
  Peer* peer = find(h.envelope.sender);
  if (!peer || peer->session_in != h.envelope.session) {
    ++stats_.late_messages;
    return;
  }
  peer->heard = executor_.now();
  const bool batch = h.kind == wire::Kind::kDispatch || h.kind == wire::Kind::kCombine;
  const uint64_t credit = batch ? h.header_bytes - h.sections_bytes + h.rows_bytes : 0;
  if (batch) {
    peer->received_messages += 1;
    peer->received_bytes += credit;
  }
  if (peer->state !=
      State::kUp) {  // its answer to our hello was lost or is late: only possible on unordered links
    peer->consumed_messages += batch ? 1 : 0;
    peer->consumed_bytes += credit;
    ++stats_.late_messages;
    return;
  }
  on_acknowledged(*peer, h.envelope);
  switch (h.kind) {
    case wire::Kind::kDispatch:
      return on_batch(*peer, h, message, rows, &TransportEvent::Dispatch::batch, &DispatchBatch::rows);
    case wire::Kind::kCombine:
      return on_batch(*peer, h, message, rows, &TransportEvent::Combine::batch, &CombineBatch::outputs);
    case wire::Kind::kCancel:
      return on_cancel(*peer, h, header);
    case wire::Kind::kPing:
      return on_ping(*peer, h, header);
    default:
      return;
  }
}

namespace {
Status check_identity(const DispatchBatch& b, Incarnation sender, Incarnation) {
  return b.id.worker == sender ? OkStatus() : invalid_field("id.worker", "is not the sender");
}
Status check_identity(const CombineBatch& b, Incarnation sender, Incarnation self) {
  if (b.shard != sender) return invalid_field("shard", "is not the sender");
  return b.id.worker == self ? OkStatus() : invalid_field("id.worker", "is not the receiver");
}

// Whatever it held is overwritten.
template <class Batch>
void reuse(std::vector<Batch>& spare, Batch& batch) {
  if (spare.empty()) return;
  batch = std::move(spare.back());
  spare.pop_back();
}
}  // namespace

template <class Event, class Batch>
void SessionTransport::on_batch(Peer& peer, const wire::Header& h, wire::View message,
                                const RowBuffer& shared, Batch Event::*batch, RowBuffer Batch::*rows_of) {
  const uint64_t credit = h.header_bytes - h.sections_bytes + h.rows_bytes;
  // A peer that keeps to its credit never has more than a window, or one message, waiting here.
  const uint64_t waiting = peer.received_bytes - peer.consumed_bytes;
  if (peer.received_messages - peer.consumed_messages > options_.limits.max_inflight_messages ||
      waiting > std::max(options_.limits.max_inflight_bytes, options_.limits.max_message_bytes)) {
    return fail_peer(peer.id, resource_exhausted("the peer sends beyond its credit"));
  }
  const wire::View header = message.first(h.header_bytes);
  const wire::View rows = shared ? wire::View(*shared) : message.subspan(h.header_bytes);
  Event event;
  if constexpr (std::is_same_v<Batch, DispatchBatch>) {
    reuse(spare_dispatches_, event.*batch);
  } else {
    reuse(spare_combines_, event.*batch);
  }
  Status status = shared && message.size() != h.header_bytes ? invalid_field("rows_bytes", "rows come twice")
                                                             : wire::check_rows(h, rows);
  if (status.ok()) status = wire::decode(h, header, options_.limits, event.*batch);
  if (status.ok()) status = check_identity(event.*batch, peer.id, options_.self);
  if (!status.ok()) return reject(peer.id, peer.session_in, credit, status);
  if (shared) {
    event.*batch.*rows_of = shared;
  } else {
    RowBuffer own = row_pool_.get(rows.size());
    if (!rows.empty()) std::memcpy(own->data(), rows.data(), rows.size());
    event.*batch.*rows_of = std::move(own);
  }
  stats_.received_messages += 1;
  stats_.received_bytes += credit;
  push(peer.id, std::move(event), peer.session_in, credit);
}

void SessionTransport::on_cancel(Peer& peer, const wire::Header& h, wire::View header) {
  DispatchId id;
  Status status = wire::decode_cancel(h, header, id);
  if (status.ok() && id.worker != peer.id) status = invalid_field("id.worker", "is not the sender");
  if (!status.ok()) return reject(peer.id, peer.session_in, 0, status);
  if (events_.size() < kMaxQueuedEvents) push(peer.id, TransportEvent::Cancel{id});
}

void SessionTransport::on_ping(Peer& peer, const wire::Header& h, wire::View header) {
  wire::PingBody body;
  if (Status s = wire::decode(h, header, body); !s.ok()) return reject(peer.id, peer.session_in, 0, s);
  if (link_ordered()) {
    // What was sent before the ping has arrived before it, or never will: damaged messages give their room
    // back.
    if (body.sent_messages > peer.received_messages && body.sent_bytes >= peer.received_bytes) {
      peer.consumed_messages += body.sent_messages - peer.received_messages;
      peer.consumed_bytes += body.sent_bytes - peer.received_bytes;
      peer.received_messages = body.sent_messages;
      peer.received_bytes = body.sent_bytes;
    }
  }
  send_ack(peer);
}

void SessionTransport::on_acknowledged(Peer& peer, const wire::Envelope& e) {
  // Late acknowledgements say less, and a peer that says more than was sent is not believed.
  peer.acked_messages = std::max(peer.acked_messages, std::min(e.acked_messages, peer.sent_messages));
  peer.acked_bytes = std::max(peer.acked_bytes, std::min(e.acked_bytes, peer.sent_bytes));
  if (peer.blocked && has_room(peer, 0)) {
    peer.blocked = false;
    push(peer.id, TransportEvent::Writable{});
  }
}

void SessionTransport::reject(Incarnation peer, uint64_t session, uint64_t credit, const Status& cause) {
  ++stats_.rejected_messages;
  if (credit > 0 || events_.size() < kMaxQueuedEvents) {
    push(peer, TransportEvent::Rejected{cause}, session, credit);
  }
}

// --- timers: each is armed only while there is something to do, so an idle transport has none (but
// keepalive) ---

void SessionTransport::at(TimePoint when, TimerId& slot, void (SessionTransport::*member)()) {
  if (slot) return;
  slot = executor_.post_at(when, [this, &slot, member, alive = std::weak_ptr<int>(alive_)] {
    if (alive.expired()) return;
    slot = {};
    (this->*member)();
  });
}

void SessionTransport::arm_ack_timer() {
  at(executor_.now() + options_.ack_delay, ack_timer_, &SessionTransport::flush_acks);
}

void SessionTransport::flush_acks() {
  for (auto& [id, peer] : peers_) {
    if (peer.state == State::kUp && peer.told_messages != peer.consumed_messages) send_ack(peer);
  }
}

void SessionTransport::arm_blocked_timer() {
  at(executor_.now() + options_.blocked_ping_interval, blocked_timer_, &SessionTransport::ask_blocked);
}

void SessionTransport::ask_blocked() {
  bool any = false;
  for (auto& [id, peer] : peers_) {
    if (!peer.blocked) continue;
    send_ping(peer);
    any = true;
  }
  if (any) arm_blocked_timer();
}

void SessionTransport::arm_keepalive() {
  if (options_.keepalive_interval <= 0 || keepalive_timer_) return;
  keepalive_due_ = executor_.now() + options_.keepalive_interval;
  at(keepalive_due_, keepalive_timer_, &SessionTransport::keep_alive);
}

void SessionTransport::keep_alive() {
  const TimePoint now = executor_.now();
  // When this very loop was busy or stopped, signs of life may be waiting unread: nobody is judged by that
  // time.
  const bool we_stalled = now - keepalive_due_ > options_.keepalive_interval;
  std::vector<Incarnation> silent;
  bool any = false;
  for (auto& [id, peer] : peers_) {
    if (peer.state != State::kUp) continue;
    any = true;
    if (we_stalled) peer.heard = now - options_.keepalive_interval;
    const Nanos quiet = now - peer.heard;
    if (quiet >= options_.keepalive_timeout) {
      silent.push_back(id);
    } else if (quiet >= options_.keepalive_interval / 2) {
      send_ping(peer);
    }
  }
  for (Incarnation id : silent) fail_peer(id, deadline_exceeded("no sign of life within keepalive_timeout"));
  if (any) arm_keepalive();
}

TransportStats SessionTransport::stats() const {
  TransportStats s = stats_;
  for (const auto& [id, peer] : peers_) {
    if (peer.state != State::kUp) continue;
    ++s.peers;
    s.links.push_back({id, peer.sent_messages, peer.sent_bytes, peer.received_messages, peer.received_bytes,
                       peer.sent_bytes - peer.acked_bytes});
  }
  std::sort(s.links.begin(), s.links.end(), [](const auto& a, const auto& b) { return a.peer < b.peer; });
  return s;
}

SessionTransport::Inflight SessionTransport::inflight(Incarnation id) const {
  const Peer* peer = find(id);
  if (!peer || peer->state != State::kUp) return {};
  return {peer->sent_messages - peer->acked_messages, peer->sent_bytes - peer->acked_bytes};
}

template Status SessionTransport::send_batch(Incarnation, const DispatchBatch&);
template Status SessionTransport::send_batch(Incarnation, const CombineBatch&);

}  // namespace conclave
