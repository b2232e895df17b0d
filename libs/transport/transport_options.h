// What every transport of ours is configured with.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/ports/expert_transport.h"

namespace conclave {

// Why a peer of the data plane was refused by this process.
enum class HelloRefusal : uint8_t {
  kSecret,       // it does not prove the cluster's secret
  kIncarnation,  // it means another incarnation than the one that listens here
  kVersion,      // no protocol version in common
  kFleet,        // another checkpoint or numerics
  kBound,        // max_peers
  kOther,
};
inline constexpr size_t kHelloRefusals = 6;
inline std::string_view hello_refusal_name(HelloRefusal refusal) {
  constexpr std::array<std::string_view, kHelloRefusals> kNames = {"secret", "incarnation", "version",
                                                                   "fleet",  "bound",       "other"};
  return kNames[static_cast<size_t>(refusal)];
}

struct TransportOptions {
  Incarnation self;
  // The cluster's secret: both ends of a connection prove that they know it (docs/wire_format.md).
  std::string secret;
  // Another one that a peer may prove instead, while the secret is being changed; empty: none.
  std::string other_secret;
  // Told of each peer that is refused, on the executor; may be empty. `peer` is who it claims to be.
  std::function<void(HelloRefusal, Incarnation peer, const Status& why)> on_refused;
  // What must be equal at both ends, e.g. numerics_id and model fingerprint; at most 512 bytes. A peer with
  // another is refused with FAILED_PRECONDITION.
  std::string fleet;
  TransportLimits limits;
  Nanos connect_deadline = 2 * kSecond;  // from connect() to PeerUp or PeerDown
  // A peer that was silent for keepalive_interval is asked for a sign of life; silent for keepalive_timeout
  // it is down. 0: never (the default in one process, where a peer can't stop alone).
  Nanos keepalive_interval = 0;
  Nanos keepalive_timeout = 15 * kSecond;
  // Consumption is acknowledged with the next message to the peer, or after this time by a message of its
  // own.
  Nanos ack_delay = 2 * kMillisecond;
  // A submitter that waits for room asks again this often (an acknowledgement may have been lost).
  Nanos blocked_ping_interval = 50 * kMillisecond;
  bool rows_crc = false;      // checksum rows; UCX turns it on by default
  uint32_t max_peers = 1024;  // connected or connecting at once
  // Where session numbers and nonces come from; the operating system when empty. Simulations give a seeded
  // one.
  std::function<uint64_t()> random;
};

// Of one peer that is up, since its connection stands.
struct LinkStats {
  Incarnation peer;
  uint64_t sent_messages = 0;
  uint64_t sent_bytes = 0;
  uint64_t received_messages = 0;
  uint64_t received_bytes = 0;
  uint64_t inflight_bytes = 0;  // sent, not yet acknowledged
};

// Counts since the start, for metrics. All monotonic but peers and links.
struct TransportStats {
  uint64_t sent_messages = 0;
  uint64_t sent_bytes = 0;
  uint64_t received_messages = 0;
  uint64_t received_bytes = 0;
  uint64_t rejected_messages = 0;  // failed their checks
  uint64_t late_messages = 0;      // of an unknown, closed or replaced peer: dropped
  uint64_t blocked = 0;            // submits and replies that met a bound
  uint64_t hellos_refused = 0;     // by us, and below by their reasons
  std::array<uint64_t, kHelloRefusals> hellos_refused_by{};
  uint64_t peers_lost = 0;       // PeerDown events
  uint64_t peers = 0;            // now up
  std::vector<LinkStats> links;  // of these, in order of their incarnation
};

}  // namespace conclave
