#include "scheduler/core/admission_queue.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "libs/base/check.h"
#include "scheduler/core/requests.h"

namespace conclave::scheduler {
namespace {

constexpr uint64_t kScale = 1'000;  // so that weights divide with little loss
constexpr double kHalfLifeSeconds = 4;

double seconds(Nanos time) { return static_cast<double>(time) / static_cast<double>(kSecond); }

}  // namespace

void AdmissionQueue::Rate::add(double amount, TimePoint now) {
  if (sum < 1e-3) since = now;
  sum = sum * std::exp2(-seconds(now - at) / kHalfLifeSeconds) + amount;
  at = now;
}

double AdmissionQueue::Rate::per_second(TimePoint now) const {
  if (sum < 1e-3) return 0;
  // A constant rate r that began s seconds ago sums to r * tau * (1 - 2^(-s / half-life)).
  const double tau = kHalfLifeSeconds / std::log(2.0);
  const double age = std::max(seconds(now - since), 0.1);
  return sum * std::exp2(-seconds(now - at) / kHalfLifeSeconds) /
         (tau * (1 - std::exp2(-age / kHalfLifeSeconds)));
}

struct AdmissionQueue::Tenant {
  std::string name;
  uint32_t weight = 1;
  uint32_t live = 0;    // requests with choices that wait or run
  uint64_t served = 0;  // tokens times kScale over weight
  uint64_t unsettled = 0;
  uint32_t waiting = 0;
  uint64_t waiting_tokens = 0;
  Rate rate;
  std::map<int32_t, Queue> queues;  // by priority; none is empty
};

// By name, not by address: equal runs choose alike.
bool AdmissionQueue::ByServed::operator()(const std::pair<uint64_t, Tenant*>& a,
                                          const std::pair<uint64_t, Tenant*>& b) const {
  return a.first != b.first ? a.first < b.first : a.second->name < b.second->name;
}

AdmissionQueue::AdmissionQueue(QueueRules rules) : rules_(std::move(rules)) {}
AdmissionQueue::~AdmissionQueue() = default;

AdmissionQueue::Place AdmissionQueue::due_place(const Choice& choice) const {
  const Request& request = *choice.request;
  const TimePoint due =
      rules_.by_deadline ? std::min(request.deadline, request.accepted_at + rules_.default_due) : 0;
  return {due, request.arrival, choice.index};
}

AdmissionQueue::Place AdmissionQueue::wait_place(const Choice& choice) {
  return {choice.request->accepted_at, choice.request->arrival, choice.index};
}

void AdmissionQueue::push(Choice& choice) {
  const Request& request = *choice.request;
  Tenant& tenant = *request.account;
  ++tenant.waiting;
  tenant.waiting_tokens += request.prompt_tokens();
  ++size_;
  tokens_ += request.prompt_tokens();
  choice.parked = false;
  enter(tenant, choice);
}

void AdmissionQueue::erase(Choice& choice) {
  const Request& request = *choice.request;
  Tenant& tenant = *request.account;
  --tenant.waiting;
  tenant.waiting_tokens -= request.prompt_tokens();
  --size_;
  tokens_ -= request.prompt_tokens();
  if (!std::exchange(choice.parked, false)) leave(tenant, choice);
}

void AdmissionQueue::park(Choice& choice) {
  CONCLAVE_CHECK(!choice.parked);
  choice.parked = true;
  leave(*choice.request->account, choice);
}

void AdmissionQueue::unpark(Choice& choice) {
  CONCLAVE_CHECK(choice.parked);
  choice.parked = false;
  enter(*choice.request->account, choice);
}

void AdmissionQueue::enter(Tenant& tenant, Choice& choice) {
  const int32_t priority = choice.request->accepted.priority;
  const auto [queue, fresh] = tenant.queues.try_emplace(priority);
  if (fresh) ++priorities_[priority];
  CONCLAVE_CHECK(queue->second.by_due.emplace(due_place(choice), &choice).second);
  queue->second.by_wait.emplace(wait_place(choice), &choice);
}

void AdmissionQueue::leave(Tenant& tenant, Choice& choice) {
  const auto queue = tenant.queues.find(choice.request->accepted.priority);
  CONCLAVE_CHECK(queue != tenant.queues.end() && queue->second.by_due.erase(due_place(choice)) == 1);
  queue->second.by_wait.erase(wait_place(choice));
  if (!queue->second.by_due.empty()) return;
  const auto priority = priorities_.find(queue->first);
  if (--priority->second == 0) priorities_.erase(priority);
  tenant.queues.erase(queue);
}

int32_t AdmissionQueue::risen(int32_t priority, TimePoint since, TimePoint now) const {
  if (rules_.band_aging == 0 || now <= since) return priority;
  const int64_t bands = (now - since) / rules_.band_aging;
  const int32_t top = priorities_.empty() ? priority : priorities_.begin()->first;
  return static_cast<int32_t>(std::max<int64_t>(std::min(top, priority), priority - bands));
}

int32_t AdmissionQueue::band(const Choice& choice, TimePoint now) const {
  return risen(choice.request->accepted.priority, choice.request->accepted_at, now);
}

Choice* AdmissionQueue::next(TimePoint now) const {
  Choice* best = nullptr;
  std::tuple<int32_t, uint64_t, Place> best_key;
  for (const auto& [served, tenant] : there_) {
    for (const auto& [priority, queue] : tenant->queues) {
      const auto& [oldest, waiter] = *queue.by_wait.begin();
      const int32_t band = risen(priority, oldest.when, now);
      const auto& [due, urgent] = *queue.by_due.begin();
      Choice* const head = band < priority ? waiter : urgent;
      const std::tuple key(band, rules_.fair ? served : 0, rules_.fair ? Place() : due);
      // Equal counts: who came first.
      if (best == nullptr || key < best_key ||
          (key == best_key && head->request->arrival < best->request->arrival)) {
        best = head;
        best_key = key;
      }
    }
  }
  return best;
}

AdmissionQueue::Tenant* AdmissionQueue::arrive(const std::string& name) {
  std::unique_ptr<Tenant>& slot = tenants_[name];
  if (slot == nullptr) {
    slot = std::make_unique<Tenant>();
    slot->name = name;
    const auto weight = rules_.weights.find(name);
    if (weight != rules_.weights.end()) slot->weight = std::max(1u, weight->second);
  }
  Tenant* const tenant = slot.get();
  if (tenant->live++ > 0) return tenant;
  idle_.erase({tenant->served, tenant});
  if (!there_.empty()) floor_ = std::max(floor_, there_.begin()->first);
  tenant->served = std::max(tenant->served, floor_);
  there_.emplace(tenant->served, tenant);
  return tenant;
}

void AdmissionQueue::depart(Tenant* tenant) {
  CONCLAVE_CHECK(tenant->live > 0);
  if (--tenant->live > 0) return;
  settle();
  there_.erase({tenant->served, tenant});
  floor_ = std::max(floor_, there_.empty() ? tenant->served : there_.begin()->first);
  idle_.emplace(tenant->served, tenant);
  forget_idle();
}

// Who has no more than those who are there loses nothing by being forgotten.
void AdmissionQueue::forget_idle() {
  while (!idle_.empty() && (idle_.begin()->first <= floor_ || idle_.size() > rules_.max_idle_tenants)) {
    Tenant* const tenant = idle_.begin()->second;
    idle_.erase(idle_.begin());
    tenants_.erase(std::string(tenant->name));
  }
}

void AdmissionQueue::charge(Tenant* tenant, uint64_t tokens) {
  CONCLAVE_CHECK(tenant->live > 0);
  if (tenant->unsettled == 0 && tokens > 0) unsettled_.push_back(tenant);
  tenant->unsettled += tokens;
}

void AdmissionQueue::settle() {
  for (Tenant* tenant : unsettled_) {
    auto node = there_.extract({tenant->served, tenant});
    CONCLAVE_CHECK(!node.empty());
    tenant->served += std::exchange(tenant->unsettled, 0) * kScale / tenant->weight;
    node.value().first = tenant->served;
    there_.insert(std::move(node));
  }
  unsettled_.clear();
}

void AdmissionQueue::started(Tenant* tenant, uint64_t prompt_tokens, TimePoint now) {
  tenant->rate.add(static_cast<double>(prompt_tokens), now);
  rate_.add(static_cast<double>(prompt_tokens), now);
}

TenantLoad AdmissionQueue::load(const std::string& name, TimePoint now) const {
  const auto it = tenants_.find(name);
  if (it == tenants_.end()) return {};
  const Tenant& tenant = *it->second;
  return {tenant.waiting, tenant.waiting_tokens, tenant.rate.per_second(now)};
}

TenantLoad AdmissionQueue::load(TimePoint now) const {
  return {static_cast<uint32_t>(size_), tokens_, rate_.per_second(now)};
}

bool AdmissionQueue::holds(const Choice& choice) const {
  if (choice.parked) return true;
  const Tenant& tenant = *choice.request->account;
  const auto queue = tenant.queues.find(choice.request->accepted.priority);
  if (queue == tenant.queues.end()) return false;
  const auto it = queue->second.by_due.find(due_place(choice));
  return it != queue->second.by_due.end() && it->second == &choice;
}

Status AdmissionQueue::audit() const {
  size_t waiting = 0;
  uint64_t tokens = 0;
  size_t live = 0;
  std::map<int32_t, uint32_t> priorities;
  for (const auto& [name, owned] : tenants_) {
    Tenant& tenant = *owned;
    uint32_t queued = 0;
    for (const auto& [priority, queue] : tenant.queues) {
      ++priorities[priority];
      if (queue.by_due.empty() || queue.by_due.size() != queue.by_wait.size()) {
        return internal_error("a tenant's queue is empty or its two orders differ");
      }
      queued += static_cast<uint32_t>(queue.by_due.size());
    }
    if (queued > tenant.waiting) {
      return internal_error("a tenant's waiting choices are miscounted");
    }
    if ((tenant.live > 0 ? there_ : idle_).count({tenant.served, &tenant}) != 1) {
      return internal_error("a tenant is not where its count says");
    }
    live += tenant.live > 0;
    waiting += tenant.waiting;
    tokens += tenant.waiting_tokens;
  }
  if (waiting != size_ || tokens != tokens_) return internal_error("waiting choices are miscounted");
  if (live != there_.size() || live + idle_.size() != tenants_.size()) {
    return internal_error("tenants are miscounted");
  }
  if (idle_.size() > rules_.max_idle_tenants) return internal_error("too many tenants are remembered");
  if (priorities != priorities_) return internal_error("priorities are miscounted");
  return OkStatus();
}

}  // namespace conclave::scheduler
