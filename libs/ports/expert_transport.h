// The data plane's port: dispatches out, combines back, asynchronously. One instance per process (or
// simulated process) serves both sides: a worker connects and submits; a shard replies to whoever dispatched.
//
// Threading: every call from the owner's executor, and events are taken there by poll(). `set_ready` installs
// a callback that runs on that executor when poll() may have something; it is called at least once per new
// event.
//
// Delivery: at most once per submit or reply, unordered between messages, not reliable: a message may be lost
// when its peer fails. Eager completion is local, so kSent says only that buffers are free. Whoever needs an
// answer keeps a deadline. Peers are named by their Incarnation; a message from a closed peer is dropped.
//
// Bounds: `max_inflight_bytes` and `max_inflight_messages` per peer (TransportLimits); at the bound submit
// and reply answer RESOURCE_EXHAUSTED and nothing was taken; kWritable follows once there is room again.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/model/dispatch.h"

namespace conclave {

struct TransportLimits {
  uint32_t max_rows = 8192;     // of one message
  uint32_t max_items = 65536;   // (row, expert) pairs of one message
  uint32_t max_hidden = 65536;  // elements of one row
  uint64_t max_message_bytes = 1ull << 30;
  uint64_t max_inflight_bytes = 256ull << 20;  // per peer
  uint32_t max_inflight_messages = 1024;       // per peer
};

struct TransportEvent {
  struct PeerUp {};  // the hello round trip is done
  struct PeerDown {  // connect failed, endpoint error, bad hello, or the peer closed; the peer is forgotten
    Status cause;
  };
  struct Dispatch {
    DispatchBatch batch;
  };
  struct Combine {
    CombineBatch batch;
  };
  struct Writable {};
  // The peer no longer wants this dispatch (its cancel()). Best effort: a transport may leave it out.
  struct Cancel {
    DispatchId id;
  };
  // A message that failed its checks (CRC, limits, version). The peer stays; a count goes to metrics.
  struct Rejected {
    Status cause;
  };

  Incarnation peer;
  std::variant<PeerUp, PeerDown, Dispatch, Combine, Writable, Rejected, Cancel> what;
};

class ExpertTransport {
 public:
  virtual ~ExpertTransport() = default;

  // Opaque; valid for this incarnation; exchanged through the scheduler.
  virtual std::string address() const = 0;
  virtual Incarnation self() const = 0;

  // Starts connecting; ends in kPeerUp or kPeerDown within the connect deadline. A second connect to a peer
  // that is up or connecting changes nothing.
  virtual void connect(Incarnation peer, std::string_view address) = 0;
  // Forgets the peer at once, dropping what is in flight; no event follows for it.
  virtual void close(Incarnation peer) = 0;
  virtual bool is_up(Incarnation peer) const = 0;

  // UNAVAILABLE when the peer is not up; INVALID_ARGUMENT when the batch breaks the limits.
  virtual Status submit(Incarnation peer, const DispatchBatch& batch) = 0;
  virtual Status reply(Incarnation peer, const CombineBatch& batch) = 0;
  // Best effort: the peer may skip the dispatch. Its combine may still come.
  virtual void cancel(Incarnation peer, DispatchId id) = 0;

  // Appends what has happened since the last call.
  virtual void poll(std::vector<TransportEvent>& out) = 0;
  virtual void set_ready(std::function<void()> ready) = 0;
  // Batches that poll() handed out and that are done with, for their memory. Nobody has to.
  virtual void recycle(DispatchBatch) {}
  virtual void recycle(CombineBatch) {}
};

}  // namespace conclave
