// Requests: submission and results. Admission is in core_admission.cc, ends and what is sent in core_send.cc,
// members in core_members.cc.
#include "scheduler/core/core.h"

#include <algorithm>
#include <iterator>
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
  if (request.choices < 1 || request.choices > kMaxChoices) {
    return invalid_field("n", "must be from 1 to " + std::to_string(kMaxChoices));
  }
  RETURN_IF_ERROR(validate(sampling));
  if (request.delivered.size() > request.choices) {
    return invalid_field("delivered", "has more choices than n");
  }
  for (const DeliveredChoice& choice : request.delivered) {
    if (choice.tokens.size() > sampling.max_tokens) {
      return invalid_field("delivered", "has " + std::to_string(choice.tokens.size()) +
                                            " tokens, more than max_tokens, " +
                                            std::to_string(sampling.max_tokens));
    }
  }
  if (request.prompt_logprobs_delivered >= request.prompt.size()) {
    return invalid_field("prompt_logprobs_delivered", "is more than the prompt has");
  }
  if (request.cache_salt.size() > kMaxCacheSaltBytes) {
    return invalid_field("cache_salt", "is longer than " + std::to_string(kMaxCacheSaltBytes) + " bytes");
  }
  return OkStatus();
}

Status fits_model(const AcceptedRequest& request, const FleetModel& model) {
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
  RETURN_IF_ERROR(validate(request.sampling, model.vocab_size));
  for (const DeliveredChoice& choice : request.delivered) {
    RETURN_IF_ERROR(check_tokens("delivered", choice.tokens, model.vocab_size));
  }
  return OkStatus();
}

// A replayed choice may have everything already: all its tokens, or a stop token as the last one.
FinishReason finish_of_delivered(const Choice& choice) {
  const SamplingParams& sampling = choice.request->accepted.sampling;
  const size_t count = choice.generated.size();
  if (count > 0 && count > sampling.min_tokens &&
      std::find(sampling.stop_token_ids.begin(), sampling.stop_token_ids.end(), choice.generated.back()) !=
          sampling.stop_token_ids.end()) {
    return FinishReason::kStop;
  }
  return count >= sampling.max_tokens ? FinishReason::kLength : FinishReason::kNone;
}

QueueRules queue_rules(const SchedulerOptions& options) {
  QueueRules rules;
  rules.band_aging = options.band_aging_ms * kMillisecond;
  rules.fair = options.fair_tenants;
  rules.by_deadline = options.deadline_order;
  rules.default_due = options.default_due_ms * kMillisecond;
  rules.weights = options.tenant_weights;
  rules.max_idle_tenants = options.max_idle_tenants;
  return rules;
}

}  // namespace

SchedulerCore::SchedulerCore(const SchedulerOptions& options, PlantedFaults faults)
    : options_(options),
      faults_(faults),
      members_(options_),
      placement_(options_),
      requests_(queue_rules(options_)),
      timelines_({options_.max_timelines, options_.max_timeline_steps}) {
  CONCLAVE_CHECK(options_.validate().ok());
  update_fleet();
}

Actions SchedulerCore::on_event(Event event, TimePoint now) {
  CONCLAVE_CHECK(now >= last_now_);
  forgive_own_stall(now);
  last_now_ = now;
  std::visit([&](auto& e) { handle(e, now); }, event);
  trim_kept();
  publish_placements(now);
  if (all_due_) update_fleet();
  return std::move(actions_);
}

Actions SchedulerCore::plan(TimePoint now) {
  CONCLAVE_CHECK(now >= last_now_);
  last_now_ = now;
  advance_drains(now);
  admit(now);
  if (std::exchange(all_due_, false)) {
    for (const auto& [incarnation, worker] : workers_) due_.push_back(incarnation);
  }
  std::sort(due_.begin(), due_.end());
  due_.erase(std::unique(due_.begin(), due_.end()), due_.end());
  for (const Incarnation incarnation : due_) {
    if (const auto worker = workers_.find(incarnation); worker != workers_.end()) {
      const Member& member = *members_.find(incarnation);
      while (auto step = plan_worker(worker->second, member, now)) {
        emit(SendMember{member.session, std::move(*step)});
      }
    }
    show_pool(incarnation);
  }
  due_.clear();
  // A lower bound is enough for a timer, and it stays one: a worker's date only moves forward.
  if (owing_floor_ == kNever || now - owing_floor_ > options_.step_timeout_ms * kMillisecond / 4) {
    owing_floor_ = kNever;
    for (const auto& [incarnation, worker] : workers_) {
      owing_floor_ = std::min(owing_floor_, worker.owing_since());
    }
  }
  plan_look_for_stalls(now);
  timer_due_ = next_timer();
  return std::move(actions_);
}

