#include "router_service/gateway/gateway.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "libs/base/random.h"
#include "router_service/gateway/router_context.h"

namespace conclave::gateway {
namespace {

constexpr char kCodePayload[] = "conclave.code";
constexpr uint64_t kBytesPerToken = 4;  // of text, about; what a prompt takes before it is tokenized

uint64_t estimate_tokens(const GenerateRequest& request) {
  if (const auto* ids = std::get_if<TokenPrompt>(&request.prompt)) return ids->ids.size();
  const auto* text = std::get_if<TextPrompt>(&request.prompt);
  const uint64_t bytes = text ? text->text.size() : std::get<ChatPrompt>(request.prompt).text_bytes;
  return bytes / kBytesPerToken + 1;
}

Status check_special_tokens(bool wanted, const Origin& origin) {
  if (!wanted || origin.trusted) return OkStatus();
  return with_field(make_status(StatusCode::kPermissionDenied,
                                "allow_special_tokens is for trusted callers only (docs/front_door.md)"),
                    "allow_special_tokens");
}

// Of one call: 24 digits, from the request's own random id.
std::string made_call_id(RequestId id, uint32_t choice, uint32_t call) {
  const uint64_t place = (uint64_t{choice} << 32 | call) + 1;
  const uint64_t hi = internal::mix64(id.hi + place * 0x9e3779b97f4a7c15ull);
  const uint64_t lo = internal::mix64(id.lo ^ hi);
  return "call_" + id_text({hi, lo}).substr(8);
}

}  // namespace

Status with_code(Status status, std::string_view code) {
  status.SetPayload(kCodePayload, absl::Cord(absl::string_view(code.data(), code.size())));
  return status;
}

std::string code_of(const Status& status) {
  const auto payload = status.GetPayload(kCodePayload);
  return payload ? std::string(*payload) : std::string();
}

std::optional<RequestId> parse_id(std::string_view text) {
  for (const std::string_view prefix : {"chatcmpl-", "cmpl-"})
    if (text.starts_with(prefix)) text.remove_prefix(prefix.size());
  if (text.size() != 32) return std::nullopt;
  RequestId id;
  const char* const middle = text.data() + 16;
  const char* const end = middle + 16;
  const auto hi = std::from_chars(text.data(), middle, id.hi, 16);
  const auto lo = std::from_chars(middle, end, id.lo, 16);
  if (hi.ptr != middle || lo.ptr != end || hi.ec != std::errc() || lo.ec != std::errc()) return std::nullopt;
  if (id == RequestId{}) return std::nullopt;  // no request has it, and the scheduler takes it for a fault
  return id;
}

Gateway::Gateway(GatewayOptions options, ModelSpec model, SchedulerPort& scheduler, const TextCodec& codec,
                 std::function<void(const Summary&)> on_end)
    : options_(options),
      model_(std::move(model)),
      scheduler_(scheduler),
      codec_(codec),
      on_end_(std::move(on_end)),
      timelines_(options.max_timelines),
      pool_(options.text_threads, options.limits.max_waiting_texts) {}

Gateway::~Gateway() {
  begin_drain();
  abort_all(unavailable("the router is shutting down"));
  // A thread of the scheduler's may be telling us of an end at this moment.
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return open_.empty(); });
}

uint32_t Gateway::context_length() const {
  const uint32_t fleet = scheduler_.fleet().max_positions;
  return fleet == 0 ? model_.max_positions : std::min(fleet, model_.max_positions);
}

Status Gateway::ready() const {
  {
    std::lock_guard lock(mutex_);
    if (draining_) return unavailable("the router is shutting down");
  }
  const FleetInfo fleet = scheduler_.fleet();
  if (!fleet.ready)
    return unavailable(fleet.not_ready.empty() ? "the cluster is not ready" : fleet.not_ready);
  return OkStatus();
}

Status Gateway::accepting() const {
  const Status now_ready = ready();
  if (now_ready.ok()) return now_ready;
  {
    std::lock_guard lock(mutex_);
    if (draining_) return now_ready;
  }
  const TimePoint since = scheduler_.fleet().unready_since;
  return since != kNever && steady_now() - since < options_.unready_grace ? OkStatus() : now_ready;
}

GatewayCounts Gateway::counts() const {
  GatewayCounts counts;
  counts.waiting_texts = pool_.waiting();
  counts.done_texts = pool_.done();
  counts.queued_requests = queue_.requests();
  counts.queued_tokens = queue_.tokens();
  std::lock_guard lock(mutex_);
  counts.open = open_.size();
  return counts;
}

