// The scheduler's gRPC face: service conclave.v1.Cluster over the sessions of a SchedulerLoop, with health
// and reflection.
//
// Each stream has bounded queues both ways: a peer that does not read is cut off with RESOURCE_EXHAUSTED, and
// one that sends faster than the loop works is held back by flow control. A message that breaks the rules of
// libs/rpc/convert.h ends its session with INVALID_ARGUMENT and the field's name.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "libs/base/status.h"
#include "libs/ports/executor.h"
#include "scheduler/loop.h"

namespace conclave::tls {
class Identity;
}

namespace conclave::scheduler {

struct GrpcServerOptions {
  std::string listen = "127.0.0.1:0";        // host:port; port 0: chosen by the kernel
  uint64_t max_message_bytes = 64ull << 20;  // received or sent
  // Waiting to be written to one peer; past it the peer is cut off.
  uint32_t session_queue_messages = 65536;
  uint64_t session_queue_bytes = 64ull << 20;
  Nanos hello_deadline = 5 * kSecond;  // a connection that says nothing is closed
  // What Status says of this process; empty: nothing.
  std::string ops_address;
  std::string version;
  std::shared_ptr<tls::Identity>
      tls;  // null: in clear; else everybody must show a certificate of the cluster
};

// Counters only grow; streams are of the moment.
struct GrpcServerMetrics {
  uint64_t streams_opened = 0;
  uint64_t invalid_messages = 0;
  uint64_t slow_peers_cut = 0;
  uint32_t streams = 0;
};

class GrpcServer {
 public:
  // `loop` runs on `executor`; both outlive the server, and the executor must run until shutdown() has
  // returned. UNAVAILABLE when the address is taken. `on_session_end`, where given, hears why each session
  // ended (any thread).
  static StatusOr<std::unique_ptr<GrpcServer>> start(
      const GrpcServerOptions& options, SchedulerLoop& loop, Executor& executor,
      std::function<void(const std::string& peer, const Status& cause)> on_session_end = nullptr);
  virtual ~GrpcServer() = default;

  // "host:port" with the port really taken.
  virtual std::string address() const = 0;
  virtual uint16_t port() const = 0;
  // What the health service answers, for the server and for conclave.v1.Cluster.
  virtual void set_serving(bool serving) = 0;
  // Ends every session, at once or, those that do not end, after `limit`. Also done by the destructor.
  virtual void shutdown(Nanos limit) = 0;
  virtual GrpcServerMetrics metrics() const = 0;
};

}  // namespace conclave::scheduler
