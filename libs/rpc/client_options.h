// How a member or router keeps its connection to the scheduler.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "libs/base/clock.h"

namespace conclave::tls {
class Identity;
}

namespace conclave::rpc {

struct ClientOptions {
  std::string target;                  // host:port of the scheduler
  std::shared_ptr<tls::Identity> tls;  // null: in clear
  // What the hello says of this process (libs/model/membership.h); empty: nothing.
  std::string ops_address;
  std::string version;

  // Pauses between connection attempts: the first, doubling to the longest; each is shortened at random by up
  // to half, so that a fleet does not come back in step.
  Nanos reconnect_min = 50 * kMillisecond;
  Nanos reconnect_max = 2 * kSecond;
  // From the start of an attempt to the scheduler's welcome; at a router, to what follows it: its fleet.
  Nanos connect_deadline = 5 * kSecond;

  // Messages waiting to be written; past it the connection starts over.
  uint32_t queue_messages = 8192;
  uint64_t max_message_bytes = 64ull << 20;

  // Routers: a new request waits so long for an absent scheduler, then fails with UNAVAILABLE.
  Nanos submit_wait = 5 * kSecond;
  // Routers: requests open at the scheduler; past it RESOURCE_EXHAUSTED.
  uint32_t max_open_requests = 4096;

  // A connection on which nothing came for keepalive_time is probed; it is dead when the probe is not
  // answered in keepalive_timeout. This finds silent partitions; a process that dies is seen at once.
  Nanos keepalive_time = 10 * kSecond;
  Nanos keepalive_timeout = 5 * kSecond;
};

// Fractions of the lease after which a member renews it.
inline constexpr int kHeartbeatsPerLease = 5;

}  // namespace conclave::rpc
