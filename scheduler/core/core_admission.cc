// Which requests may queue, which of them starts next, and where.
#include <algorithm>
#include <cmath>
#include <string>

#include "libs/base/check.h"
#include "scheduler/core/core.h"

namespace conclave::scheduler {
namespace {

// Choices that no worker's pool can ever hold are passed over; of so many at a time.
constexpr size_t kMaxPassedOver = 256;
constexpr Nanos kLongestRetry = 600 * kSecond;

// Requests share pages only within a tenant and a salt. Lengths keep the parts apart.
std::string prefix_salt(const AcceptedRequest& request) {
  return std::to_string(request.tenant.size()) + ":" + request.tenant + request.cache_salt;
}

// When the work that stands in a queue will have started, at the pace of late; 0: nothing has started lately.
Nanos time_to_start(const TenantLoad& load) {
  if (load.tokens_per_second <= 0) return 0;
  const double seconds = static_cast<double>(load.waiting_tokens) / load.tokens_per_second;
  return std::min(kLongestRetry, static_cast<Nanos>(seconds * static_cast<double>(kSecond)));
}

}  // namespace

Status SchedulerCore::check_capacity(const AcceptedRequest& request) const {
  if (largest_pool_ == 0) return OkStatus();  // no worker yet: nothing is known against it
  const uint64_t positions = static_cast<uint64_t>(request.prompt.size()) + request.sampling.max_tokens;
  const uint32_t blocks = WorkerPlanner::blocks_for(positions);
  if (blocks <= largest_pool_) return OkStatus();
  return invalid_field("max_tokens",
                       "prompt (" + std::to_string(request.prompt.size()) + ") and max_tokens (" +
                           std::to_string(request.sampling.max_tokens) + ") need " + std::to_string(blocks) +
                           " pages of KV cache; the largest worker has " + std::to_string(largest_pool_));
}

Status SchedulerCore::check_queue(const AcceptedRequest& request, TimePoint now) const {
  const TenantLoad all = requests_.queue().load(now);
  const TenantLoad own = requests_.queue().load(request.tenant, now);
  const auto check = [&](const char* name, uint64_t bound, uint64_t waiting, uint64_t tenant_waiting,
                         uint64_t more, const char* what) -> Status {
    const std::string numbers = std::to_string(waiting) + " " + what + " wait, this request has " +
                                std::to_string(more) + ", " + name + " is " + std::to_string(bound);
    if (waiting + more > bound) {
      return with_retry_after(resource_exhausted("the queue is full: " + numbers + "; try again later"),
                              time_to_start(all));
    }
    const uint64_t reserve = bound * options_.queue_reserve_percent / 100;
    const uint64_t below = static_cast<uint64_t>(std::clamp(request.priority, 0, 4));
    uint64_t closed = reserve * below;
    if (tenant_waiting + more > reserve) closed += reserve;
    if (closed == 0 || waiting == 0 || waiting + more + std::min(closed, bound) <= bound) return OkStatus();
    return with_retry_after(
        resource_exhausted("the queue is nearly full: " + numbers + ", of which " + std::to_string(closed) +
                           " are kept for requests of higher priority and tenants with little in it "
                           "(queue_reserve_percent); this tenant has " +
                           std::to_string(tenant_waiting) + "; try again later"),
        time_to_start(own.tokens_per_second > 0 ? own : all));
  };
  RETURN_IF_ERROR(check("max_waiting_requests", options_.max_waiting_requests, all.waiting, own.waiting,
                        request.choices, "requests"));
  return check("max_waiting_tokens", options_.max_waiting_tokens, all.waiting_tokens, own.waiting_tokens,
               request.prompt.size() * request.choices, "prompt tokens");
}

std::pair<const Incarnation, WorkerPlanner>* SchedulerCore::choose_worker(std::span<const TokenId> known,
                                                                          Room room, const PrefixUse& prefix,
                                                                          const std::set<Incarnation>& held) {
  std::pair<const Incarnation, WorkerPlanner>* best = nullptr;
  uint64_t best_cost = 0;
  for (auto& entry : workers_) {
    const WorkerPlanner& worker = entry.second;
    if (held.contains(entry.first) || worker.pool().total() < WorkerPlanner::blocks_for(room.max_positions)) {
      continue;
    }
    const std::optional<uint32_t> cached = worker.fit(known, room, prefix);
    if (!cached) continue;
    const uint64_t cost = known.size() - *cached + uint64_t{worker.running()} * options_.running_cost_tokens;
    if (best == nullptr || cost < best_cost ||
        (cost == best_cost && worker.pool().available() > best->second.pool().available())) {
      best = &entry;
      best_cost = cost;
    }
  }
  return best;
}

void SchedulerCore::admit(TimePoint now) {
  if (requests_.queue().size() == 0 || workers_.empty() || !placement_.active_complete()) return;
  // Who comes first and cannot start now keeps the workers it could run on from all that come after it, so it
  // never starves; who fits no worker's pool holds up nobody.
  std::set<Incarnation> held;
  for (const auto& [incarnation, worker] : workers_) {
    if (!takes_new_work(incarnation)) held.insert(incarnation);
  }
  std::vector<Choice*> passed_over;
  AdmissionQueue& queue = requests_.queue();
  while (held.size() < workers_.size() && requests_.running() < options_.max_running_requests &&
         passed_over.size() < kMaxPassedOver) {
    Choice* const choice = queue.next(now);
    if (choice == nullptr) break;
    Request& request = *choice->request;
    if (!std::exchange(request.checked, true)) {
      if (Status fits = check_model(request); !fits.ok()) {
        end_request(request, FinishReason::kError, message_of(fits));
        continue;
      }
    }
    const auto [ready, like] = sibling_of(*choice);
    if (!ready) {
      requests_.park(*choice);
      continue;
    }
    if (start(*choice, like, held, now)) continue;
    const uint32_t blocks = WorkerPlanner::blocks_for(request.max_positions());
    for (const auto& [incarnation, worker] : workers_) {
      if (worker.pool().total() >= blocks) held.insert(incarnation);
    }
    queue.erase(*choice);
    passed_over.push_back(choice);
  }
  for (Choice* choice : passed_over) queue.push(*choice);
}

// The choices of a request share its prompt: one computes it, the others start when that is done, and go on
// from its pages.
SchedulerCore::Sibling SchedulerCore::sibling_of(const Choice& choice) const {
  if (!options_.prefix_cache || choice.request->choices.size() == 1) return {};
  bool computing = false;
  for (const Choice& other : choice.request->choices) {
    if (&other == &choice) continue;
    if (other.state == ChoiceState::kRunning) {
      const auto worker = workers_.find(other.worker);
      if (worker != workers_.end() && worker->second.past_prefill(other.seq)) return {true, other.seq};
      computing = true;
    } else if (other.state == ChoiceState::kWaiting && other.index < choice.index && !other.parked) {
      computing = true;  // it goes first
    }
  }
  return {!computing, {}};
}

bool SchedulerCore::start(Choice& choice, SeqId like, const std::set<Incarnation>& held, TimePoint now) {
  Request& request = *choice.request;
  if (faults_.replay_prompt_only) choice.generated.clear();
  // A request may wait for many plans: only a replay needs its tokens put together to look for room.
  const std::vector<TokenId>& prompt = request.accepted.prompt;
  std::vector<TokenId> replay;
  if (!choice.generated.empty()) {
    replay = prompt;
    replay.insert(replay.end(), choice.generated.begin(), choice.generated.end());
  }
  const std::vector<TokenId>& known = replay.empty() ? prompt : replay;
  const bool wants_prompt = request.accepted.sampling.prompt_logprobs && choice.index == 0 &&
                            request.prompt_next() < request.prompt_tokens();
  Room room{request.max_positions()};
  if (options_.preemption) {
    const uint64_t reserve = uint64_t{options_.admission_reserve_tokens} << std::min(choice.preemptions, 24u);
    room.reserve_positions = static_cast<uint32_t>(std::min<uint64_t>(reserve, room.max_positions));
  }
  PrefixUse prefix{faults_.share_any_salt ? "" : prefix_salt(request.accepted),
                   !wants_prompt && !request.accepted.sampling.every_expert, like};
  const auto best = choose_worker(known, room, prefix, held);
  if (best == nullptr) return false;
  SequenceStart sequence;
  sequence.seq = SeqId(next_seq_++);
  sequence.request = request.id();
  sequence.choice = choice.index;
  sequence.tokens = known;
  sequence.prompt_tokens = request.prompt_tokens();
  sequence.sampling = request.accepted.sampling;
  sequence.prompt_logprobs_from = request.prompt_next();
  sequence.sampling.prompt_logprobs = wants_prompt;
  const uint32_t tokens = static_cast<uint32_t>(known.size());
  const Rank rank{requests_.queue().band(choice, now), request.arrival, choice.index};
  requests_.set_running(choice, best->first, sequence.seq);
  choice.progress_at = now;
  due_.push_back(best->first);
  const uint32_t cached = best->second.admit(std::move(sequence), room, rank, std::move(prefix), choice);
  counters_.prompt_tokens_admitted += tokens;
  counters_.prompt_tokens_cached += cached;
  // The prompt counts once: its other choices find what the first one left. The wait as well.
  if (!request.cached_tokens) counters_.queue_times.observe(now - request.accepted_at);
  if (!request.cached_tokens) request.cached_tokens = std::min(cached, request.prompt_tokens());
  requests_.queue().started(request.account, request.prompt_tokens(), now);
  if (request.timeline != nullptr) {
    const Member* const worker = members_.find(best->first);
    mark(request, TimelineMarkKind::kStarted, choice.index,
         "on " + (worker == nullptr ? "" : worker->hello.name) + ", " + std::to_string(cached) + " of " +
             std::to_string(tokens) + " tokens cached");
  }
  // What is computed again, for want of pages or of a worker, is not the tenant's doing.
  if (!std::exchange(choice.started, true)) {
    const uint64_t weight = faults_.starve_tenant && request.accepted.tenant == "modest" ? 100 : 1;
    requests_.queue().charge(request.account, weight * (tokens - cached));
    requests_.queue().settle();
  }
  return true;
}

}  // namespace conclave::scheduler
