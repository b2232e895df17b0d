// Requests: submission, admission, results, ends. Members are in core_members.cc.
#include "scheduler/core/core.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "libs/base/check.h"

namespace conclave::scheduler {
namespace {

Status check_tokens(std::string_view field, const std::vector<TokenId>& tokens, uint32_t vocab_size) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= vocab_size) {
      return invalid_field(field, "token " + std::to_string(tokens[i]) + " at " + std::to_string(i) +
                                      " is not below the vocabulary's size, " + std::to_string(vocab_size));
    }
  }
  return OkStatus();
}

// What is wrong with a request whatever the model.
Status check_shape(const AcceptedRequest& request) {
  const SamplingParams& sampling = request.sampling;
  if (request.prompt.empty()) return invalid_field("prompt", "is empty");
  if (request.choices != 1) return invalid_field("n", "only 1 choice is supported");
  if (sampling.max_tokens == 0) return invalid_field("max_tokens", "must be at least 1");
  if (!std::isfinite(sampling.temperature) || sampling.temperature < 0) {
    return invalid_field("temperature", "must be a number of 0 or more");
  }
  if (!std::isfinite(sampling.top_p)) return invalid_field("top_p", "must be a number");
  if (!std::isfinite(sampling.min_p)) return invalid_field("min_p", "must be a number");
  if (request.delivered.size() > sampling.max_tokens) {
    return invalid_field("delivered", "has " + std::to_string(request.delivered.size()) +
                                          " tokens, more than max_tokens, " +
                                          std::to_string(sampling.max_tokens));
  }
  return OkStatus();
}

Status check_model(const AcceptedRequest& request, const FleetModel& model) {
  const uint64_t positions = static_cast<uint64_t>(request.prompt.size()) + request.sampling.max_tokens;
  if (request.prompt.size() >= model.max_positions) {
    return invalid_field("prompt", "has " + std::to_string(request.prompt.size()) +
                                       " tokens; with at least one more it "
                                       "exceeds the model's context of " +
                                       std::to_string(model.max_positions));
  }
  if (positions > model.max_positions) {
    return invalid_field(
        "max_tokens", "prompt (" + std::to_string(request.prompt.size()) + ") and max_tokens (" +
                          std::to_string(request.sampling.max_tokens) +
                          ") together exceed the model's context of " + std::to_string(model.max_positions));
  }
  RETURN_IF_ERROR(check_tokens("prompt", request.prompt, model.vocab_size));
  return check_tokens("delivered", request.delivered, model.vocab_size);
}

// A replayed request may have everything already: all its tokens, or a stop token as the last one.
FinishReason finish_of_delivered(const Request& request) {
  const SamplingParams& sampling = request.accepted.sampling;
  const size_t count = request.generated.size();
  if (count > 0 && !sampling.ignore_eos && count > sampling.min_tokens &&
      std::find(sampling.stop_token_ids.begin(), sampling.stop_token_ids.end(), request.generated.back()) !=
          sampling.stop_token_ids.end()) {
    return FinishReason::kStop;
  }
  return count >= sampling.max_tokens ? FinishReason::kLength : FinishReason::kNone;
}

// Requests share pages only within a tenant and a salt. Lengths keep the parts apart.
std::string prefix_salt(const AcceptedRequest& request) {
  return std::to_string(request.tenant.size()) + ":" + request.tenant + request.cache_salt;
}

}  // namespace

SchedulerCore::SchedulerCore(const SchedulerOptions& options, PlantedFaults faults)
    : options_(options), faults_(faults), members_(options_), placement_(options_) {
  CONCLAVE_CHECK(options_.validate().ok());
  update_fleet();
}

Actions SchedulerCore::on_event(Event event, TimePoint now) {
  CONCLAVE_CHECK(now >= last_now_);
  forgive_own_stall(now);
  last_now_ = now;
  std::visit([&](auto& e) { handle(e, now); }, event);
  publish_placements(now);
  update_fleet();
  return std::move(actions_);
}

