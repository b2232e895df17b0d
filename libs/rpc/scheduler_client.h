// The gateway's SchedulerPort over the gRPC stream Cluster.Gateway.
//
// It keeps every open request with the tokens already delivered and resubmits both to a scheduler that
// restarted, or to the same one after a lost connection. Token events are put in order by their index, so
// that an observer sees every token exactly once. A request that was accepted ends exactly once, whatever
// happens to the connection: by its deadline at the latest, which this side enforces while there is no
// scheduler to do it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "libs/base/ids.h"
#include "libs/ports/scheduler_port.h"
#include "libs/rpc/client_options.h"

namespace conclave::rpc {

// Counters only grow; open is of the moment.
struct SchedulerClientMetrics {
  uint64_t connections = 0;       // on which the scheduler described its fleet
  uint64_t resubmissions = 0;     // requests sent again on a new connection
  uint64_t duplicate_tokens = 0;  // dropped, since they had been delivered
  uint64_t invalid_messages = 0;  // each closed its connection
  uint64_t adoptions = 0;         // requests taken over
  uint32_t open = 0;
};

// Of the scheduler's whole cluster.
struct FleetLoad {
  uint32_t waiting = 0;  // requests
  uint32_t running = 0;
  double kv_usage = 0;  // pages in use of all pages
};

class SchedulerClient final : public SchedulerPort {
 public:
  // Observers are called on the client's own thread, one at a time. `name` and `incarnation` name the router.
  SchedulerClient(ClientOptions options, std::string name, Incarnation incarnation);
  // Ends the connection. Requests still open end: refused, or finished as cancelled.
  ~SchedulerClient() override;
  SchedulerClient(const SchedulerClient&) = delete;
  SchedulerClient& operator=(const SchedulerClient&) = delete;

  // Refusals: RESOURCE_EXHAUSTED past max_open_requests, UNAVAILABLE when no scheduler was there for
  // submit_wait, ALREADY_EXISTS for an id that is open here, or what the scheduler says.
  void submit(AcceptedRequest request, std::shared_ptr<RequestObserver> observer) override;
  void cancel(RequestId id) override;
  void cancel_choice(RequestId id, uint32_t choice) override;
  // UNAVAILABLE at once while there is no scheduler that has described its fleet, and when its connection is
  // lost before it answered;
  // UNIMPLEMENTED where the scheduler keeps no contexts; RESOURCE_EXHAUSTED past max_open_requests.
  void adopt(RequestId id, std::string tenant, std::shared_ptr<RequestObserver> observer) override;
  // While there is no scheduler nobody is told: it lets go of all that its lost connection had.
  void release(RequestId id, const RequestObserver& observer, bool finished) override;
  // Not ready, with the reason, while there is no connection, and until the scheduler describes its fleet.
  FleetInfo fleet() const override;
  // UNAVAILABLE too while there is no connection. `done` may outlive the client.
  void timeline(RequestId id, std::function<void(StatusOr<SchedulerTimeline>)> done) override;

  SchedulerClientMetrics metrics() const;
  // Asks the scheduler; nothing when it does not answer within `limit`. Blocks; any thread but the client's.
  std::optional<FleetLoad> load(Nanos limit) const;
  // Runs the task soon on the client's thread. Any thread.
  void post(std::function<void()> task);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::rpc
