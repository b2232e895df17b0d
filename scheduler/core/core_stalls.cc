// Requests that make no progress: which, since when, and what they wait for.
#include <algorithm>
#include <string>
#include <utility>

#include "libs/base/id_text.h"
#include "scheduler/core/core.h"

namespace conclave::scheduler {
namespace {

// Looks at all requests within one stall_report_ms.
constexpr Nanos kLooks = 4;
// Of one look; the counters have them all.
constexpr size_t kMaxReports = 32;

}  // namespace

void SchedulerCore::plan_look_for_stalls(TimePoint now) {
  if (options_.stall_report_ms == 0) return;
  if (requests_.size() == 0) {
    next_stall_look_ = kNever;
    counters_.requests_stalled = {};
  } else if (next_stall_look_ == kNever) {
    next_stall_look_ = now + std::max<Nanos>(options_.stall_report_ms * kMillisecond / kLooks, 1);
  }
}

void SchedulerCore::forgive_stalls(Nanos late) {
  for (Request* request : requests_.all()) {
    for (Choice& choice : request->choices) choice.progress_at += late;
  }
  for (auto& [worker, when] : retired_at_) when += late;
}

void SchedulerCore::look_for_stalls(TimePoint now) {
  if (now < next_stall_look_) return;
  next_stall_look_ = kNever;
  const Nanos limit = options_.stall_report_ms * kMillisecond;
  const Choice* const head = requests_.queue().next(now);
  counters_.requests_stalled = {};
  size_t reports = 0;
  for (Request* request : requests_.all()) {
    if (request->ended()) continue;
    // As far as the choice that is best off.
    std::optional<Stall> stall;
    for (const Choice& choice : request->choices) {
      if (choice.state == ChoiceState::kEnded) continue;
      Stall one = stall_of(choice, head, now);
      if (!stall || one.time < stall->time) stall = std::move(one);
    }
    if (!stall || stall->time < limit) {
      request->stalled_at.reset();
      continue;
    }
    ++counters_.requests_stalled[static_cast<size_t>(stall->hop)];
    if (request->stalled_at == stall->hop) continue;
    request->stalled_at = stall->hop;
    if (request->timeline != nullptr) {
      mark(*request, TimelineMarkKind::kStalled, 0,
           std::string(stall_hop_name(stall->hop)) + (stall->detail.empty() ? "" : ": " + stall->detail));
    }
    ++counters_.stalls_reported[static_cast<size_t>(stall->hop)];
    if (++reports > kMaxReports) continue;
    std::string what = "no progress, hop " + std::string(stall_hop_name(stall->hop));
    if (!stall->detail.empty()) what += ": " + stall->detail;
    events_.add("stall", id_text(request->id()), what, now);
    emit(ReportStall{request->id(), stall->hop, std::move(stall->detail), stall->time});
  }
}

// Once for each time a lease was not renewed.
void SchedulerCore::tell_suspicions(TimePoint now) {
  for (auto& [session, member] : members_.members()) {
    if (!member.suspect || std::exchange(member.suspicion_told, true)) continue;
    events_.add("suspect", member.hello.name, "did not renew its lease; it gets no new work", now);
  }
}

SchedulerCore::Stall SchedulerCore::stall_of(const Choice& choice, const Choice* head, TimePoint now) const {
  Stall stall;
  TimePoint progress = choice.progress_at;
  const auto worker = choice.state == ChoiceState::kRunning ? workers_.find(choice.worker) : workers_.end();
  const bool runs = worker != workers_.end();
  // A prompt has nothing to show until it is computed; its worker's steps count.
  if (runs && !worker->second.past_prefill(choice.seq)) {
    const auto retired = retired_at_.find(choice.worker);
    if (retired != retired_at_.end()) progress = std::max(progress, retired->second);
  }
  stall.time = now - progress;
  if (workers_.empty()) {
    stall.hop = StallHop::kNoWorker;
  } else if (!placement_.active_complete()) {
    stall.hop = StallHop::kPlacement;
    stall.detail = fleet_.not_ready;
  } else if (!runs) {
    const auto& all = members_.all();
    const bool taken = std::any_of(all.begin(), all.end(), [](const auto& entry) {
      const Member& member = entry.second;
      return member.hello.role == Role::kAttention && !member.suspect && !member.draining;
    });
    stall.hop = !taken ? StallHop::kNoWorker : &choice == head ? StallHop::kRoom : StallHop::kTurn;
  } else if (worker->second.owing_since() == kNever) {
    stall.hop = StallHop::kTurn;
  } else {
    stall.hop = StallHop::kWorker;
    for (const auto& [session, member] : members_.all()) {
      if (member.hello.role == Role::kAttention && member.hello.incarnation == choice.worker &&
          stall.detail.empty())
        stall.detail = member.hello.name;
      const bool troubled = member.troubles > 0 && now - member.last_trouble <= stall.time;
      if (member.hello.role != Role::kExpert || !(member.suspect || troubled)) continue;
      if (stall.hop == StallHop::kShard) {
        stall.detail += ", " + member.hello.name;
      } else {
        stall.hop = StallHop::kShard;
        stall.detail = member.hello.name;
      }
    }
  }
  return stall;
}

}  // namespace conclave::scheduler
