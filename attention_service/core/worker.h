// An attention worker: executes the scheduler's plans strictly in order, layer by layer, asking shards for
// the experts.
//
// Threading: everything on the executor, construction and destruction too (or after the executor stopped).
// One micro-batch's layer is one task, so that transport events and new plans are seen in between.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention_service/core/expert_exchange.h"
#include "attention_service/core/kv_store.h"
#include "attention_service/core/layer_math.h"
#include "attention_service/core/micro_batch.h"
#include "attention_service/core/micro_batch_tuner.h"
#include "attention_service/core/options.h"
#include "attention_service/core/sequence_table.h"
#include "attention_service/core/weight_warmer.h"
#include "libs/kernels/ops.h"
#include "libs/model/model_spec.h"
#include "libs/model/row_pool.h"
#include "libs/model/weights.h"
#include "libs/ports/executor.h"
#include "libs/ports/expert_transport.h"
#include "libs/ports/member_link.h"

namespace conclave {

class Worker final : public MemberHandler {
 public:
  // All references are borrowed and outlive the worker. RESOURCE_EXHAUSTED or INVALID_ARGUMENT when the KV
  // cache cannot be reserved.
  static StatusOr<std::unique_ptr<Worker>> create(Executor& executor, ExpertTransport& transport,
                                                  const ModelSpec& spec, const DenseWeights& weights,
                                                  kernels::Context kernels, WorkerOptions options);
  ~Worker() override;

  // Before start(). The link is borrowed.
  void set_link(MemberLink* link) { link_ = link; }
  // Called when the scheduler refuses this incarnation for good, or sends plans that cannot be executed.
  void set_on_refused(std::function<void(const Refusal&)> f) { on_refused_ = std::move(f); }
  // Begins to take events from the transport.
  void start();

  Hello hello() override;
  // Welcome drops every sequence: what an older scheduler connection gave is void.
  void on_message(ToMember message) override;
  void on_down(const Status& cause) override;

  // A copy, since it lists the shards of now.
  WorkerMetrics metrics() const {
    WorkerMetrics seen = metrics_;
    seen.links = exchange_.links();
    return seen;
  }
  // Any thread; what heartbeats carry.
  Epoch epoch() const { return Epoch(epoch_.load(std::memory_order_relaxed)); }
  uint32_t loaded_permille() const { return loaded_permille_.load(std::memory_order_relaxed); }
  Heartbeat heartbeat() const { return {epoch(), loaded_permille()}; }
  // Whether there is anything to compute, and whom the running step waits for, for people; empty: nobody.
  bool busy() const { return step_.has_value() || !plans_.empty(); }
  std::string waiting_for() const { return step_ ? exchange_.waiting_for() : std::string(); }
  // Any thread: whether a scheduler has welcomed it.
  bool ready() const { return ready_.load(std::memory_order_relaxed); }

 private:
  struct Step {
    StepResult result;
    std::vector<std::pair<uint32_t, SampledToken>> sampled;  // by plan index
    std::map<uint32_t, PromptLogprobs> prompt_logprobs;      // the same
    std::vector<MicroBatch> batches;
    uint32_t rows = 0;
    bool prefill = false;
    TimePoint begun = 0;
    // Of a plan that asks how its time goes.
    struct Timed {
      Nanos queued = 0;
      WorkerMetrics before;  // of the beginning
      StepShards shards;
    };
    std::unique_ptr<Timed> timed;
  };
  struct QueuedPlan {
    BatchPlan plan;
    TimePoint received = 0;
  };

  Worker(Executor& executor, ExpertTransport& transport, const ModelSpec& spec, const DenseWeights& weights,
         kernels::Context kernels, WorkerOptions options, KvStore kv);

  // --- worker.cc ---
  void wake();  // posts pump() unless it is posted already
  void pump();
  void read_transport();
  void show_epoch();
  void reset();
  void on_plan(BatchPlan plan);
  void give_up(const std::string& cause);
  // Reads the next of its weights, a slice a task, so that plans go on.
  void warm_some();

  // --- worker_step.cc ---
  void begin_step(QueuedPlan queued);
  // Fills in StepResult::timing.
  static void note_timing(Step& step, const WorkerMetrics& after, TimePoint now);
  void copy_pages(const BatchPlan& plan);
  void admit_slice(const PlanSlice& slice, uint32_t index, uint32_t& rows,
                   std::vector<MicroBatchSlice>& admitted);
  MicroBatch* next_batch(uint32_t& lane);
  void run_layer(MicroBatch& batch, uint32_t lane);
  void take_every_expert(MicroBatch& batch) const;  // instead of the gate's choice, where asked for
  void run_head(MicroBatch& batch);
  static bool wants_prompt_logprob(const Sequence& sequence, uint32_t position);
  void prompt_row(const MicroBatchSlice& slice, uint32_t position, std::span<const float> logits);
  // What decides the token after the slice; borrows from its sequence.
  kernels::SampleRow draw_of(const MicroBatchSlice& slice, std::span<float> logits) const;
  void take_sample(const MicroBatchSlice& slice, StatusOr<kernels::Sampled> sampled);
  void mask(const Sequence& sequence);
  void fail(Sequence& sequence, const std::string& cause);
  void fail_batch(uint32_t lane, const Status& cause);
  void finish_step();

  Executor& executor_;
  ExpertTransport& transport_;
  const ModelSpec& spec_;
  const kernels::Context kernels_;
  const WorkerOptions options_;
  MemberLink* link_ = nullptr;
  std::function<void(const Refusal&)> on_refused_;

  WorkerMetrics metrics_;
  SequenceTable sequences_;
  KvStore kv_;
  LayerMath math_;
  MicroBatchTuner tuner_;
  RowPool pool_;
  ExpertExchange exchange_;
  std::vector<TransportEvent> events_;
  std::deque<QueuedPlan> plans_;
  StepId last_plan_;  // newest received from this scheduler connection
  std::optional<Step> step_;
  WeightWarmer warmer_;
  TimePoint waiting_since_ = 0;   // while a step has nothing to compute; 0: it has
  TimePoint planless_since_ = 0;  // between steps: no plan is here though sequences live; 0: not so
  Nanos plan_wait_ = 0;           // for the result of the next step
  bool pump_posted_ = false;
  bool placed_ = false;  // a placement of this scheduler connection is in use
  std::atomic<uint64_t> epoch_{0};
  std::atomic<uint32_t> loaded_permille_{0};
  std::atomic<bool> ready_{false};
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // posted tasks hold it weakly
};

}  // namespace conclave
