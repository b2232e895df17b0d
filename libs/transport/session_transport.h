// What all our transports have in common: peers and their states, the hello with its proof, sessions, limits,
// credits, keepalive, and the event queue. A subclass supplies links: a way to send bytes to an address, and
// a call to receive() for what arrives.
//
// Connections: each end of a connection draws a session number that the other must put in every message, so
// messages of a closed or replaced connection are dropped however late they come. Both ends may connect at
// once; either hello makes the peer up.
//
// Credits: a sender has at most min(own, peer's) window of messages and bytes unacknowledged; the receiver
// acknowledges what its owner took by poll(), with the next message or after ack_delay. So a stopped peer
// bounds what is queued for it, and a slow owner bounds what waits for it.
//
// Threading: construct, use and destroy on the executor's thread (or while nothing runs there).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "libs/base/status.h"
#include "libs/model/row_pool.h"
#include "libs/ports/executor.h"
#include "libs/ports/expert_transport.h"
#include "libs/transport/transport_options.h"
#include "libs/transport/wire.h"

namespace conclave {

class SessionTransport : public ExpertTransport {
 public:
  ~SessionTransport() override;

  Incarnation self() const override { return options_.self; }
  void connect(Incarnation peer, std::string_view address) override;
  void close(Incarnation peer) override;
  bool is_up(Incarnation peer) const override;
  Status submit(Incarnation peer, const DispatchBatch& batch) override;
  Status reply(Incarnation peer, const CombineBatch& batch) override;
  void cancel(Incarnation peer, DispatchId id) override;
  void poll(std::vector<TransportEvent>& out) override;
  void set_ready(std::function<void()> ready) override;
  void recycle(DispatchBatch batch) override;
  void recycle(CombineBatch batch) override;
  // Replaces options.secret and options.other_secret for connections made from now on.
  void set_secrets(std::string secret, std::string other_secret);

  TransportStats stats() const;
  // Unacknowledged at the peer, of what was sent to it; zeros when it is not up.
  struct Inflight {
    uint64_t messages = 0;
    uint64_t bytes = 0;
  };
  Inflight inflight(Incarnation peer) const;

 protected:
  using LinkId = uint64_t;  // one attempt to reach one peer; never reused

  struct OutMessage {
    wire::Bytes header;    // give it back with recycle() once sent, if convenient
    RowBuffer rows;        // may be null
    bool control = false;  // may be dropped when the link has too much waiting
  };
  enum class SendResult {
    kTaken,
    kLost
  };  // kLost: will never arrive, and the link knows it (simulated loss)

  SessionTransport(Executor& executor, TransportOptions options);

  // The subclass's part. Called on the executor. link_send never fails visibly: a broken link reports
  // link_failed().
  virtual Status link_open(LinkId link, std::string_view address) = 0;
  virtual SendResult link_send(LinkId link, OutMessage message) = 0;
  // Nothing more is sent or reported for the link. What was sent before should still go out where the link is
  // healthy (the last of it is a Bye), but not for long.
  virtual void link_close(LinkId link) = 0;
  // Whether messages of one link arrive in the order of sending.
  virtual bool link_ordered() const = 0;

  // What the subclass reports. `message` is header and rows in one piece, or the header alone with `rows`
  // shared.
  void receive(wire::View message, const RowBuffer& rows);
  void link_failed(LinkId link, const Status& cause);
  // Before the subclass's members go: closes every link.
  void shut_down();

  wire::Bytes take_header_buffer();
  void recycle(wire::Bytes&& header);

  Executor& executor_;
  const TransportOptions options_;
  // Expires with the transport: tasks that outlive it check.
  std::shared_ptr<int> alive_ = std::make_shared<int>(0);

 private:
  enum class State { kConnecting, kUp };
  struct Peer {
    Incarnation id;
    State state = State::kConnecting;
    LinkId link = 0;
    uint64_t session_in = 0;   // what the peer must put in its messages
    uint64_t session_out = 0;  // what we must put in ours; 0 until it told us
    wire::Nonce nonce{};       // of our hello
    TimerId deadline;
    uint64_t window_messages = 0;  // in force: min(ours, theirs)
    uint64_t window_bytes = 0;
    uint64_t sent_messages = 0, sent_bytes = 0;    // cumulative, of batches
    uint64_t acked_messages = 0, acked_bytes = 0;  // of those
    uint64_t received_messages = 0, received_bytes = 0;
    uint64_t consumed_messages = 0, consumed_bytes = 0;
    uint64_t told_messages = 0, told_bytes = 0;  // consumption last acknowledged
    bool blocked = false;                        // owes a Writable
    TimePoint heard = 0;
    TimePoint asked = 0;  // last ping
  };
  struct Queued {
    TransportEvent event;
    uint64_t session = 0;  // session_in of the connection it came on
    uint64_t bytes = 0;    // credit to return when taken; 0: none
  };