Actions SchedulerCore::plan(TimePoint now) {
  CONCLAVE_CHECK(now >= last_now_);
  last_now_ = now;
  admit();
  for (auto& [incarnation, worker] : workers_) {
    while (auto step = plan_step(incarnation, now)) {
      emit(SendMember{members_.find(incarnation)->session, std::move(*step)});
    }
  }
  update_fleet();
  timer_due_ = next_timer();
  return std::move(actions_);
}

std::optional<BatchPlan> SchedulerCore::plan_step(Incarnation incarnation, TimePoint now) {
  const auto it = workers_.find(incarnation);
  if (it == workers_.end()) return std::nullopt;
  // Without a home for every expert a step could not complete; a suspect gets no new work. Ends may always
  // go.
  const bool ends_only = members_.find(incarnation)->suspect || !placement_.active_complete();
  auto step = it->second.plan(ends_only, now);
  if (step) {
    ++counters_.steps_planned;
    counters_.prefill_tokens += it->second.last_plan().prefill_tokens;
    counters_.decode_slices += it->second.last_plan().decode_slices;
  }
  return step;
}

TimePoint SchedulerCore::next_timer() const {
  TimePoint next = std::min({members_.next_timer(), placement_.next_timer(), requests_.next_timer()});
  if (!placement_.active_complete()) return next;
  for (const auto& [incarnation, worker] : workers_) {
    if (worker.owing_since() != kNever) {
      next = std::min(next, worker.owing_since() + options_.step_timeout_ms * kMillisecond);
    }
  }
  return next;
}

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

void SchedulerCore::handle(Submit& event, TimePoint now) {
  if (!gateways_.contains(event.gateway)) return;
  const RequestId id = event.request.id;
  const auto refuse = [&](uint64_t& counter, const Status& status) {
    ++counter;
    emit(ReplySubmit{event.gateway, id, status});
  };
  if (Status shape = check_shape(event.request); !shape.ok()) {
    return refuse(counters_.requests_refused_invalid, shape);
  }
  if (Request* known = requests_.find(id)) return reattach(*known, event);

  const auto& model = members_.model();
  if (model) {
    if (Status fits = check_model(event.request, *model); !fits.ok()) {
      return refuse(counters_.requests_refused_invalid, fits);
    }
  }
  // What a scheduler acknowledged before is never shed (design rule 2).
  if (!event.request.resubmitted) {
    if (!model) {
      return refuse(counters_.requests_refused_unready,
                    unavailable("the cluster is not ready: " + fleet_.not_ready));
    }
    if (Status fits = check_capacity(event.request); !fits.ok()) {
      return refuse(counters_.requests_refused_invalid, fits);
    }
    if (requests_.waiting().size() >= options_.max_waiting_requests) {
      return refuse(counters_.requests_refused_full,
                    resource_exhausted("the queue is full: " + std::to_string(options_.max_waiting_requests) +
                                       " requests wait (max_waiting_requests); try again later"));
    }
    if (requests_.waiting_tokens() + event.request.prompt.size() > options_.max_waiting_tokens) {
      return refuse(
          counters_.requests_refused_full,
          resource_exhausted("the queue is full: its requests have " +
                             std::to_string(requests_.waiting_tokens()) + " prompt tokens, this one " +
                             std::to_string(event.request.prompt.size()) + ", max_waiting_tokens is " +
                             std::to_string(options_.max_waiting_tokens) + "; try again later"));
    }
  }
  ++counters_.requests_accepted;
  Request& request = requests_.add(std::move(event.request), event.gateway, now);
  request.checked = model.has_value();
  emit(ReplySubmit{event.gateway, id, OkStatus()});
  if (const FinishReason finish = finish_of_delivered(request); finish != FinishReason::kNone) {
    end_request(request, finish, "");
  } else if (request.deadline <= now) {
    end_request(request, FinishReason::kDeadline, "the deadline had passed on arrival");
  }
}

