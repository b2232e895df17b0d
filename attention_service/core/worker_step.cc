// One step of a worker: from a plan's slices to sampled tokens.
#include <algorithm>
#include <utility>

#include "attention_service/core/worker.h"
#include "libs/base/random.h"

namespace conclave {

void Worker::begin_step(QueuedPlan queued) {
  const BatchPlan& plan = queued.plan;
  step_.emplace();
  step_->begun = executor_.now();
  if (plan.timed) {
    step_->timed = std::make_unique<Step::Timed>();
    step_->timed->queued = step_->begun - queued.received;
    step_->timed->before = metrics_;
    exchange_.time_shards(&step_->timed->shards);
  }
  step_->result.step = plan.step;
  step_->result.plan_wait_ns = std::exchange(plan_wait_, 0);
  for (SeqId id : plan.ends) sequences_.end(id);
  for (const SequenceStart& start : plan.starts) {
    if (const Status started = sequences_.start(start); !started.ok()) {
      step_->result.failures.push_back({start.seq, field_of(started) + ": " + message_of(started)});
    }
  }
  // A plan that waits may have ended a sequence that starts only now.
  for (const QueuedPlan& later : plans_) {
    for (SeqId id : later.plan.ends) {
      if (const auto sequence = sequences_.find(id)) sequence->ending = true;
    }
  }
  copy_pages(plan);
  std::vector<MicroBatchSlice> admitted;
  uint32_t rows = 0;
  for (uint32_t i = 0; i < plan.slices.size(); ++i) admit_slice(plan.slices[i], i, rows, admitted);
  if (!admitted.empty()) {
    step_->rows = rows;
    step_->prefill = std::any_of(admitted.begin(), admitted.end(), [](const auto& s) { return s.count > 1; });
    const uint32_t count =
        options_.micro_batch_tuning ? tuner_.choose(rows, step_->prefill) : options_.micro_batches;
    step_->batches = split_step(std::move(admitted), count, options_.micro_batch_min_rows);
  }
  metrics_.rows += rows;
  metrics_.sequences = sequences_.size();
  metrics_.queued_plans = plans_.size();
  waiting_since_ = 0;
}

// A copy that cannot be made fails the sequences that were to read it.
void Worker::copy_pages(const BatchPlan& plan) {
  if (plan.copies.empty()) return;
  const TimePoint begin = executor_.now();
  for (const PageCopy& copy : plan.copies) {
    const Status ok = sequences_.copy(copy);
    if (ok.ok()) {
      kv_.copy(copy.from, copy.to);
      ++metrics_.copied_pages;
      continue;
    }
    for (const PlanSlice& slice : plan.slices) {
      const auto& blocks = slice.new_blocks;
      const auto sequence = sequences_.find(slice.seq);
      if (sequence != nullptr && std::find(blocks.begin(), blocks.end(), copy.to) != blocks.end()) {
        fail(*sequence, field_of(ok) + ": " + message_of(ok));
      }
    }
  }
  step_->result.compute_ns += executor_.now() - begin;
}

void Worker::admit_slice(const PlanSlice& slice, uint32_t index, uint32_t& rows,
                         std::vector<MicroBatchSlice>& admitted) {
  const std::shared_ptr<Sequence> sequence = sequences_.find(slice.seq);
  if (sequence == nullptr) {
    auto& failures = step_->result.failures;
    const bool told =
        std::any_of(failures.begin(), failures.end(), [&](const auto& f) { return f.seq == slice.seq; });
    if (!told) failures.push_back({slice.seq, "plan.slices.seq: unknown sequence"});
    return;
  }
  if (sequence->finished || sequence->ending) return;  // planned before the scheduler knew
  Status ok;
  if (slice.count > options_.max_batch_tokens - rows) {
    ok = invalid_field("plan.slices",
                       "more rows than max_batch_tokens " + std::to_string(options_.max_batch_tokens));
  } else if (std::any_of(admitted.begin(), admitted.end(),
                         [&](const auto& a) { return a.sequence == sequence; })) {
    ok = invalid_field("plan.slices", "the same sequence twice");
  } else {
    ok = sequences_.extend(*sequence, slice);
  }
  if (!ok.ok()) {
    fail(*sequence, field_of(ok) + ": " + message_of(ok));
    return;
  }
  rows += slice.count;
  admitted.push_back({sequence, slice.start, slice.count, slice.sample, index});
}

// The batch whose layer may run now: the one furthest behind, so that attention of one overlaps experts of
// another.
MicroBatch* Worker::next_batch(uint32_t& lane) {
  MicroBatch* best = nullptr;
  for (uint32_t i = 0; i < step_->batches.size(); ++i) {
    MicroBatch& batch = step_->batches[i];
    if (batch.phase != MicroBatch::Phase::kReady) continue;
    if (batch.after_previous) {
      const MicroBatch& previous = step_->batches[i - 1];
      if (previous.phase != MicroBatch::Phase::kDone && previous.layer <= batch.layer) continue;
    }
    if (best == nullptr || batch.layer < best->layer) {
      best = &batch;
      lane = i;
    }
  }
  return best;
}

void Worker::run_layer(MicroBatch& batch, uint32_t lane) {
  TimePoint mark = executor_.now();
  const auto lap = [&] {
    const TimePoint now = executor_.now();
    return now - std::exchange(mark, now);
  };
  if (batch.layer == 0) {
    math_.embed(batch);
    lap();
  } else if (batch.combine_first) {
    math_.combine(batch, exchange_.tracker(lane));
    batch.combine_first = false;
    metrics_.combine_ns += lap();
  }
  metrics_.masked_rows +=
      batch.drop_rows(spec_.hidden_size, [](const Sequence& s) { return s.ending || s.finished; });
  if (batch.rows == 0) {
    batch.phase = MicroBatch::Phase::kDone;
  } else if (batch.layer == spec_.num_layers) {
    run_head(batch);
    metrics_.head_ns += lap();
    batch.phase = MicroBatch::Phase::kDone;
  } else {
    math_.attention(batch, batch.layer);
    RowBuffer rows = math_.gate(batch, batch.layer, pool_);
    take_every_expert(batch);
    metrics_.attention_ns += lap();
    batch.phase = MicroBatch::Phase::kWaiting;
    batch.combine_first = true;
    const uint32_t layer = batch.layer++;
    exchange_.begin(lane, layer, batch.rows, spec_.experts_per_token, batch.ids, std::move(rows));
    metrics_.dispatch_ns += lap();
  }
}

void Worker::take_every_expert(MicroBatch& batch) const {
  const uint64_t top_k = spec_.experts_per_token;
  size_t at = 0;
  for (const MicroBatchSlice& slice : batch.slices) {
    const size_t end = at + slice.count * top_k;
    if (slice.sequence->sampling.every_expert) {
      for (uint64_t pair = slice.start * top_k; at < end; ++at, ++pair)
        batch.ids[at] = static_cast<uint16_t>(pair % spec_.num_experts);
    }
    at = end;
  }
}

void Worker::run_head(MicroBatch& batch) {
  std::vector<uint32_t> rows;
  std::vector<const MicroBatchSlice*> slice_of;  // parallel to rows
  uint32_t row = 0;
  for (const MicroBatchSlice& slice : batch.slices) {
    for (uint32_t i = 0; i < slice.count; ++i, ++row) {
      const bool samples = slice.sample && i + 1 == slice.count;
      if (!options_.logits_observer && !samples && !wants_prompt_logprob(*slice.sequence, slice.start + i)) {
        continue;
      }
      rows.push_back(row);
      slice_of.push_back(&slice);
    }
  }
  math_.logits(batch, rows, options_.max_logit_rows,
               [&](size_t first, std::span<const std::span<float>> all) {
                 std::vector<kernels::SampleRow> draws;
                 std::vector<const MicroBatchSlice*> drawing;  // parallel to draws
                 for (size_t i = 0; i < all.size(); ++i) {
                   const MicroBatchSlice& slice = *slice_of[first + i];
                   const uint32_t position = batch.positions[rows[first + i]];
                   if (slice.sequence->finished) continue;  // failed at a row before
                   if (options_.logits_observer)
                     options_.logits_observer(slice.sequence->request, position, all[i]);
                   if (wants_prompt_logprob(*slice.sequence, position)) prompt_row(slice, position, all[i]);
                   if (slice.sequence->finished || !slice.sample || position + 1 != slice.start + slice.count)
                     continue;
                   draws.push_back(draw_of(slice, all[i]));
                   drawing.push_back(&slice);
                 }
                 kernels::sample_rows(kernels_, draws);
                 for (size_t i = 0; i < draws.size(); ++i)
                   take_sample(*drawing[i], std::move(draws[i].result));
               });
}

// Whether the row at `position` yields a log-probability of the prompt, that of the token after it.
bool Worker::wants_prompt_logprob(const Sequence& sequence, uint32_t position) {
  return sequence.sampling.prompt_logprobs && position + 1 < sequence.prompt_tokens &&
         position + 1 >= sequence.prompt_logprobs_from;
}

void Worker::prompt_row(const MicroBatchSlice& slice, uint32_t position, std::span<const float> logits) {
  Sequence& sequence = *slice.sequence;
  const SamplingParams& params = sequence.sampling;
  StatusOr<PromptLogprob> logprob = kernels::token_logprob(
      kernels_, logits, params.vocab_limit, sequence.tokens[position + 1], params.prompt_top_logprobs);
  if (!logprob.ok()) {
    fail(sequence, message_of(logprob.status()));
    return;
  }
  // Rows of a sequence come in order, though micro-batches may part them.
  PromptLogprobs& piece = step_->prompt_logprobs[slice.plan_index];
  if (piece.tokens.empty()) {
    piece.seq = sequence.id;
    piece.start = position + 1;
  }
  piece.tokens.push_back(*std::move(logprob));
}

kernels::SampleRow Worker::draw_of(const MicroBatchSlice& slice, std::span<float> logits) const {
  const Sequence& sequence = *slice.sequence;
  const SamplingParams& params = sequence.sampling;
  const uint32_t position = slice.start + slice.count;           // of the new token
  const uint32_t generated = position - sequence.prompt_tokens;  // before it
  kernels::SampleRow row;
  row.logits = logits;
  row.params = &params;
  row.u = uniform_draw(params.seed, sequence.choice, position, DrawPurpose::kSample);
  row.state.seen = sequence.counts.seen();
  if (generated < params.min_tokens) row.state.forbidden = params.stop_token_ids;
  return row;
}

void Worker::take_sample(const MicroBatchSlice& slice, StatusOr<kernels::Sampled> sampled) {
  Sequence& sequence = *slice.sequence;
  const SamplingParams& params = sequence.sampling;
  const uint32_t position = slice.start + slice.count;
  const uint32_t generated = position - sequence.prompt_tokens;
  if (!sampled.ok()) {
    fail(sequence, message_of(sampled.status()));
    return;
  }
  const auto is_stop = [&](TokenId token) {
    return std::find(params.stop_token_ids.begin(), params.stop_token_ids.end(), token) !=
           params.stop_token_ids.end();
  };
  SampledToken out;
  out.seq = sequence.id;
  out.position = position;
  out.token = sampled->token;
  out.logprob = sampled->logprob;
  out.top_logprobs = std::move(sampled->top);
  if (is_stop(out.token)) {
    out.finish = FinishReason::kStop;
  } else if (generated + 1 >= params.max_tokens || position + 1 >= spec_.max_positions) {
    out.finish = FinishReason::kLength;
  }
  sequence.finished = out.finish != FinishReason::kNone;
  sequence.append(out.token);
  ++metrics_.sampled_tokens;
  step_->sampled.emplace_back(slice.plan_index, std::move(out));
}

// Takes a sequence's rows out of what runs: no output is awaited or asked for again; the next layer leaves
// them out.
void Worker::mask(const Sequence& sequence) {
  if (!step_) return;
  for (uint32_t lane = 0; lane < step_->batches.size(); ++lane) {
    const MicroBatch& batch = step_->batches[lane];
    if (batch.phase != MicroBatch::Phase::kWaiting) continue;
    uint32_t row = 0;
    for (const MicroBatchSlice& slice : batch.slices) {
      if (slice.sequence.get() == &sequence) {
        for (uint32_t i = 0; i < slice.count; ++i) exchange_.mask(lane, row + i);
      }
      row += slice.count;
    }
  }
}

void Worker::fail(Sequence& sequence, const std::string& cause) {
  if (sequence.finished) return;
  sequence.finished = true;
  ++metrics_.failed_sequences;
  step_->result.failures.push_back({sequence.id, cause});
  mask(sequence);
}

void Worker::fail_batch(uint32_t lane, const Status& cause) {
  // The transport refuses the rows themselves: these sequences cannot go on.
  std::vector<std::shared_ptr<Sequence>> lost;
  for (const MicroBatchSlice& slice : step_->batches[lane].slices) lost.push_back(slice.sequence);
  for (const auto& sequence : lost) fail(*sequence, message_of(cause));
}

void Worker::note_timing(Step& step, const WorkerMetrics& after, TimePoint now) {
  const WorkerMetrics& before = step.timed->before;
  StepTiming timing;
  timing.queued_ns = std::max<Nanos>(step.timed->queued, 0);
  timing.wall_ns = now - step.begun;
  timing.attention_ns = after.attention_ns - before.attention_ns;
  timing.dispatch_ns = after.dispatch_ns - before.dispatch_ns;
  timing.combine_ns = after.combine_ns - before.combine_ns;
  timing.head_ns = after.head_ns - before.head_ns;
  timing.hidden_ns = after.hidden_ns - before.hidden_ns;
  timing.rows = step.rows;
  timing.micro_batches = static_cast<uint32_t>(step.batches.size());
  timing.retried_items = static_cast<uint32_t>(after.exchange.retried_items - before.exchange.retried_items);
  timing.deadlines = static_cast<uint32_t>(after.exchange.deadlines - before.exchange.deadlines);
  timing.shards = step.timed->shards.list();
  step.result.timing = std::move(timing);
}

void Worker::finish_step() {
  Step step = std::move(*step_);
  step_.reset();
  const TimePoint now = executor_.now();
  tuner_.observe(step.rows, step.prefill, static_cast<uint32_t>(step.batches.size()), now - step.begun);
  metrics_.step_times.observe(now - step.begun);
  if (step.timed) {
    exchange_.time_shards(nullptr);
    note_timing(step, metrics_, now);
  }
  std::sort(step.sampled.begin(), step.sampled.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [index, token] : step.sampled) step.result.sampled.push_back(std::move(token));
  for (auto& [index, piece] : step.prompt_logprobs) {
    const auto sequence = sequences_.find(piece.seq);
    if (sequence == nullptr || sequence->ending) continue;  // perhaps not all of its rows were computed
    const bool failed = std::any_of(step.result.failures.begin(), step.result.failures.end(),
                                    [&](const auto& f) { return f.seq == piece.seq; });
    if (!failed) step.result.prompt_logprobs.push_back(std::move(piece));
  }
  // No step that is still to come has rows of these.
  for (const QueuedPlan& later : plans_) {
    for (const SeqId id : later.plan.ends) {
      const auto sequence = sequences_.find(id);
      if (sequence == nullptr || sequence->released) continue;
      sequence->released = true;
      step.result.released.push_back(id);
    }
  }
  ++metrics_.steps;
  metrics_.plan_wait_ns += step.result.plan_wait_ns;
  metrics_.compute_ns += step.result.compute_ns;
  metrics_.expert_wait_ns += step.result.expert_wait_ns;
  if (link_ != nullptr) link_->send(std::move(step.result));
  if (!plans_.empty()) {
    wake();
  } else if (sequences_.any_live()) {
    planless_since_ = executor_.now();
  }
}

}  // namespace conclave