std::optional<BatchPlan> SchedulerCore::plan_worker(WorkerPlanner& worker, const Member& member,
                                                    TimePoint now) {
  // Without a home for every expert a step could not complete; a suspect gets no new work. Ends may always
  // go.
  const bool ends_only = member.suspect || !placement_.active_complete();
  auto step = worker.plan(ends_only, now);
  for (const SeqId id : worker.take_preempted()) {
    Choice* choice = requests_.find(id);
    ++choice->preemptions;
    ++counters_.sequences_preempted;
    events_.add("preempted", member.hello.name, "a sequence gave its pages to a more important one", now);
    mark(*choice->request, TimelineMarkKind::kPreempted, choice->index);
    requests_.set_waiting(*choice);
  }
  if (step) {
    ++counters_.steps_planned;
    counters_.prefill_tokens += worker.last_plan().prefill_tokens;
    counters_.decode_slices += worker.last_plan().decode_slices;
  }
  return step;
}

TimePoint SchedulerCore::next_timer() const {
  TimePoint next =
      std::min({members_.next_timer(), placement_.next_timer(), requests_.next_timer(), next_stall_look_});
  if (!placement_.active_complete() || owing_floor_ == kNever) return next;
  return std::min(next, owing_floor_ + options_.step_timeout_ms * kMillisecond);
}

Status SchedulerCore::check_model(const Request& request) const {
  return fits_model(request.accepted, *members_.model());
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
    if (Status fits = fits_model(event.request, *model); !fits.ok()) {
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
    if (Status room = check_queue(event.request, now); !room.ok()) {
      return refuse(counters_.requests_refused_full, room);
    }
    const uint64_t values = Request::prompt_logprob_values(event.request);
    if (values > options_.max_prompt_logprob_values) {
      return refuse(counters_.requests_refused_invalid,
                    invalid_field("prompt_logprobs", "needs " + std::to_string(values) +
                                                         " numbers; max_prompt_logprob_values is " +
                                                         std::to_string(options_.max_prompt_logprob_values)));
    }
    if (requests_.prompt_values() + values > options_.max_prompt_logprob_values) {
      return refuse(
          counters_.requests_refused_full,
          resource_exhausted("open requests hold " + std::to_string(requests_.prompt_values()) +
                             " prompt log-probabilities, this one needs " + std::to_string(values) +
                             ", max_prompt_logprob_values is " +
                             std::to_string(options_.max_prompt_logprob_values) + "; try again later"));
    }
  }
  ++counters_.requests_accepted;
  bound_context(event.request);
  const bool incomplete = misses_logprobs(event.request);
  Request& request = requests_.add(std::move(event.request), event.gateway, now);
  request.checked = model.has_value();
  request.holder = gateways_.at(event.gateway).hello.incarnation;
  request.incomplete = incomplete;
  if (request.accepted.trace.followed && !request.ended()) {
    request.timeline = timelines_.open(id, request.accepted.trace, request.prompt_tokens(), now);
    size_t delivered = 0;
    for (const Choice& choice : request.choices) delivered += choice.generated.size();
    mark(
        request, TimelineMarkKind::kAccepted, 0,
        request.accepted.resubmitted ? "again, with " + std::to_string(delivered) + " tokens delivered" : "");
  }
  emit(ReplySubmit{event.gateway, id, OkStatus(), request.resumable()});
  for (Choice& choice : request.choices) {
    if (choice.state == ChoiceState::kEnded) {
      // For whoever adopts it: what its tokens do not say was its text's end, at the gateway.
      const FinishReason finish = finish_of_delivered(choice);
      choice.finish = finish == FinishReason::kNone ? FinishReason::kCancelled : finish;
      continue;
    }
    if (const FinishReason finish = finish_of_delivered(choice); finish != FinishReason::kNone) {
      stop_choice(choice, finish, "");
    }
  }
  if (!request.ended() && request.deadline <= now) {
    return end_request(request, FinishReason::kDeadline, "the deadline had passed on arrival");
  }
  flush(request);
}

