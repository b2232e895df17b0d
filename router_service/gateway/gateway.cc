#include "router_service/gateway/gateway.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "libs/base/random.h"

namespace conclave::gateway {
namespace {

constexpr char kCodePayload[] = "conclave.code";

Status check_range(std::optional<double> value, double low, double high, bool low_open,
                   std::string_view field, std::string_view rule) {
  if (!value) return OkStatus();
  if (!std::isfinite(*value) || *value < low || *value > high || (low_open && *value == low))
    return invalid_field(field, rule);
  return OkStatus();
}

constexpr uint64_t kBytesPerToken = 4;  // of text, about; what a prompt takes before it is tokenized

uint64_t estimate_tokens(const GenerateRequest& request) {
  if (const auto* ids = std::get_if<TokenPrompt>(&request.prompt)) return ids->ids.size();
  const auto* text = std::get_if<TextPrompt>(&request.prompt);
  const size_t bytes = text ? text->text.size() : std::get<ChatPrompt>(request.prompt).document_json.size();
  return bytes / kBytesPerToken + 1;
}

}  // namespace

std::string_view limit_name(Limit limit) {
  switch (limit) {
    case Limit::kMessages:
      return "max_messages";
    case Limit::kTools:
      return "max_tools";
    case Limit::kChoices:
      return "max_choices";
    case Limit::kLogprobs:
      return "max_logprobs";
    case Limit::kStops:
      return "max_stops";
    case Limit::kRequests:
      return "max_requests";
    case Limit::kQueuedRequests:
      return "max_queued_requests";
    case Limit::kQueuedTokens:
      return "max_queued_tokens";
    case Limit::kWaitingTexts:
      return "max_waiting_texts";
    case Limit::kSlowReader:
      return "max_stream_events";
    case Limit::kCount:
      break;
  }
  return "";
}

Status with_code(Status status, std::string_view code) {
  status.SetPayload(kCodePayload, absl::Cord(absl::string_view(code.data(), code.size())));
  return status;
}

std::string code_of(const Status& status) {
  const auto payload = status.GetPayload(kCodePayload);
  return payload ? std::string(*payload) : std::string();
}

Gateway::Gateway(GatewayOptions options, ModelSpec model, SchedulerPort& scheduler, const TextCodec& codec,
                 std::function<void(const Summary&)> on_end)
    : options_(options),
      model_(std::move(model)),
      scheduler_(scheduler),
      codec_(codec),
      on_end_(std::move(on_end)),
      pool_(options.text_threads, options.limits.max_waiting_texts) {}

Gateway::~Gateway() {
  begin_drain();
  abort_all(unavailable("the router is shutting down"));
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

Status Gateway::limit_reached(Limit limit, std::string_view what, uint64_t bound) const {
  limit_counters_.reached(limit);
  return resource_exhausted(std::string(limit_name(limit)) + " (" + std::to_string(bound) + ") " +
                            std::string(what) + "; retry later");
}

Status Gateway::check_shape(const GenerateRequest& request) const {
  const auto too_many = [this](Limit limit, const std::string& field, uint64_t have, uint64_t bound) {
    limit_counters_.reached(limit);
    return invalid_field(field, "has " + std::to_string(have) + "; at most " + std::to_string(bound) +
                                    " are taken (" + std::string(limit_name(limit)) + ")");
  };
  const AdmissionLimits& limits = options_.limits;
  if (const auto* chat = std::get_if<ChatPrompt>(&request.prompt)) {
    if (chat->messages > limits.max_messages)
      return too_many(Limit::kMessages, "messages", chat->messages, limits.max_messages);
    if (chat->tools > limits.max_tools)
      return too_many(Limit::kTools, "tools", chat->tools, limits.max_tools);
  }
  if (request.stop.size() > limits.max_stop_strings)
    return too_many(Limit::kStops, "stop", request.stop.size(), limits.max_stop_strings);
  if (request.stop_token_ids.size() > limits.max_stop_token_ids)
    return too_many(Limit::kStops, "stop_token_ids", request.stop_token_ids.size(),
                    limits.max_stop_token_ids);
  return OkStatus();
}

Status Gateway::check(const GenerateRequest& request) const {
  RETURN_IF_ERROR(check_shape(request));
  if (!request.model.empty() && request.model != model_.name)
    return with_code(with_field(not_found("the model \"" + request.model.substr(0, 256) +
                                          "\" is not served here; \"" + model_.name + "\" is"),
                                "model"),
                     "model_not_found");
  RETURN_IF_ERROR(check_range(request.temperature, 0, 1e6, false, "temperature",
                              "must be between 0 (greedy) and 1000000"));
  RETURN_IF_ERROR(check_range(request.top_p, 0, 1, true, "top_p", "must be above 0 and at most 1"));
  RETURN_IF_ERROR(check_range(request.min_p, 0, 1, false, "min_p", "must be from 0 to 1"));
  if (request.top_k && (*request.top_k < -1 || *request.top_k > std::numeric_limits<int32_t>::max()))
    return invalid_field("top_k", "must be a positive number, or 0 or -1 for all tokens");
  if (request.max_tokens && *request.max_tokens < 1)
    return invalid_field(request.max_tokens_field, "must be at least 1");
  if (request.min_tokens && *request.min_tokens < 0)
    return invalid_field("min_tokens", "must not be negative");
  if (request.min_tokens && request.max_tokens && *request.min_tokens > *request.max_tokens)
    return invalid_field("min_tokens", "must not be more than " + request.max_tokens_field);
  for (const std::string& stop : request.stop) {
    if (stop.empty()) return invalid_field("stop", "a stop string must not be empty");
    if (stop.size() > options_.limits.max_stop_string_bytes)
      return invalid_field("stop", "a stop string is longer than " +
                                       std::to_string(options_.limits.max_stop_string_bytes) + " bytes");
  }
  for (const int64_t id : request.stop_token_ids)
    if (id < 0 || id >= static_cast<int64_t>(model_.vocab_size))
      return invalid_field("stop_token_ids", "the id " + std::to_string(id) +
                                                 " is not in the vocabulary of " +
                                                 std::to_string(model_.vocab_size));

  if (const auto* ids = std::get_if<TokenPrompt>(&request.prompt)) {
    RETURN_IF_ERROR(check_prompt_length(request, ids->ids.size()));
    for (const int64_t id : ids->ids)
      if (id < 0 || id >= static_cast<int64_t>(model_.vocab_size))
        return invalid_field(request.prompt_field, "the token id " + std::to_string(id) +
                                                       " is not in the vocabulary of " +
                                                       std::to_string(model_.vocab_size));
  } else if (const auto* text = std::get_if<TextPrompt>(&request.prompt)) {
    if (text->text.empty()) return invalid_field(request.prompt_field, "must not be empty");
    // A text that must be too long is refused before it is tokenized.
    const uint64_t fewest = text->text.size() / std::max(1u, codec_.max_token_bytes());
    if (fewest >= context_length()) return check_prompt_length(request, fewest);
  }
  return OkStatus();
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
  RETURN_IF_ERROR(check(request));
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
  auto generation =
      std::make_shared<Generation>(id, scheduler_, options_.stream, std::move(on_update),
                                   [this, record = request.origin.record](const Summary& summary) {
                                     if (record) record->ended(summary);
                                     if (summary.slow_reader) limit_counters_.reached(Limit::kSlowReader);
                                     ended(summary);
                                   });
  generation->hold(place);
  {
    std::lock_guard lock(mutex_);
    if (draining_) return unavailable("the router is shutting down");
    if (open_.size() >= limits.max_requests)
      return limit_reached(Limit::kRequests, "requests are open", limits.max_requests);
    open_.emplace(id, Open{generation, request.origin});
  }
  const bool taken = pool_.try_submit([this, generation, place = std::move(place), r = std::move(request)] {
    prepare(r, generation, *place);
  });
  if (!taken) {
    const Status full =
        limit_reached(Limit::kWaitingTexts, "requests are waiting to be tokenized", limits.max_waiting_texts);
    generation->cancel(full);
    return full;
  }
  return generation;
}

void Gateway::prepare(const GenerateRequest& request, const std::shared_ptr<Generation>& generation,
                      QueueMeter::Place& place) {
  // Memory that one request cannot have is that request's failure, not the router's end.
  try {
    prepare_or_throw(request, generation, place);
  } catch (const std::bad_alloc&) {
    generation->refuse(resource_exhausted("there is not enough memory for this request"));
  }
}

void Gateway::prepare_or_throw(const GenerateRequest& request, const std::shared_ptr<Generation>& generation,
                               QueueMeter::Place& place) {
  if (generation->ended()) return;
  auto accepted = accept(request, generation->id());
  if (!accepted.ok()) return generation->refuse(accepted.status());
  place.correct(accepted->prompt.size());
  accepted->time_left -= steady_now() - generation->arrived();  // waiting and tokenizing count too
  if (accepted->time_left <= 0)
    return generation->refuse(deadline_exceeded("the request passed its deadline"));
  auto stops = text::StopStringMatcher::create(request.stop);
  if (!stops.ok()) return generation->refuse(with_field(stops.status(), "stop"));
  generation->submit(std::move(accepted).value(), codec_.decoder(), std::move(stops).value());
}

StatusOr<AcceptedRequest> Gateway::accept(const GenerateRequest& request, RequestId id) const {
  AcceptedRequest accepted;
  accepted.id = id;
  accepted.tenant = request.origin.tenant;
  if (const auto* ids = std::get_if<TokenPrompt>(&request.prompt)) {
    accepted.prompt.assign(ids->ids.begin(), ids->ids.end());
  } else if (const auto* text = std::get_if<TextPrompt>(&request.prompt)) {
    auto encoded = codec_.encode(text->text);
    if (!encoded.ok()) return with_field(encoded.status(), request.prompt_field);
    accepted.prompt = std::move(encoded).value();
  } else {
    auto encoded = codec_.encode_chat(std::get<ChatPrompt>(request.prompt));
    if (!encoded.ok()) return with_field(encoded.status(), request.prompt_field);
    accepted.prompt = std::move(encoded).value();
  }
  RETURN_IF_ERROR(check_prompt_length(request, accepted.prompt.size()));
  const uint32_t room = context_length() - static_cast<uint32_t>(accepted.prompt.size());

  SamplingParams& sampling = accepted.sampling;
  sampling.temperature =
      static_cast<float>(request.temperature.value_or(model_.default_temperature.value_or(1.0f)));
  sampling.top_p = static_cast<float>(request.top_p.value_or(model_.default_top_p.value_or(1.0f)));
  const int64_t top_k = request.top_k.value_or(model_.default_top_k.value_or(0));
  sampling.top_k = top_k <= 0 ? 0 : static_cast<uint32_t>(top_k);
  sampling.min_p = static_cast<float>(request.min_p.value_or(0));
  sampling.seed = request.seed ? *request.seed : system_random_u64();
  sampling.max_tokens = request.max_tokens               ? static_cast<uint32_t>(*request.max_tokens)
                        : request.default_max_tokens > 0 ? std::min(request.default_max_tokens, room)
                                                         : room;
  sampling.min_tokens =
      static_cast<uint32_t>(std::min<int64_t>(request.min_tokens.value_or(0), sampling.max_tokens));
  sampling.ignore_eos = request.ignore_eos.value_or(false);
  if (!sampling.ignore_eos) sampling.stop_token_ids = model_.stop_token_ids;
  for (const int64_t stop : request.stop_token_ids) {
    const TokenId token = static_cast<TokenId>(stop);
    auto& ids = sampling.stop_token_ids;
    if (std::find(ids.begin(), ids.end(), token) == ids.end()) ids.push_back(token);
  }
  sampling.vocab_limit = std::min(codec_.vocab_limit(), model_.vocab_size);
  accepted.time_left =
      request.time_left ? std::min(*request.time_left, options_.default_deadline) : options_.default_deadline;
  return accepted;
}

void Gateway::ended(const Summary& summary) {
  std::shared_ptr<Generation> dropped;  // outside the lock
  {
    std::lock_guard lock(mutex_);
    const auto at = open_.find(summary.id);
    if (at != open_.end()) {
      dropped = std::move(at->second.generation);
      open_.erase(at);
    }
    if (open_.empty()) idle_.notify_all();
  }
  if (on_end_) on_end_(summary);
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
  for (const auto& generation : all) generation->abort(cause);
}

}  // namespace conclave::gateway
