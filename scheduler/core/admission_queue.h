// Who starts next: the waiting choices, in bands of priority, fair between tenants, by deadline within one.
//
// Band: the request's priority, one up (a lower number) for every band_aging_ms it has waited, but never
// above the most urgent band that anybody asked for: aging lifts a request among those who came before it by
// rank, not over its equals. Within a band the tenant goes first whose weighted count of tokens served is
// least (the counter of "Fairness in Serving Large Language Models", Sheng et al., OSDI 2024: a tenant that
// returns starts at the least count of those who are there, so idling earns nothing). Within a tenant's queue
// the request goes first that is due first; one that rose goes before.
//
// A look at the next one costs as many steps as there are (tenant, priority) pairs that wait; changes are
// logarithmic.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"

namespace conclave::scheduler {

struct Choice;

struct QueueRules {
  Nanos band_aging = 0;     // 0: nobody rises
  bool fair = true;         // false: tenants do not matter
  bool by_deadline = true;  // false: by arrival
  Nanos default_due = 0;    // a request is due at its deadline, and at most so long after its arrival
  std::map<std::string, uint32_t> weights;  // of tenants; 1 for those not named
  uint32_t max_idle_tenants = 1024;         // whose counts are remembered
};

// What waits of a tenant, for shares and estimates.
struct TenantLoad {
  uint32_t waiting = 0;          // choices
  uint64_t waiting_tokens = 0;   // their prompts
  double tokens_per_second = 0;  // prompts of the choices that started lately; 0: none did
};

class AdmissionQueue {
 public:
  explicit AdmissionQueue(QueueRules rules);
  ~AdmissionQueue();

  void push(Choice& choice);
  // A choice that is in the queue.
  void erase(Choice& choice);
  // A choice that is in the queue waits for something else than room, and is passed over until unpark().
  void park(Choice& choice);
  void unpark(Choice& choice);
  // Null when nothing waits.
  Choice* next(TimePoint now) const;

  // A tenant is there while it has choices that wait or run; its account stays where it is so long.
  struct Tenant;
  Tenant* arrive(const std::string& tenant);
  void depart(Tenant* tenant);
  // Tokens computed or sampled for a tenant that is there. They count from settle() on.
  void charge(Tenant* tenant, uint64_t tokens);
  void settle();
  // A waiting choice with such a prompt started.
  void started(Tenant* tenant, uint64_t prompt_tokens, TimePoint now);

  size_t size() const { return size_; }
  uint64_t tokens() const { return tokens_; }  // prompts, once for each waiting choice
  TenantLoad load(const std::string& tenant, TimePoint now) const;
  // Of all tenants together.
  TenantLoad load(TimePoint now) const;
  // The band a waiting choice is in now.
  int32_t band(const Choice& choice, TimePoint now) const;
  bool holds(const Choice& choice) const;
  size_t tenants() const { return tenants_.size(); }
  Status audit() const;

 private:
  struct Place {
    TimePoint when = 0;  // due, or waiting since
    uint64_t arrival = 0;
    uint32_t choice = 0;
    auto operator<=>(const Place&) const = default;
  };
  // Of one tenant and priority.
  struct Queue {
    std::map<Place, Choice*> by_due;
    std::map<Place, Choice*> by_wait;
  };
  // Starts of late: a sum that halves every kHalfLife.
  struct Rate {
    double sum = 0;
    TimePoint at = 0;
    TimePoint since = 0;  // of the first start after a pause
    void add(double amount, TimePoint now);
    double per_second(TimePoint now) const;
  };

  struct ByServed {
    bool operator()(const std::pair<uint64_t, Tenant*>& a, const std::pair<uint64_t, Tenant*>& b) const;
  };

  void enter(Tenant& tenant, Choice& choice);
  void leave(Tenant& tenant, Choice& choice);
  Place due_place(const Choice& choice) const;
  static Place wait_place(const Choice& choice);
  int32_t risen(int32_t priority, TimePoint since, TimePoint now) const;
  void forget_idle();

  const QueueRules rules_;
  std::vector<Tenant*> unsettled_;
  std::unordered_map<std::string, std::unique_ptr<Tenant>> tenants_;
  std::map<int32_t, uint32_t> priorities_;  // queues by priority: the first is the most urgent
  std::set<std::pair<uint64_t, Tenant*>, ByServed> there_;  // live tenants by what they were served
  std::set<std::pair<uint64_t, Tenant*>, ByServed> idle_;   // remembered ones
  uint64_t floor_ = 0;  // the least count of those who are there, or were last
  size_t size_ = 0;
  uint64_t tokens_ = 0;
  Rate rate_;
};

}  // namespace conclave::scheduler