  // session_peers.cc: connecting
  Peer& add_peer(Incarnation id);
  Status start_link(Peer& peer, std::string_view address);
  void send_hello(Peer& peer);
  // `secret` is the one that the hello proved: the peer is sure to know it.
  void send_hello_ack(Peer& peer, const wire::Nonce& hello_nonce, const std::string& secret);
  struct Unwanted {
    HelloRefusal reason;
    Status why;
  };
  void refuse_hello(const wire::Header& h, const wire::HelloBody& hello, const Unwanted& unwanted,
                    const std::string& secret);
  void count_refusal(HelloRefusal reason, Incarnation peer, const Status& why);
  // Whom we want; nothing: the hello is welcome.
  std::optional<Unwanted> judge_hello(const wire::HelloBody& hello) const;
  // The one of our secrets that proof(secret) makes; null: none. Looks at each whatever it finds.
  const std::string* proven(const wire::Proof& given,
                            const std::function<wire::Proof(const std::string&)>& proof) const;
  void on_hello(const wire::Header& h, wire::View header);
  void on_hello_ack(const wire::Header& h, wire::View header);
  void become_up(Peer& peer, uint64_t session_out, uint64_t window_bytes, uint32_t window_messages);
  void on_bye(const wire::Header& h, wire::View header);
  // The link is gone, or the peer is not wanted any more: forgets it and queues its PeerDown.
  void fail_peer(Incarnation id, const Status& cause);
  void forget_peer(Incarnation id, bool say_bye);
  Peer* find(Incarnation id);
  const Peer* find(Incarnation id) const;
  uint64_t draw();  // not 0

  // session_transport.cc: traffic
  wire::Envelope envelope(Peer& peer);
  bool has_room(const Peer& peer, uint64_t bytes) const;
  template <class Batch>
  Status send_batch(Incarnation id, const Batch& batch);
  void send_ack(Peer& peer);
  void send_ping(Peer& peer);
  void on_acknowledged(Peer& peer, const wire::Envelope& e);
  void on_ping(Peer& peer, const wire::Header& h, wire::View header);
  template <class Event, class Batch>
  void on_batch(Peer& peer, const wire::Header& h, wire::View message, const RowBuffer& shared,
                Batch Event::*batch, RowBuffer Batch::*rows_of);
  void on_cancel(Peer& peer, const wire::Header& h, wire::View header);
  void reject(Incarnation peer, uint64_t session, uint64_t credit, const Status& cause);
  // Built in place: moving whole variants makes g++ 12 warn of uninitialized alternatives.
  template <class Event>
  void push(Incarnation peer, Event event, uint64_t session = 0, uint64_t bytes = 0) {
    Queued& q = events_.emplace_back();
    q.event.peer = peer;
    q.event.what.template emplace<Event>(std::move(event));
    q.session = session;
    q.bytes = bytes;
    signal();
  }
  void signal();
  void arm_ack_timer();
  void arm_blocked_timer();
  void arm_keepalive();
  void flush_acks();
  void ask_blocked();
  void keep_alive();
  void at(TimePoint when, TimerId& slot, void (SessionTransport::*member)());

  std::unordered_map<Incarnation, Peer> peers_;
  LinkId next_link_ = 1;
  std::unordered_map<LinkId, Incarnation> links_;  // of peers
  std::unordered_map<LinkId, TimerId> refusals_;   // links open only to say no, for a short while
  std::vector<Queued> events_;
  std::function<void()> ready_;
  bool ready_pending_ = false;
  TimerId ack_timer_, blocked_timer_, keepalive_timer_;
  TimePoint keepalive_due_ = 0;
  std::string secret_, other_secret_;
  std::vector<wire::Bytes> spare_headers_;
  std::vector<DispatchBatch> spare_dispatches_;  // without rows
  std::vector<CombineBatch> spare_combines_;
  RowPool row_pool_;
  TransportStats stats_;
};

}  // namespace conclave