std::vector<OpenRequest> Gateway::open_requests(size_t max) const {
  std::vector<OpenRequest> out;
  const TimePoint now = steady_now();
  {
    std::lock_guard lock(mutex_);
    out.reserve(open_.size());
    for (const auto& [id, open] : open_) {
      const Generation::Progress progress = open.generation->progress();
      out.push_back({id, open.origin.request_id, open.origin.tenant, open.origin.route,
                     now - open.generation->arrived(), progress.accepted, progress.usage});
    }
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.age > b.age; });
  if (out.size() > max) out.resize(max);
  return out;
}

std::vector<StalledRequest> Gateway::stalled(TimePoint now, Nanos limit) const {
  std::vector<StalledRequest> out;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, open] : open_) {
      const auto stall = open.generation->stall(now);
      if (stall && stall->time >= limit) out.push_back({id, open.origin.request_id, stall->hop, stall->time});
    }
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.time > b.time; });
  return out;
}

void Gateway::note_limit(const Status& refusal) const {
  if (const auto limit = limit_of(refusal)) limit_counters_.reached(*limit);
}

Status Gateway::limit_reached(Limit limit, std::string_view what, uint64_t bound) const {
  limit_counters_.reached(limit);
  return resource_exhausted(std::string(limit_name(limit)) + " (" + std::to_string(bound) + ") " +
                            std::string(what) + "; retry later");
}

StatusOr<SamplingParams> Gateway::check(const GenerateRequest& request) const {
  if (!request.model.empty() && request.model != model_.name)
    return with_code(with_field(not_found("the model \"" + request.model.substr(0, 256) +
                                          "\" is not served here; \"" + model_.name + "\" is"),
                                "model"),
                     "model_not_found");
  ASSIGN_OR_RETURN(SamplingParams sampling,
                   make_sampling(request, model_, codec_.vocab_limit(), options_.limits));
  // A text that must be too long is refused before it is rendered and tokenized.
  const uint32_t token_bytes =
      std::max(1u, std::min(codec_.max_token_bytes(), options_.limits.max_bytes_per_token));
  const auto check_bytes = [&](uint64_t bytes, const std::string& field) {
    GenerateRequest named;
    named.prompt_field = field;
    const uint64_t fewest = bytes / token_bytes;
    return fewest >= context_length() ? check_prompt_length(named, fewest) : OkStatus();
  };
  if (const auto* ids = std::get_if<TokenPrompt>(&request.prompt)) {
    RETURN_IF_ERROR(check_prompt_length(request, ids->ids.size()));
    for (const int64_t id : ids->ids)
      if (id < 0 || id >= static_cast<int64_t>(model_.vocab_size))
        return invalid_field(request.prompt_field, "the token id " + std::to_string(id) +
                                                       " is not in the vocabulary of " +
                                                       std::to_string(model_.vocab_size));
  } else if (const auto* text = std::get_if<TextPrompt>(&request.prompt)) {
    if (text->text.empty()) return invalid_field(request.prompt_field, "must not be empty");
    RETURN_IF_ERROR(check_special_tokens(request.allow_special_tokens, request.origin));
    RETURN_IF_ERROR(check_bytes(text->text.size(), request.prompt_field));
  } else {
    const auto& chat = std::get<ChatPrompt>(request.prompt);
    RETURN_IF_ERROR(check_special_tokens(chat.request.allow_special_tokens, request.origin));
    RETURN_IF_ERROR(
        check_bytes(chat.text_bytes, chat.largest_field.empty() ? request.prompt_field : chat.largest_field));
  }
  return sampling;
}

Status Gateway::check_prompt_length(const GenerateRequest& request, size_t tokens) const {
  if (tokens == 0) return invalid_field(request.prompt_field, "must not be empty");
  const uint32_t context = context_length();
  if (tokens >= context)
    return with_code(
        invalid_field(request.prompt_field, "has " + std::to_string(tokens) +
                                                " tokens or more; the context of " + std::to_string(context) +
                                                " tokens must hold the prompt and at least one more"),
        "context_length_exceeded");
  const uint64_t room = context - tokens;
  if (request.max_tokens && static_cast<uint64_t>(*request.max_tokens) > room)
    return with_code(invalid_field(request.max_tokens_field,
                                   "is " + std::to_string(*request.max_tokens) + ", but with a prompt of " +
                                       std::to_string(tokens) + " tokens the context of " +
                                       std::to_string(context) + " has room for " + std::to_string(room)),
                     "context_length_exceeded");
  return OkStatus();
}

