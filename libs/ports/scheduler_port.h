// The gateway's view of the scheduler.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/model/membership.h"
#include "libs/model/request.h"
#include "libs/model/timeline.h"

namespace conclave {

// Receives what happens to one request; calls come from the port's own thread, one at a time, and must not
// block.
class RequestObserver {
 public:
  virtual ~RequestObserver() = default;
  // The scheduler acknowledged the submission: from here the request ends exactly once (design rule 2).
  virtual void on_accepted() = 0;
  // Before on_accepted(), where a router_context was sent and is kept: others may adopt the request.
  virtual void on_resumable() {}
  // Instead of on_accepted(), for an observer that adopts a request.
  virtual void on_adopted(const AdoptedRequest&) {}
  // Not accepted; nothing else follows.
  virtual void on_refused(const Status& cause) = 0;
  // Tokens of each choice in order, its last with finish != kNone; nothing of that choice follows it, and
  // nothing at all once every choice has ended.
  virtual void on_tokens(const TokenEvent& event) = 0;
};

class SchedulerPort {
 public:
  virtual ~SchedulerPort() = default;
  // Any thread. Idempotent by RequestId. A remote port keeps the request and the tokens delivered, and
  // resubmits both to a restarted scheduler.
  virtual void submit(AcceptedRequest request, std::shared_ptr<RequestObserver> observer) = 0;
  // Any thread. The observer still gets the last event of each choice that has not ended (kCancelled).
  virtual void cancel(RequestId id) = 0;
  // Any thread. Ends one choice (a stop string at the gateway); the others go on.
  virtual void cancel_choice(RequestId id, uint32_t choice) = 0;
  // Any thread. Takes over a request that was submitted with a router_context, by this gateway or another:
  // on_adopted(), then its tokens from the first one on; whoever had it sees it cancelled. Refused with
  // NOT_FOUND when the scheduler has none of that id and tenant, or its grace time is over, and with
  // FAILED_PRECONDITION when it cannot be adopted. An observer of this port's that has it so far hears
  // nothing more.
  virtual void adopt(RequestId id, std::string tenant, std::shared_ptr<RequestObserver> observer) {
    (void)id, (void)tenant;
    observer->on_refused(make_status(StatusCode::kUnimplemented, "this port cannot adopt requests"));
  }
  // Any thread. This observer lets go of a request that may be adopted within the grace time, and hears
  // nothing more; nothing happens when it has it no more. `finished`: its text has ended, so nothing more of
  // it is to be generated.
  virtual void release(RequestId id, const RequestObserver& observer, bool finished) {
    (void)observer, (void)finished;
    cancel(id);
  }
  virtual FleetInfo fleet() const = 0;
  // Any thread. Calls `done` once, on any thread, with what the scheduler knows of a request whose trace says
  // `followed`, or that ended lately: NOT_FOUND; UNAVAILABLE when no scheduler answers within a few seconds.
  virtual void timeline(RequestId id, std::function<void(StatusOr<SchedulerTimeline>)> done) {
    (void)id;
    done(make_status(StatusCode::kUnimplemented, "this port knows no timelines"));
  }
};

}  // namespace conclave
