// Drives the scheduler core on an executor, and connects it: to gateways and members of the same process
// directly, to others through sessions that an adapter (scheduler/grpc) registers. Every method may be called
// from any thread unless it says otherwise; the work itself happens on the executor. Sessions are called on
// the executor, one call at a time.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "libs/ports/executor.h"
#include "libs/ports/member_link.h"
#include "libs/ports/scheduler_port.h"
#include "scheduler/core/core.h"
#include "scheduler/core/events.h"
#include "scheduler/core/options.h"
#include "scheduler/core/status_snapshot.h"

namespace conclave::scheduler {

// A member's connection as the scheduler sees it. Calls come on the loop's executor and must not block;
// messages that find the connection gone are dropped.
class MemberSession {
 public:
  virtual ~MemberSession() = default;
  virtual void send(ToMember message) = 0;
  // The scheduler is done with this session; nothing more is sent. OK: a clean end.
  virtual void close(const Status& cause) = 0;
};

// A gateway's connection; same rules.
class GatewaySession {
 public:
  virtual ~GatewaySession() = default;
  virtual void welcome(const Welcome& welcome) = 0;
  // OK: accepted, and `resumable` says whether its router_context is kept.
  virtual void reply(RequestId request, const Status& status, bool resumable) = 0;
  // OK: `adopted` is there (else null), and its tokens follow.
  virtual void reply_adopt(RequestId request, const Status& status, const AdoptedRequest* adopted) = 0;
  // May be held back until flush(), which comes at the end of every round of events: what a round gives a
  // gateway can travel together.
  virtual void tokens(const TokenEvent& event) = 0;
  virtual void flush() {}
  virtual void fleet(const FleetInfo& fleet) = 0;
  virtual void close(const Status& cause) = 0;
};

class SchedulerLoop : public SchedulerPort {
 public:
  // The executor must outlive the loop. Destroy the loop on its executor, or once the executor runs no more
  // tasks.
  // `on_stall`, where given, hears on the executor of requests that make no progress.
  SchedulerLoop(SchedulerOptions options, Executor& executor,
                std::function<void(const ReportStall&)> on_stall = nullptr);
  ~SchedulerLoop() override;
  SchedulerLoop(const SchedulerLoop&) = delete;
  SchedulerLoop& operator=(const SchedulerLoop&) = delete;

  // --- sessions of an adapter: connected once, then messages in order (a member's first is its Hello),
  // closed once. The session is kept until it is closed from either side.
  SessionId member_connected(std::shared_ptr<MemberSession> session);
  void on_member_message(SessionId session, FromMember message);
  void member_closed(SessionId session, Status cause);

  SessionId gateway_connected(std::shared_ptr<GatewaySession> session, Hello hello);
  void on_gateway_submit(SessionId session, AcceptedRequest request);
  // Without a choice: all of them.
  void on_gateway_cancel(SessionId session, RequestId request, std::optional<uint32_t> choice);
  void on_gateway_adopt(SessionId session, RequestId request, std::string tenant);
  void on_gateway_release(SessionId session, RequestId request, bool finished);
  void gateway_closed(SessionId session, Status cause);

  // --- a gateway of this process.
  void submit(AcceptedRequest request, std::shared_ptr<RequestObserver> observer) override;
  void cancel(RequestId id) override;
  void cancel_choice(RequestId id, uint32_t choice) override;
  void adopt(RequestId id, std::string tenant, std::shared_ptr<RequestObserver> observer) override;
  void release(RequestId id, const RequestObserver& observer, bool finished) override;
  FleetInfo fleet() const override;
  void timeline(RequestId id, std::function<void(StatusOr<SchedulerTimeline>)> done) override;

  // --- a member of this process. Call it on member_executor or before that runs, since the handler may be
  // called as soon as this returns. The handler is called on member_executor only, and hello() is asked for
  // there; after a refusal or a close the link connects again with back-off, as a remote one does. Its lease
  // is renewed by the loop. Destroying the link (on member_executor, or once that runs no more tasks) is the
  // loss of the member; the handler is not called afterwards. The loop must outlive the link's use: a link
  // whose loop is gone drops what it is given.
  std::unique_ptr<MemberLink> attach_member(MemberHandler& handler, Executor& member_executor);

  // --- for people and metrics.
  // Calls `done` on the executor.
  void status(std::function<void(const StatusSnapshot&)> done);
  // As of the end of the last step of the loop.
  SchedulerMetrics metrics() const;
  // Asks that what a member runs or holds moves elsewhere. `done` is called on the executor: OK once it is
  // draining (status() tells when it is drained), NOT_FOUND.
  void drain_member(Incarnation member, std::function<void(const Status&)> done);
  // Calls `done` on the executor, with what SchedulerCore says.
  void experts(std::optional<uint32_t> layer, std::function<void(const StatusOr<ExpertsSnapshot>&)> done);
  void rebalance(bool dry_run, std::function<void(const StatusOr<RebalanceSummary>&)> done);
  // `f` is called on the executor with what belongs into the log, from the next event on.
  void set_on_note(std::function<void(const Note&)> f);
  // The core's recount (core.h). On the executor; for tests.
  Status audit() const;

 private:
  class Driver;
  std::shared_ptr<Driver> driver_;
};

}  // namespace conclave::scheduler