StatusOr<std::shared_ptr<Generation>> Gateway::generate(GenerateRequest request,
                                                        std::function<void()> on_update) {
  auto sampling = check(request);
  if (!sampling.ok()) {
    note_limit(sampling.status());
    return sampling.status();
  }
  RETURN_IF_ERROR(accepting());
  const AdmissionLimits& limits = options_.limits;
  const uint64_t estimate = estimate_tokens(request);
  Limit which{};
  if (!queue_.enter(estimate, limits.max_queued_requests, limits.max_queued_tokens, &which)) {
    return which == Limit::kQueuedRequests
               ? limit_reached(which, "requests are waiting", limits.max_queued_requests)
               : limit_reached(which, "prompt tokens are waiting", limits.max_queued_tokens);
  }
  auto place = std::make_shared<QueueMeter::Place>(queue_, estimate);
  const RequestId id{system_random_u64(), system_random_u64()};
  const uint64_t number = next_place_.fetch_add(1);
  auto generation = std::make_shared<Generation>(id, scheduler_, options_.stream, std::move(on_update),
                                                 on_generation_end(number, request.origin.record));
  generation->hold(place);
  {
    std::lock_guard lock(mutex_);
    if (draining_) return unavailable("the router is shutting down");
    if (open_.size() >= limits.max_requests)
      return limit_reached(Limit::kRequests, "requests are open", limits.max_requests);
    if (request.origin.trace.followed)
      generation->follow(timelines_.open(id, request.origin, false, generation->arrived()));
    open_.emplace(id, Open{generation, request.name, request.origin, number});
  }
  auto work =
      std::make_shared<Work>(Work{std::move(request), *std::move(sampling), generation, std::move(place)});
  const bool taken = pool_.try_submit([this, work] {
    Status prepared;
    // Memory that one request cannot have is that request's failure, not the router's end.
    try {
      prepared = prepare(*work);
    } catch (const std::bad_alloc&) {
      prepared = resource_exhausted("there is not enough memory for this request");
    }
    work->place.reset();
    if (!prepared.ok()) work->generation->refuse(prepared);
  });
  if (!taken) {
    const Status full =
        limit_reached(Limit::kWaitingTexts, "requests are waiting to be tokenized", limits.max_waiting_texts);
    generation->cancel(full);
    return full;
  }
  return generation;
}

std::function<void(const Summary&)> Gateway::on_generation_end(uint64_t place,
                                                               std::shared_ptr<RequestRecord> record) {
  return [this, place, record = std::move(record)](const Summary& summary) {
    if (record) record->ended(summary);
    if (summary.slow_reader) limit_counters_.reached(Limit::kSlowReader);
    ended(summary, place);
  };
}

Status Gateway::prepare(Work& work) const {
  GenerateRequest& request = work.request;
  if (work.generation->ended()) return OkStatus();
  const TimePoint deadline =
      work.generation->arrived() +
      std::min(request.time_left.value_or(options_.default_deadline), options_.default_deadline);
  const Status late = deadline_exceeded("the request passed its deadline");
  if (steady_now() >= deadline) return late;
  RouterTimeline* const timeline = work.generation->timeline().get();
  if (timeline != nullptr) timeline->mark(RouterMarkKind::kText);
  auto encoded = encode(request, deadline);
  if (!encoded.ok()) {
    if (encoded.status().code() != StatusCode::kDeadlineExceeded) return encoded.status();
    // Its own deadline, or only that of the template's process: then it is we who are too busy.
    if (steady_now() >= deadline) return late;
    return resource_exhausted(message_of(encoded.status()) + "; retry later");
  }
  if (timeline != nullptr) {
    timeline->mark(RouterMarkKind::kTokenized, std::to_string(encoded->tokens.size()) + " tokens");
  }
  RETURN_IF_ERROR(check_prompt_length(request, encoded->tokens.size()));
  const uint32_t room = context_length() - static_cast<uint32_t>(encoded->tokens.size());

  AcceptedRequest accepted;
  accepted.id = work.generation->id();
  accepted.tenant = request.origin.tenant;
  accepted.trace = request.origin.trace;
  accepted.sampling = work.sampling;
  SamplingParams& sampling = accepted.sampling;
  const bool only_prompt = request.echo && request.max_tokens == 0;
  if (sampling.max_tokens == 0)
    sampling.max_tokens = only_prompt                      ? 1
                          : request.default_max_tokens > 0 ? std::min(request.default_max_tokens, room)
                                                           : room;
  sampling.min_tokens = std::min(sampling.min_tokens, sampling.max_tokens);
  accepted.choices = static_cast<uint32_t>(request.n.value_or(1));
  accepted.priority = static_cast<int32_t>(request.priority);
  accepted.cache_salt = request.cache_salt;
  ASSIGN_OR_RETURN(auto choices, make_choices(request, work.sampling, encoded->starts_in_reasoning,
                                              accepted.choices, accepted.id));
  std::string echoed;
  if (request.echo) {
    const auto* text = std::get_if<TextPrompt>(&request.prompt);
    echoed = text != nullptr ? text->text : codec_.decode(encoded->tokens, /*skip_special=*/false);
  }
  if (!request.resume_context.empty()) {
    accepted.router_context =
        write_router_context({encoded->starts_in_reasoning, echoed, request.resume_context});
    // Then it is not resumable, which its client is told. Where nobody knows the scheduler's bound yet, that
    // is for the scheduler to say.
    if (accepted.router_context.size() >
        scheduler_.fleet().max_router_context_bytes.value_or(kMaxRouterContextBytes)) {
      accepted.router_context.clear();
      limit_counters_.reached(Limit::kRouterContext);
    }
  }
  accepted.prompt = std::move(encoded->tokens);
  accepted.time_left = deadline - steady_now();  // waiting and tokenizing count too
  if (accepted.time_left <= 0) return late;
  if (options_.on_submit) options_.on_submit(request.origin, accepted);
  // The place is the generation's from here on: it may end with the first token, at once.
  std::exchange(work.place, nullptr)->correct(accepted.prompt.size());
  work.generation->submit(std::move(accepted), std::move(choices), std::move(echoed));
  return OkStatus();
}

