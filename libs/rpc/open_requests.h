// The open requests of a gateway and what was delivered of each: the part of SchedulerClient that has no
// connection. One thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/ports/scheduler_port.h"

namespace conclave::rpc {

class OpenRequests {
 public:
  // After its deadline the scheduler has this long to end a request itself.
  static constexpr Nanos kDeadlineGrace = 2 * kSecond;
  // Ids to be cancelled at the next scheduler, kept at most.
  static constexpr size_t kMaxPendingCancels = 4096;

  struct Metrics {
    uint64_t resubmissions = 0;
    uint64_t duplicate_tokens = 0;
  };

  // A new request has `submit_wait` to see a scheduler that can take it.
  explicit OpenRequests(Nanos submit_wait) : submit_wait_(submit_wait) {}

  // Takes a request; refuses (through the observer) an id that is open.
  void add(AcceptedRequest request, std::shared_ptr<RequestObserver> observer, TimePoint now);

  // A connection is there: everything to submit on it, in order of arrival, and everything to cancel.
  struct Resume {
    std::vector<AcceptedRequest> submit;
    std::vector<RequestId> cancel;
  };
  Resume connected(TimePoint now);
  // The connection is gone. Requests not yet accepted have submit_wait to see another.
  void disconnected(TimePoint now);

  // The request as it is to be submitted now; nullptr when it is not open.
  const AcceptedRequest* to_submit(RequestId id, TimePoint now);
  // What the scheduler could not take yet and should be offered now, since its fleet has changed.
  std::vector<AcceptedRequest> retry(TimePoint now);

  // UNAVAILABLE for a request that was never accepted and has time left means "not yet": it is kept for
  // retry().
  void on_reply(RequestId id, const Status& status, TimePoint now, bool resumable = false);
  // A request that the scheduler has just given to this gateway; its tokens follow.
  void adopt(const AdoptedRequest& adopted, std::shared_ptr<RequestObserver> observer, TimePoint now);
  // This observer lets go of its request, without a word to it; true when the scheduler must be told (only
  // while connected).
  bool release(RequestId id, const RequestObserver* observer, bool connected);
  // The same, whoever has it; nobody is to be told.
  void drop(RequestId id);
  // DATA_LOSS when the event leaves a gap: the connection cannot be trusted.
  Status on_tokens(const TokenEvent& event);
  // True when the scheduler must be told (only while connected); else the request has ended here.
  bool cancel(RequestId id, bool connected);
  // The same for one choice. A choice of a request that nobody has accepted yet goes on.
  bool cancel_choice(RequestId id, uint32_t choice, bool connected);

  // Ends what is past its deadline, or has waited too long for a scheduler (refused with `why`).
  void expire(TimePoint now, const Status& why);
  // When expire() has something to do next; kNever when nothing waits.
  TimePoint next_expiry() const;

  // Ends everything: the client goes away.
  void end_all();

  size_t size() const { return open_.size(); }
  const Metrics& metrics() const { return metrics_; }

 private:
  struct Open {
    AcceptedRequest request;             // `delivered`, one for each choice, grows with each token
    uint32_t running = 0;                // choices that have not ended
    std::vector<bool> choice_cancelled;  // told to the scheduler
    std::shared_ptr<RequestObserver> observer;
    uint64_t arrival = 0;
    TimePoint deadline = kNever;
    TimePoint patience = 0;         // when a request that nobody accepted gives up
    TimePoint wait_until = kNever;  // `patience`, while it waits for a connection or a fleet
    Status not_yet;                 // what the scheduler said last
    TimePoint scheduled = kNever;   // its entry of expiries_
    bool sent = false;              // on the present connection
    bool ever_sent = false;
    bool accepted = false;
    bool cancelled = false;
  };
  using Map = std::unordered_map<RequestId, Open>;

  TimePoint expiry_of(const Open& open) const;
  void schedule(RequestId id, Open& open);
  // Ends every choice that has not ended, and the request.
  void finish(Map::iterator at, FinishReason reason, const std::string& error);
  // Ends one choice, and the request when it was the last.
  void finish_choice(Map::iterator at, uint32_t choice, FinishReason reason);
  static TokenEvent end_event(const AcceptedRequest& request, uint32_t choice, FinishReason reason);
  void refuse(Map::iterator at, Status cause);  // by value: it may lie in the entry
  void erase(Map::iterator at);
  void cancel_later(RequestId id);

  const Nanos submit_wait_;
  Map open_;
  std::map<uint64_t, RequestId> by_arrival_;
  std::set<std::pair<TimePoint, uint64_t>> expiries_;  // with the arrival number
  std::deque<RequestId> pending_cancels_;
  uint64_t next_arrival_ = 1;
  Metrics metrics_;
};

}  // namespace conclave::rpc
