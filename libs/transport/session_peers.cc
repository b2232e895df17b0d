// SessionTransport: how peers come and go.
#include <algorithm>

#include "libs/base/check.h"
#include "libs/base/random.h"
#include "libs/model/membership.h"
#include "libs/transport/handshake.h"
#include "libs/transport/session_transport.h"

namespace conclave {
namespace {
constexpr size_t kMaxRefusals = 16;                   // links open at once only to say no
constexpr Nanos kRefusalLinger = 500 * kMillisecond;  // how long such a link lives

wire::Nonce make_nonce(uint64_t a, uint64_t b) {
  wire::Nonce nonce;
  std::copy_n(reinterpret_cast<const std::byte*>(&a), 8, nonce.begin());
  std::copy_n(reinterpret_cast<const std::byte*>(&b), 8, nonce.begin() + 8);
  return nonce;
}
}  // namespace

uint64_t SessionTransport::draw() {
  for (;;) {
    const uint64_t v = options_.random ? options_.random() : system_random_u64();
    if (v != 0) return v;
  }
}

SessionTransport::Peer* SessionTransport::find(Incarnation id) {
  auto it = peers_.find(id);
  return it == peers_.end() ? nullptr : &it->second;
}
const SessionTransport::Peer* SessionTransport::find(Incarnation id) const {
  auto it = peers_.find(id);
  return it == peers_.end() ? nullptr : &it->second;
}

bool SessionTransport::is_up(Incarnation id) const {
  const Peer* peer = find(id);
  return peer && peer->state == State::kUp;
}

SessionTransport::Peer& SessionTransport::add_peer(Incarnation id) {
  Peer& peer = peers_[id];
  peer = {};
  peer.id = id;
  peer.session_in = draw();
  peer.nonce = make_nonce(draw(), draw());
  peer.heard = executor_.now();
  return peer;
}

Status SessionTransport::start_link(Peer& peer, std::string_view address) {
  peer.link = next_link_++;
  RETURN_IF_ERROR(link_open(peer.link, address));
  links_[peer.link] = peer.id;
  return OkStatus();
}

void SessionTransport::connect(Incarnation id, std::string_view address) {
  if (find(id)) return;
  const auto refuse = [&](const Status& cause) {
    ++stats_.peers_lost;
    push(id, TransportEvent::PeerDown{cause});
  };
  if (!id || id == options_.self) return refuse(invalid_field("peer", "is this process itself, or none"));
  if (address.empty() || address.size() > wire::kMaxAddressBytes) {
    return refuse(invalid_field("address", "is empty or too long"));
  }
  if (peers_.size() >= options_.max_peers) return refuse(resource_exhausted("max_peers is reached"));
  Peer& peer = add_peer(id);
  if (Status s = start_link(peer, address); !s.ok()) {
    peers_.erase(id);
    return refuse(annotate(s, "connecting"));
  }
  peer.deadline = executor_.post_at(
      executor_.now() + options_.connect_deadline,
      [this, id, link = peer.link, alive = std::weak_ptr<int>(alive_)] {
        if (alive.expired()) return;
        Peer* p = find(id);
        if (!p || p->link != link || p->state == State::kUp) return;
        p->deadline = {};
        fail_peer(id, deadline_exceeded("no answer within connect_deadline; is it there, and "
                                        "does it know the same cluster secret?"));
      });
  send_hello(peer);
}

void SessionTransport::send_hello(Peer& peer) {
  wire::HelloBody hello;
  hello.receiver = peer.id;
  hello.session = peer.session_in;
  hello.nonce = peer.nonce;
  hello.window_bytes = options_.limits.max_inflight_bytes;
  hello.window_messages = options_.limits.max_inflight_messages;
  hello.protocol_min = kProtocolVersionMin;
  hello.protocol_max = kProtocolVersionMax;
  hello.address = address();
  hello.fleet = options_.fleet;
  hello.proof = wire::hello_proof(secret_, options_.self, hello);
  OutMessage message{.header = take_header_buffer(), .rows = nullptr, .control = false};
  wire::encode(wire::Envelope{options_.self, 0, 0, 0}, hello, message.header);
  link_send(peer.link, std::move(message));
}

void SessionTransport::send_hello_ack(Peer& peer, const wire::Nonce& hello_nonce, const std::string& secret) {
  wire::HelloAckBody ack;
  ack.receiver = peer.id;
  ack.session = peer.session_in;
  ack.nonce = peer.nonce;
  ack.window_bytes = options_.limits.max_inflight_bytes;
  ack.window_messages = options_.limits.max_inflight_messages;
  ack.proof = wire::hello_ack_proof(secret, options_.self, ack, hello_nonce);
  OutMessage message{.header = take_header_buffer(), .rows = nullptr, .control = false};
  wire::encode(wire::Envelope{options_.self, peer.session_out, 0, 0}, ack, message.header);
  link_send(peer.link, std::move(message));
}

void SessionTransport::set_secrets(std::string secret, std::string other_secret) {
  secret_ = std::move(secret);
  other_secret_ = std::move(other_secret);
}

const std::string* SessionTransport::proven(
    const wire::Proof& given, const std::function<wire::Proof(const std::string&)>& proof) const {
  const bool first = wire::same_proof(proof(secret_), given);
  const bool second = !other_secret_.empty() && wire::same_proof(proof(other_secret_), given);
  return first ? &secret_ : second ? &other_secret_ : nullptr;
}

std::optional<SessionTransport::Unwanted> SessionTransport::judge_hello(const wire::HelloBody& hello) const {
  const auto unwanted = [](HelloRefusal reason, Status why) {
    return std::optional<Unwanted>(Unwanted{reason, std::move(why)});
  };
  if (hello.receiver != options_.self) {
    return unwanted(
        HelloRefusal::kIncarnation,
        failed_precondition("the hello is for another incarnation than the one that listens here"));
  }
  if (hello.protocol_min > kProtocolVersionMax || hello.protocol_max < kProtocolVersionMin) {
    return unwanted(HelloRefusal::kVersion,
                    failed_precondition("protocol versions " + std::to_string(hello.protocol_min) + " to " +
                                        std::to_string(hello.protocol_max) + " do not meet " +
                                        std::to_string(kProtocolVersionMin) + " to " +
                                        std::to_string(kProtocolVersionMax)));
  }
  if (hello.fleet != options_.fleet) {
    return unwanted(HelloRefusal::kFleet, failed_precondition("another fleet: \"" + hello.fleet +
                                                              "\", here it is \"" + options_.fleet + "\""));
  }
  if (hello.window_messages == 0 || hello.window_bytes == 0)
    return unwanted(HelloRefusal::kOther, invalid_field("window", "is zero"));
  return std::nullopt;
}

void SessionTransport::count_refusal(HelloRefusal reason, Incarnation peer, const Status& why) {
  ++stats_.hellos_refused;
  ++stats_.hellos_refused_by[static_cast<size_t>(reason)];
  if (options_.on_refused) options_.on_refused(reason, peer, why);
}

void SessionTransport::on_hello(const wire::Header& h, wire::View header) {
  wire::HelloBody hello;
  if (Status s = wire::decode(h, header, hello); !s.ok()) {
    ++stats_.rejected_messages;
    return;
  }
  const Incarnation id = h.envelope.sender;
  const std::string* const secret =
      proven(hello.proof, [&](const std::string& known) { return wire::hello_proof(known, id, hello); });
  if (secret == nullptr) {
    // A stranger gets no answer: one would mean opening a link to an address of its choice. Its connect
    // deadline tells it.
    return count_refusal(
        HelloRefusal::kSecret, id,
        make_status(StatusCode::kUnauthenticated, "the hello does not prove the cluster's secret"));
  }
  if (const auto unwanted = judge_hello(hello)) return refuse_hello(h, hello, *unwanted, *secret);
  Peer* peer = find(id);
  if (peer && peer->session_out == hello.session) {
    return send_hello_ack(*peer, hello.nonce, *secret);  // said it twice
  }
  if (peer && peer->state == State::kUp) {
    // The peer lost the connection, or gave it up, and starts anew; what was on its way is gone.
    fail_peer(id, unavailable("the peer connected anew"));
    peer = nullptr;
  }
  if (!peer) {
    if (peers_.size() >= options_.max_peers) {
      return refuse_hello(h, hello, {HelloRefusal::kBound, resource_exhausted("max_peers is reached")},
                          *secret);
    }
    peer = &add_peer(id);
    if (!start_link(*peer, hello.address).ok()) {
      peers_.erase(id);
      return;
    }
  }
  // Else we are connecting to each other at once: our own link carries our side.
  become_up(*peer, hello.session, hello.window_bytes, hello.window_messages);
  send_hello_ack(*peer, hello.nonce, *secret);
}

void SessionTransport::refuse_hello(const wire::Header& h, const wire::HelloBody& hello,
                                    const Unwanted& unwanted, const std::string& secret) {
  const Status& why = unwanted.why;
  count_refusal(unwanted.reason, h.envelope.sender, why);
  if (refusals_.size() >= kMaxRefusals) return;  // the sender's connect deadline tells it as well
  const LinkId link = next_link_++;
  if (!link_open(link, hello.address).ok()) return;
  wire::HelloAckBody ack;
  ack.receiver = h.envelope.sender;
  ack.code = static_cast<uint16_t>(why.code());
  ack.message = message_of(why);
  ack.proof = wire::hello_ack_proof(secret, options_.self, ack, hello.nonce);
  OutMessage message{.header = take_header_buffer(), .rows = nullptr, .control = false};
  wire::encode(wire::Envelope{options_.self, hello.session, 0, 0}, ack, message.header);
  refusals_[link] =
      executor_.post_at(executor_.now() + kRefusalLinger, [this, link, alive = std::weak_ptr<int>(alive_)] {
        if (alive.expired() || refusals_.erase(link) == 0) return;
        link_close(link);
      });
  link_send(link, std::move(message));
}

void SessionTransport::on_hello_ack(const wire::Header& h, wire::View header) {
  wire::HelloAckBody ack;
  if (Status s = wire::decode(h, header, ack); !s.ok()) {
    ++stats_.rejected_messages;
    return;
  }
  Peer* peer = find(h.envelope.sender);
  if (!peer || peer->session_in != h.envelope.session || ack.receiver != options_.self) {
    ++stats_.late_messages;
    return;
  }
  if (peer->state == State::kUp) return;  // the peer's own hello was faster
  if (ack.code != 0) {
    // Believed without a proof, but only while connecting, where it can do no more than a lost message could.
    const auto code = ack.code <= 16 ? static_cast<StatusCode>(ack.code) : StatusCode::kUnknown;
    return fail_peer(peer->id, make_status(code, "refused by the peer: " + ack.message));
  }
  const std::string* const secret = proven(ack.proof, [&](const std::string& known) {
    return wire::hello_ack_proof(known, h.envelope.sender, ack, peer->nonce);
  });
  if (secret == nullptr) {
    const Status why =
        make_status(StatusCode::kUnauthenticated, "the peer does not prove the cluster's secret");
    count_refusal(HelloRefusal::kSecret, h.envelope.sender, why);
    return fail_peer(peer->id, why);
  }
  become_up(*peer, ack.session, ack.window_bytes, ack.window_messages);
}

void SessionTransport::become_up(Peer& peer, uint64_t session_out, uint64_t window_bytes,
                                 uint32_t window_messages) {
  executor_.cancel(peer.deadline);
  peer.deadline = {};
  peer.state = State::kUp;
  peer.session_out = session_out;
  peer.window_bytes = std::min(options_.limits.max_inflight_bytes, window_bytes);
  peer.window_messages = std::min(options_.limits.max_inflight_messages, window_messages);
  peer.heard = executor_.now();
  push(peer.id, TransportEvent::PeerUp{});
  arm_keepalive();
}

void SessionTransport::forget_peer(Incarnation id, bool say_bye) {
  auto it = peers_.find(id);
  if (it == peers_.end()) return;
  executor_.cancel(it->second.deadline);
  const LinkId link = it->second.link;
  if (say_bye) {
    OutMessage message{.header = take_header_buffer(), .rows = nullptr, .control = false};
    wire::encode_bye(wire::Envelope{options_.self, it->second.session_out, 0, 0}, it->second.session_in,
                     message.header);
    link_send(link, std::move(message));
  }
  peers_.erase(it);
  links_.erase(link);
  link_close(link);
}

void SessionTransport::close(Incarnation id) {
  forget_peer(id, true);
  std::erase_if(events_, [&](const Queued& q) { return q.event.peer == id; });
}

void SessionTransport::fail_peer(Incarnation id, const Status& cause) {
  if (!find(id)) return;
  forget_peer(id, false);
  ++stats_.peers_lost;
  push(id, TransportEvent::PeerDown{cause});
}

void SessionTransport::link_failed(LinkId link, const Status& cause) {
  if (auto refusal = refusals_.find(link); refusal != refusals_.end()) {
    executor_.cancel(refusal->second);
    refusals_.erase(refusal);
    link_close(link);
    return;
  }
  auto it = links_.find(link);
  if (it != links_.end()) fail_peer(it->second, cause);
}

void SessionTransport::on_bye(const wire::Header& h, wire::View header) {
  uint64_t session = 0;
  Peer* peer = find(h.envelope.sender);
  if (!wire::decode_bye(h, header, session).ok()) {
    ++stats_.rejected_messages;
  } else if (peer && session != 0 && peer->session_out == session) {
    fail_peer(peer->id, unavailable("the peer closed the connection"));
  } else {
    ++stats_.late_messages;
  }
}

}  // namespace conclave