void SchedulerCore::reattach(Request& request, Submit& event) {
  if (request.accepted.prompt != event.request.prompt ||
      request.accepted.sampling.max_tokens != event.request.sampling.max_tokens ||
      request.accepted.sampling.seed != event.request.sampling.seed) {
    ++counters_.requests_refused_invalid;
    emit(ReplySubmit{event.gateway, request.id(), invalid_field("id", "another request has this id")});
    return;
  }
  ++counters_.requests_reattached;
  requests_.attach(request, event.gateway);
  const std::vector<TokenId>& delivered = event.request.delivered;
  request.sent = static_cast<uint32_t>(delivered.size());
  emit(ReplySubmit{event.gateway, request.id(), OkStatus()});
  const size_t common = std::min(delivered.size(), request.generated.size());
  if (request.state != RequestState::kEnded &&
      !std::equal(delivered.begin(), delivered.begin() + static_cast<ptrdiff_t>(common),
                  request.generated.begin())) {
    return end_request(
        request, FinishReason::kError,
        "the tokens delivered before differ from those generated here: two numerics were mixed");
  }
  flush(request);
}

void SchedulerCore::handle(Cancel& event, TimePoint) {
  Request* request = requests_.find(event.request);
  if (request == nullptr || request->state == RequestState::kEnded) return;
  const auto gateway = request->gateway;
  end_request(*request, FinishReason::kCancelled, "");
  if (faults_.end_twice && gateway) {
    TokenEvent again;
    again.request = event.request;
    again.finish = FinishReason::kCancelled;
    emit(SendTokens{gateway, again});
  }
}

