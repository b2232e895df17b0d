#include "router_service/warm_up.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "libs/base/random.h"

namespace conclave::router {
namespace {
constexpr uint64_t kNone = ~uint64_t{0};  // no set of shards

// Tokens that go through each expert twice.
uint32_t rows_through_all(const ModelSpec& model) {
  const uint32_t top_k = std::max(1u, model.experts_per_token);
  return 2 * ((model.num_experts + top_k - 1) / top_k);
}

}  // namespace

struct WarmUp::State {
  std::mutex mutex;
  // guarded:
  bool warm = false;
  uint64_t shard_set = kNone;    // FleetInfo's, that the last good attempt went through
  uint64_t seen_set = kNone;     // that the fleet had when it was looked at last; kNone: it was not whole
  uint64_t running_set = kNone;  // that the running attempt goes through
  RequestId running;             // {}: none
  std::string failure;
  TimePoint begun = 0;
  TimePoint not_before = 0;
  uint64_t attempts = 0;
  Nanos duration = 0;
};

// Reports to the state as long as its attempt is the one in progress.
class WarmUp::Observer : public RequestObserver {
 public:
  Observer(std::shared_ptr<State> state, RequestId id, Nanos retry)
      : state_(std::move(state)), id_(id), retry_(retry) {}
  void on_accepted() override {}
  void on_refused(const Status& cause) override { end(message_of(cause)); }
  void on_tokens(const TokenEvent& event) override {
    if (event.finish == FinishReason::kNone) return;
    const bool whole = event.finish == FinishReason::kLength || event.finish == FinishReason::kStop;
    end(whole ? "" : event.error.empty() ? "it was ended" : event.error);
  }

 private:
  void end(const std::string& failure) {
    const TimePoint now = steady_now();
    std::lock_guard lock(state_->mutex);
    if (state_->running != id_) return;
    state_->running = RequestId{};
    state_->failure = failure;
    state_->not_before = now + retry_;
    if (!failure.empty()) return;
    state_->duration = now - state_->begun;
    state_->shard_set = state_->running_set;
    state_->not_before = now;
    // Shards that joined meanwhile have not been warmed: there will be another attempt.
    if (state_->seen_set == state_->shard_set) state_->warm = true;
  }

  const std::shared_ptr<State> state_;
  const RequestId id_;
  const Nanos retry_;
};

WarmUp::WarmUp(SchedulerPort& scheduler, const ModelSpec& model, uint32_t vocab_limit, WarmUpOptions options)
    : scheduler_(scheduler),
      vocab_(std::max(1u, std::min(vocab_limit, model.vocab_size))),
      rows_(std::max(options.prompt_tokens, rows_through_all(model))),
      max_positions_(model.max_positions),
      options_(options),
      state_(std::make_shared<State>()) {}

WarmUp::~WarmUp() {
  RequestId running;
  {
    std::lock_guard lock(state_->mutex);
    running = std::exchange(state_->running, RequestId{});
  }
  if (running != RequestId{}) scheduler_.cancel(running);
}

void WarmUp::poll(TimePoint now) {
  const FleetInfo fleet = scheduler_.fleet();
  AcceptedRequest request;
  {
    std::lock_guard lock(state_->mutex);
    if (!fleet.ready) {
      // An attempt in progress goes on: it may yet end when the fleet is whole again.
      state_->warm = false;
      state_->shard_set = state_->seen_set = kNone;
      return;
    }
    state_->seen_set = fleet.shard_set;
    const bool through_all = state_->shard_set == fleet.shard_set;
    if (through_all) state_->warm = true;
    if (through_all || state_->running != RequestId{} || now < state_->not_before) return;
    request.id = RequestId{system_random_u64(), system_random_u64()};
    state_->running = request.id;
    state_->running_set = fleet.shard_set;
    state_->begun = now;
    ++state_->attempts;
  }
  const uint32_t limit =
      fleet.max_positions > 0 ? std::min(fleet.max_positions, max_positions_) : max_positions_;
  const uint32_t count = std::max(1u, std::min(rows_, limit - 1));
  for (uint32_t i = 0; i < count; ++i)
    request.prompt.push_back(static_cast<TokenId>(static_cast<uint64_t>(i) * vocab_ / count));
  request.sampling.temperature = 0;
  request.sampling.max_tokens = 1;
  request.sampling.ignore_eos = true;
  request.sampling.vocab_limit = vocab_;
  request.sampling.every_expert = true;
  request.time_left = options_.deadline;
  auto observer = std::make_shared<Observer>(state_, request.id, options_.retry);
  scheduler_.submit(std::move(request), std::move(observer));
}

std::string WarmUp::not_warm() const {
  std::lock_guard lock(state_->mutex);
  if (state_->warm) return "";
  if (!state_->failure.empty()) return "the warm-up token failed: " + state_->failure;
  return "a warm-up token has not gone through every shard yet";
}

uint64_t WarmUp::attempts() const {
  std::lock_guard lock(state_->mutex);
  return state_->attempts;
}

Nanos WarmUp::last_duration() const {
  std::lock_guard lock(state_->mutex);
  return state_->duration;
}

}  // namespace conclave::router