StatusOr<Gateway::Encoded> Gateway::encode(const GenerateRequest& request, TimePoint deadline) const {
  Encoded out;
  if (const auto* ids = std::get_if<TokenPrompt>(&request.prompt)) {
    out.tokens.assign(ids->ids.begin(), ids->ids.end());
  } else if (const auto* text = std::get_if<TextPrompt>(&request.prompt)) {
    auto encoded = codec_.encode(text->text, request.allow_special_tokens);
    if (!encoded.ok()) return with_field(encoded.status(), request.prompt_field);
    out.tokens = std::move(encoded).value();
  } else {
    auto encoded = codec_.encode_chat(std::get<ChatPrompt>(request.prompt), deadline);
    if (!encoded.ok())
      return field_of(encoded.status()).empty() ? with_field(encoded.status(), request.prompt_field)
                                                : encoded.status();
    out.tokens = std::move(encoded->tokens);
    out.starts_in_reasoning = encoded->starts_in_reasoning;
  }
  return out;
}

StatusOr<std::vector<Choice>> Gateway::make_choices(const GenerateRequest& request,
                                                    const SamplingParams& sampling, bool starts_in_reasoning,
                                                    uint32_t count, RequestId id) const {
  auto rules = std::make_shared<ChoiceRules>();
  rules->stop_token_ids = sampling.stop_token_ids;
  rules->client_stop_ids.assign(request.stop_token_ids.begin(), request.stop_token_ids.end());
  rules->stop = request.stop;
  rules->discard = request.echo && request.max_tokens == 0;
  text::ConversationOptions options;
  if (request.conversation) {
    options.format = codec_.format();
    options.starts_in_reasoning = starts_in_reasoning;
    options.reasoning = request.reasoning;
    options.tools = request.tools;
    options.parallel_tool_calls = request.parallel_tool_calls;
  }
  options.stop = request.stop;
  options.include_stop = request.include_stop;
  options.min_tokens = static_cast<uint32_t>(
      std::min<int64_t>(request.min_tokens.value_or(0), std::numeric_limits<uint32_t>::max()));
  std::vector<Choice> choices;
  choices.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    // The same ones at every router that writes this answer.
    options.make_call_id = [id, i](uint32_t call) { return made_call_id(id, i, call); };
    ASSIGN_OR_RETURN(auto parser,
                     text::ConversationParser::create(codec_.decoder(request.skip_special_tokens), options));
    choices.emplace_back(i, std::move(parser), rules);
  }
  return choices;
}

size_t Gateway::abort(std::string_view id, std::string_view tenant, const Status& cause) {
  if (id.empty()) return 0;
  const auto wanted = parse_id(id);
  std::vector<std::shared_ptr<Generation>> found;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [open_id, open] : open_)
      if (open.origin.tenant == tenant && ((wanted && *wanted == open_id) || open.name == id))
        found.push_back(open.generation);
  }
  for (const auto& generation : found) generation->abort(cause);
  return found.size();
}

void Gateway::ended(const Summary& summary, uint64_t place) {
  if (on_end_) on_end_(summary);
  std::shared_ptr<Generation> dropped;  // outside the lock
  std::lock_guard lock(mutex_);
  const auto at = open_.find(summary.id);
  if (at != open_.end() && at->second.place == place) {
    dropped = std::move(at->second.generation);
    open_.erase(at);
  }
  if (open_.empty()) idle_.notify_all();  // the gateway may be gone once the lock is
}

void Gateway::begin_drain() {
  std::lock_guard lock(mutex_);
  draining_ = true;
}

bool Gateway::wait_idle(Nanos wait) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, std::chrono::nanoseconds(wait), [this] { return open_.empty(); });
}

void Gateway::abort_all(const Status& cause) {
  std::vector<std::shared_ptr<Generation>> all;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, open] : open_) all.push_back(open.generation);
  }
  for (const auto& generation : all) generation->hand_over(cause);
}

}  // namespace conclave::gateway
