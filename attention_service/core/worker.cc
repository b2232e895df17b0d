#include "attention_service/core/worker.h"

#include <algorithm>
#include <utility>

#include "libs/base/check.h"

namespace conclave {

StatusOr<std::unique_ptr<Worker>> Worker::create(Executor& executor, ExpertTransport& transport,
                                                 const ModelSpec& spec, const DenseWeights& weights,
                                                 kernels::Context kernels, WorkerOptions options) {
  if (options.max_batch_tokens == 0) return invalid_field("max_batch_tokens", "must be at least 1");
  if (options.micro_batches == 0) return invalid_field("micro_batches", "must be at least 1");
  if (options.max_logit_rows == 0) return invalid_field("max_logit_rows", "must be at least 1");
  if (options.exchange.max_dispatch_rows == 0 ||
      options.exchange.max_dispatch_items < spec.experts_per_token) {
    return invalid_field("max_dispatch_items", "must hold at least one row with all its experts");
  }
  ASSIGN_OR_RETURN(KvStore kv, KvStore::reserve(spec, options.precision, options.kv_blocks));
  return std::unique_ptr<Worker>(
      new Worker(executor, transport, spec, weights, kernels, std::move(options), std::move(kv)));
}

Worker::Worker(Executor& executor, ExpertTransport& transport, const ModelSpec& spec,
               const DenseWeights& weights, kernels::Context kernels, WorkerOptions options, KvStore kv)
    : executor_(executor),
      transport_(transport),
      spec_(spec),
      kernels_(kernels),
      options_(std::move(options)),
      sequences_(spec, options_.kv_blocks),
      kv_(std::move(kv)),
      math_(spec, weights, options_.precision, options_.fp8_wire, kernels, kv_),
      tuner_(options_.micro_batches, options_.micro_batch_min_rows),
      exchange_(executor, transport, options_.exchange, options_.micro_batches, spec.hidden_size,
                row_dtype(options_.precision), wire_dtype(options_.precision, options_.fp8_wire),
                metrics_.exchange,
                {[this](uint32_t lane) {
                   step_->batches[lane].phase = MicroBatch::Phase::kReady;
                   wake();
                 },
                 [this](Incarnation shard, const std::string& cause) {
                   if (link_ != nullptr) link_->send(PeerTrouble{shard, cause});
                 },
                 [this](uint32_t lane, const Status& cause) { fail_batch(lane, cause); },
                 [this] {
                   placed_ = true;
                   show_epoch();
                 }}),
      warmer_(weights) {
  CONCLAVE_CHECK(weights.layers.size() == spec.num_layers);
}

Worker::~Worker() {
  transport_.set_ready(nullptr);
  exchange_.time_shards(nullptr);
}

void Worker::start() {
  transport_.set_ready([this, alive = std::weak_ptr<bool>(alive_)] {
    if (!alive.expired()) read_transport();
  });
  read_transport();
  warm_some();
}

void Worker::warm_some() {
  metrics_.weight_bytes_warmed += warmer_.warm(options_.warm_slice_bytes);
  loaded_permille_.store(warmer_.permille(), std::memory_order_relaxed);
  if (warmer_.done()) return;
  executor_.post([this, alive = std::weak_ptr<bool>(alive_)] {
    if (!alive.expired()) warm_some();
  });
}

void Worker::read_transport() {
  events_.clear();
  transport_.poll(events_);
  for (TransportEvent& event : events_) exchange_.handle(event);
  events_.clear();  // lets go of row memory
  show_epoch();
}

// The scheduler waits for it before it lets shards give up what only an older placement names.
void Worker::show_epoch() {
  if (!placed_ || epoch_.load(std::memory_order_relaxed) == exchange_.placement_epoch().value) return;
  const uint64_t epoch = exchange_.epoch().value;
  if (epoch_.exchange(epoch, std::memory_order_relaxed) == epoch) return;
  if (link_ != nullptr) link_->send(heartbeat());
}

Hello Worker::hello() {
  Hello h;
  h.role = Role::kAttention;
  h.name = options_.name;
  h.incarnation = transport_.self();
  h.numerics_id = options_.numerics_id;
  h.model_fingerprint = options_.model_fingerprint;
  h.threads = options_.threads;
  h.kv_blocks = options_.kv_blocks;
  h.max_batch_tokens = options_.max_batch_tokens;
  h.transport_address = transport_.address();
  h.num_layers = spec_.num_layers;
  h.num_experts = spec_.num_experts;
  h.max_positions = spec_.max_positions;
  h.vocab_size = spec_.vocab_size;
  return h;
}

void Worker::on_message(ToMember message) {
  if (std::holds_alternative<Welcome>(message)) {
    reset();
    ready_.store(true, std::memory_order_relaxed);
  } else if (auto* refusal = std::get_if<Refusal>(&message)) {
    if (on_refused_) on_refused_(*refusal);
  } else if (auto* plan = std::get_if<BatchPlan>(&message)) {
    on_plan(std::move(*plan));
  } else if (auto* update = std::get_if<PlacementUpdate>(&message)) {
    exchange_.set_placement(std::move(update->table), update->urgent);
  }
  // Drained concerns the process.
}

void Worker::on_down(const Status&) {
  ready_.store(false, std::memory_order_relaxed);
  reset();
}

// Drops all that a scheduler connection gave: sequences, plans, the running step. Connections to shards stay.
void Worker::reset() {
  for (uint32_t lane = 0; lane < options_.micro_batches; ++lane) exchange_.abandon(lane);
  exchange_.forget_epoch();
  epoch_.store(0, std::memory_order_relaxed);
  placed_ = false;
  exchange_.time_shards(nullptr);
  step_.reset();
  plans_.clear();
  sequences_.clear();
  last_plan_ = StepId();
  waiting_since_ = 0;
  planless_since_ = 0;
  plan_wait_ = 0;
  ++metrics_.resets;
  metrics_.sequences = 0;
  metrics_.queued_plans = 0;
}

// A step that is missing would be waited for until the scheduler's step_timeout_ms, with all that runs here.
void Worker::give_up(const std::string& cause) {
  if (on_refused_) on_refused_({StatusCode::kFailedPrecondition, cause});
}

void Worker::on_plan(BatchPlan plan) {
  if (plan.step.value != last_plan_.value + 1) {
    // The line is ordered and starts over when it breaks, so this is the scheduler's fault.
    ++metrics_.plans_out_of_order;
    return give_up("step " + std::to_string(plan.step.value) + " came after step " +
                   std::to_string(last_plan_.value));
  }
  if (plans_.size() >= options_.max_queued_plans) {
    ++metrics_.plans_dropped;
    return give_up("more plans wait than attention.max_queued_plans, " +
                   std::to_string(options_.max_queued_plans) +
                   ": it must be twice scheduler.steps_in_flight at least");
  }
  last_plan_ = plan.step;
  if (planless_since_ != 0) plan_wait_ += executor_.now() - std::exchange(planless_since_, 0);
  for (SeqId id : plan.ends) {
    if (const auto sequence = sequences_.find(id)) {
      sequence->ending = true;
      mask(*sequence);
    }
  }
  const TimePoint received = plan.timed ? executor_.now() : 0;
  plans_.push_back({std::move(plan), received});
  metrics_.queued_plans = plans_.size();
  wake();
}

void Worker::wake() {
  if (pump_posted_) return;
  pump_posted_ = true;
  executor_.post([this, alive = std::weak_ptr<bool>(alive_)] {
    if (alive.expired()) return;
    pump_posted_ = false;
    pump();
  });
}

// One micro-batch's layer, or the border between two steps.
void Worker::pump() {
  if (!step_) {
    if (plans_.empty()) return;
    QueuedPlan queued = std::move(plans_.front());
    plans_.pop_front();
    begin_step(std::move(queued));
  } else {
    uint32_t lane = 0;
    if (MicroBatch* batch = next_batch(lane)) {
      const TimePoint begin = executor_.now();
      if (waiting_since_ != 0) {
        step_->result.expert_wait_ns += begin - waiting_since_;
        waiting_since_ = 0;
      }
      const bool hides =
          std::any_of(step_->batches.begin(), step_->batches.end(),
                      [](const MicroBatch& other) { return other.phase == MicroBatch::Phase::kWaiting; });
      run_layer(*batch, lane);
      const Nanos busy = executor_.now() - begin;
      step_->result.compute_ns += busy;
      if (hides) metrics_.hidden_ns += busy;
    }
  }
  show_epoch();
  uint32_t lane = 0;
  bool done = true;
  for (const MicroBatch& batch : step_->batches) done = done && batch.phase == MicroBatch::Phase::kDone;
  if (done) {
    finish_step();
  } else if (next_batch(lane) != nullptr) {
    wake();
  } else if (waiting_since_ == 0) {
    waiting_since_ = executor_.now();
  }
}

}  // namespace conclave