std::pair<const Incarnation, WorkerPlanner>* SchedulerCore::choose_worker(std::span<const TokenId> known,
                                                                          uint32_t max_positions,
                                                                          const PrefixUse& prefix,
                                                                          const std::set<Incarnation>& held) {
  std::pair<const Incarnation, WorkerPlanner>* best = nullptr;
  uint64_t best_cost = 0;
  for (auto& entry : workers_) {
    const WorkerPlanner& worker = entry.second;
    if (held.contains(entry.first)) continue;
    const std::optional<uint32_t> cached = worker.fit(known, max_positions, prefix);
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

void SchedulerCore::admit() {
  if (workers_.empty() || !placement_.active_complete()) return;
  // First come, first served, per worker: who cannot start now keeps the workers it could run on from all
  // that came later, so it never starves; who fits no worker's pool holds up nobody.
  std::set<Incarnation> held;
  for (const auto& [incarnation, worker] : workers_) {
    if (members_.find(incarnation)->suspect) held.insert(incarnation);
  }
  for (auto it = requests_.waiting().begin(); it != requests_.waiting().end();) {
    if (held.size() == workers_.size() || requests_.running() >= options_.max_running_requests) return;
    Request& request = *it->second;
    ++it;  // admission takes the request out of the queue
    if (!request.checked) {
      request.checked = true;
      if (Status fits = check_model(request.accepted, *members_.model()); !fits.ok()) {
        end_request(request, FinishReason::kError, message_of(fits));
        continue;
      }
    }
    std::vector<TokenId> known = request.accepted.prompt;
    if (faults_.replay_prompt_only) {
      request.generated.clear();
    }
    known.insert(known.end(), request.generated.begin(), request.generated.end());
    const uint32_t blocks = WorkerPlanner::blocks_for(request.max_positions());
    const PrefixUse prefix{faults_.share_any_salt ? "" : prefix_salt(request.accepted),
                           !request.accepted.sampling.prompt_logprobs};
    const auto best = choose_worker(known, request.max_positions(), prefix, held);
    if (best == nullptr) {
      for (const auto& [incarnation, worker] : workers_) {
        if (worker.pool().total() >= blocks) held.insert(incarnation);
      }
      continue;
    }
    SequenceStart start;
    start.seq = SeqId(next_seq_++);
    start.request = request.id();
    start.tokens = std::move(known);
    start.prompt_tokens = request.prompt_tokens();
    start.sampling = request.accepted.sampling;
    requests_.set_running(request, best->first, start.seq);
    counters_.prompt_tokens_admitted += start.tokens.size();
    counters_.prompt_tokens_cached += best->second.admit(std::move(start), request.max_positions(), prefix);
  }
}

void SchedulerCore::on_step_result(Member& member, StepResult& result, TimePoint now) {
  WorkerPlanner& worker = workers_.at(member.hello.incarnation);
  StatusOr<StepOutcome> outcome = worker.on_result(result, now);
  if (!outcome.ok()) {
    ++counters_.protocol_violations;
    lose_member(member.session, annotate(outcome.status(), member.hello.name + " broke the protocol"), true,
                now);
    return;
  }
  ++counters_.steps_retired;
  counters_.step_compute_ns += static_cast<uint64_t>(std::max<Nanos>(0, result.compute_ns));
  counters_.step_expert_wait_ns += static_cast<uint64_t>(std::max<Nanos>(0, result.expert_wait_ns));
  counters_.tokens_discarded += outcome->discarded;
  counters_.tokens_sampled += outcome->sampled.size();
  for (const SampledToken& token : outcome->sampled) {
    Request* request = requests_.find(token.seq);
    CONCLAVE_CHECK(request != nullptr);  // a sequence that has not ended has its request
    requests_.append(*request, token);
    if (token.finish != FinishReason::kNone) {
      end_request(*request, token.finish, "");
    } else {
      flush(*request);
    }
  }
  for (const StepResult::Failure& failure : outcome->failures) {
    Request* request = requests_.find(failure.seq);
    // A sequence may be reported both with its last token and as failed.
    if (request != nullptr) end_request(*request, FinishReason::kError, failure.cause);
  }
}

void SchedulerCore::end_request(Request& request, FinishReason reason, std::string error) {
  switch (reason) {
    case FinishReason::kStop:
      ++counters_.requests_finished_stop;
      break;
    case FinishReason::kLength:
      ++counters_.requests_finished_length;
      break;
    case FinishReason::kCancelled:
      ++counters_.requests_cancelled;
      break;
    case FinishReason::kDeadline:
      ++counters_.requests_deadline;
      break;
    case FinishReason::kError:
    case FinishReason::kNone:
      ++counters_.requests_failed;
      break;
  }
  if (request.state == RequestState::kRunning) {
    const auto worker = workers_.find(request.worker);
    CONCLAVE_CHECK(worker != workers_.end() || faults_.forget_lost_worker);
    if (worker != workers_.end()) worker->second.end(request.seq);
  }
  requests_.set_ended(request, reason, std::move(error));
  flush(request);
}

void SchedulerCore::flush(Request& request) {
  if (!request.gateway) return;
  const bool ended = request.state == RequestState::kEnded;
  const uint32_t count = static_cast<uint32_t>(request.generated.size());
  const uint32_t from = std::min(request.sent, count);
  if (from == count && !ended) return;
  TokenEvent event;
  event.request = request.id();
  event.index = from;
  event.tokens.assign(request.generated.begin() + from, request.generated.end());
  if (request.accepted.sampling.logprobs) {
    event.logprobs.assign(request.logprobs.begin() + from, request.logprobs.end());
    event.top_logprobs.assign(request.top_logprobs.begin() + from, request.top_logprobs.end());
  }
  event.finish = request.finish;
  event.error = request.error;
  request.sent = std::max(request.sent, count);
  emit(SendTokens{request.gateway, std::move(event)});
  if (ended) requests_.erase(request);
}

}  // namespace conclave::scheduler