void SchedulerCore::reattach(Request& request, Submit& event) {
  if (request.accepted.prompt != event.request.prompt || request.accepted.choices != event.request.choices ||
      request.accepted.sampling.max_tokens != event.request.sampling.max_tokens ||
      request.accepted.sampling.seed != event.request.sampling.seed) {
    ++counters_.requests_refused_invalid;
    emit(ReplySubmit{event.gateway, request.id(), invalid_field("id", "another request has this id")});
    return;
  }
  const Incarnation holder = gateways_.at(event.gateway).hello.incarnation;
  if (request.resumable() && request.gateway && request.holder != holder) {
    ++counters_.requests_refused_invalid;
    emit(ReplySubmit{event.gateway, request.id(), failed_precondition("another router has taken it over")});
    return;
  }
  ++counters_.requests_reattached;
  mark(request, TimelineMarkKind::kReattached);
  requests_.attach(request, event.gateway, holder);
  emit(ReplySubmit{event.gateway, request.id(), OkStatus(), request.resumable()});
  request.prompt_sent = std::max(event.request.prompt_logprobs_delivered, request.prompt_base - 1);
  request.cached_sent = false;
  event.request.delivered.resize(request.choices.size());
  bool mixed = false;
  for (Choice& choice : request.choices) {
    const DeliveredChoice& delivered = event.request.delivered[choice.index];
    choice.sent = static_cast<uint32_t>(delivered.tokens.size());
    choice.end_sent = delivered.ended;
    if (choice.state == ChoiceState::kEnded) continue;
    if (delivered.ended) {
      stop_choice(choice, FinishReason::kCancelled, "");
      continue;
    }
    const size_t common = std::min(delivered.tokens.size(), choice.generated.size());
    mixed = mixed ||
            !std::equal(delivered.tokens.begin(), delivered.tokens.begin() + static_cast<ptrdiff_t>(common),
                        choice.generated.begin());
  }
  if (mixed) {
    return end_request(
        request, FinishReason::kError,
        "the tokens delivered before differ from those generated here: two numerics were mixed");
  }
  flush(request);
}

void SchedulerCore::handle(Cancel& event, TimePoint) {
  Request* request = requests_.find(event.request);
  if (request == nullptr || request->ended() || !may_cancel(*request, event.gateway)) return;
  if (event.choice) {
    if (*event.choice < request->choices.size()) {
      end_choice(request->choices[*event.choice], FinishReason::kCancelled, "");
    }
    return;
  }
  const auto gateway = request->gateway;
  requests_.forget_context(*request);  // its client wants no more of it
  end_request(*request, FinishReason::kCancelled, "");
  if (faults_.end_twice && gateway) {
    TokenEvent again;
    again.request = event.request;
    again.finish = FinishReason::kCancelled;
    emit(SendTokens{gateway, again});
  }
}

void SchedulerCore::on_step_result(Member& member, StepResult& result, TimePoint now) {
  WorkerPlanner& worker = workers_.at(member.hello.incarnation);
  due_.push_back(member.hello.incarnation);
  StatusOr<StepOutcome> outcome = worker.on_result(std::move(result), now);
  if (!outcome.ok()) {
    ++counters_.protocol_violations;
    lose_member(member.session, annotate(outcome.status(), member.hello.name + " broke the protocol"), true,
                now);
    return;
  }
  ++counters_.steps_retired;
  retired_at_[member.hello.incarnation] = now;
  counters_.step_compute_ns += static_cast<uint64_t>(std::max<Nanos>(0, result.compute_ns));
  counters_.step_expert_wait_ns += static_cast<uint64_t>(std::max<Nanos>(0, result.expert_wait_ns));
  counters_.step_plan_wait_ns += static_cast<uint64_t>(std::max<Nanos>(0, result.plan_wait_ns));
  if (!outcome->timed.empty()) note_steps(member, result, *outcome, now);
  counters_.tokens_discarded += outcome->discarded;
  counters_.tokens_sampled += outcome->sampled.size();
  for (PromptLogprobs& piece : outcome->prompt_logprobs) {
    Choice* choice = requests_.find(piece.seq);
    CONCLAVE_CHECK(choice != nullptr && piece.start == choice->request->prompt_next());
    std::vector<PromptLogprob>& all = choice->request->prompt_logprobs;
    std::move(piece.tokens.begin(), piece.tokens.end(), std::back_inserter(all));
    send_prompt_logprobs(*choice->request);
  }
  actions_.reserve(actions_.size() + outcome->sampled.size());
  // All tokens first: a sequence of the same worker may be looked at for them.
  for (StepOutcome::Sample& sample : outcome->sampled) requests_.append(*sample.owner, sample.token, now);
  for (const StepOutcome::Sample& sample : outcome->sampled) {
    if (sample.token.finish != FinishReason::kNone) {
      end_choice(*sample.owner, sample.token.finish, "");
    } else {
      send_choice(*sample.owner);
    }
  }
  for (const StepResult::Failure& failure : outcome->failures) {
    Choice* choice = requests_.find(failure.seq);
    // A sequence may be reported both with its last token and as failed.
    if (choice != nullptr) end_choice(*choice, FinishReason::kError, failure.cause);
  }
  requests_.queue().settle();
}

}  // namespace conclave::scheduler
