// Who belongs to the fleet: hello checks, incarnations and their fences, leases, suspicion.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/model/membership.h"
#include "scheduler/core/events.h"
#include "scheduler/core/options.h"

namespace conclave::scheduler {

// What every member of this fleet agrees on; taken from the first and kept for the life of the scheduler.
struct FleetModel {
  std::string numerics_id;
  std::string model_fingerprint;
  uint32_t num_layers = 0;
  uint32_t num_experts = 0;
  uint32_t max_positions = 0;
  uint32_t vocab_size = 0;
};

struct Member {
  SessionId session;
  Hello hello;
  TimePoint joined = 0;
  TimePoint last_heard = 0;
  bool suspect = false;
  bool suspicion_told = false;   // it is in the list of events
  bool draining = false;         // gets nothing new; for the rest of its membership
  bool drained = false;          // and has been told that nothing is left
  Epoch epoch_in_use;            // from heartbeats
  uint32_t loaded_permille = 0;  // the same
  uint32_t held_experts = 0;     // the same
  bool met = false;              // some other member knew the secret for a connection with it
  // Complaints of workers about a shard since trouble_since; 0: none.
  uint32_t troubles = 0;
  TimePoint trouble_since = 0;
  TimePoint last_trouble = 0;
  std::string trouble;
};

struct DeadMember {
  SessionId session;
  Status cause;
};

class Membership {
 public:
  explicit Membership(const SchedulerOptions& options) : options_(options) {}

  // Whether a member with this hello may join now. FAILED_PRECONDITION: never under this incarnation;
  // RESOURCE_EXHAUSTED: too many members; INVALID_ARGUMENT names the field.
  Status check(const Hello& hello) const;
  // The same for a gateway: protocol, and model fields where it gives any.
  Status check_gateway(const Hello& hello) const;
  // Marks who has met whom, and lists those who joined knowing no secret of any peer, once others have met: nobody could say
  // before who is wrong. Who has met stays, whatever is changed then: its connections do.
  std::vector<DeadMember> strangers();
  // Has no peer that it can connect with, though there are peers.
  bool alone(const Hello& hello) const;
  // After check(). The reference holds until the member is removed.
  Member& add(SessionId session, Hello hello, TimePoint now);
  // Fences the incarnation for ever.
  void remove(SessionId session);

  Member* find(SessionId session);
  Member* find(Incarnation incarnation);
  const std::map<SessionId, Member>& all() const { return members_; }
  std::map<SessionId, Member>& members() { return members_; }
  const std::optional<FleetModel>& model() const { return model_; }
  bool fenced(Incarnation incarnation) const;

  // Any message renews the lease and lifts suspicion.
  void heard(Member& member, TimePoint now);
  void trouble(Member& shard, const std::string& cause, TimePoint now);
  // Moves every lease by a time in which the scheduler itself did not run.
  void extend_leases(Nanos by);
  // Marks suspects (returning how many are new) and lists the dead, who stay until they are removed.
  uint32_t check_leases(TimePoint now, std::vector<DeadMember>& dead);
  // When check_leases is due at the latest: not later than needed, at times earlier.
  TimePoint next_timer() const;
  // FleetInfo::loaded_permille.
  uint32_t loaded_permille() const;
  size_t fence_size() const { return fenced_.size(); }

 private:
  TimePoint dead_at(const Member& member) const;
  bool data_plane_dead(const Member& member) const;
  Status check_secret(const Hello& hello) const;
  bool has_peer(const Hello& hello) const;

  const SchedulerOptions& options_;
  std::map<SessionId, Member> members_;
  std::map<Incarnation, SessionId> by_incarnation_;
  std::optional<FleetModel> model_;
  std::set<Incarnation> fenced_;
  // A lower bound of what next_timer finds; who is heard only moves it. 0: to be found again.
  mutable TimePoint next_timer_ = 0;
  Incarnation fence_floor_;  // everything up to here is fenced unless it is a member
};

}  // namespace conclave::scheduler
