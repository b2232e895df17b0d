#include "scheduler/core/worker_planner.h"

#include <algorithm>
#include <set>

#include "libs/base/check.h"

namespace conclave::scheduler {

WorkerPlanner::WorkerPlanner(uint32_t kv_blocks, WorkerLimits limits, PlantedFaults faults)
    : limits_(limits), faults_(faults), pool_(kv_blocks) {
  CONCLAVE_CHECK(limits_.sequences >= 1 && limits_.sequences <= limits_.step_tokens);
  CONCLAVE_CHECK(limits_.chunk_tokens >= 1 && limits_.steps_in_flight >= 1);
}

uint32_t WorkerPlanner::blocks_for(uint64_t positions) {
  return static_cast<uint32_t>((positions + kBlockTokens - 1) / kBlockTokens);
}

std::vector<BlockId> WorkerPlanner::shareable_prefix(std::span<const TokenId> known,
                                                     const PrefixUse& prefix) const {
  if (!limits_.prefix_cache || !prefix.lookup || known.empty()) return {};
  return pool_.match(prefix.salt, known.first(known.size() - 1));
}

std::optional<uint32_t> WorkerPlanner::fit(std::span<const TokenId> known, uint32_t max_positions,
                                           const PrefixUse& prefix) const {
  if (running_.size() >= limits_.sequences) return std::nullopt;
  const std::vector<BlockId> shared = shareable_prefix(known, prefix);
  const uint64_t needed = blocks_for(max_positions) - shared.size() + pool_.cached_among(shared);
  if (needed > pool_.available()) return std::nullopt;
  return static_cast<uint32_t>(shared.size()) * kBlockTokens;
}

uint32_t WorkerPlanner::admit(SequenceStart start, uint32_t max_positions, PrefixUse prefix) {
  CONCLAVE_CHECK(!start.tokens.empty() && start.tokens.size() < max_positions);
  CONCLAVE_CHECK(running_.size() < limits_.sequences);
  Sequence seq;
  seq.blocks = shareable_prefix(start.tokens, prefix);
  seq.shared = static_cast<uint32_t>(seq.blocks.size());
  seq.promised = blocks_for(max_positions) - seq.shared;
  CONCLAVE_CHECK(pool_.admit(seq.blocks, seq.promised));
  const SeqId id = start.seq;
  const uint32_t cached = seq.shared * kBlockTokens;
  seq.known = static_cast<uint32_t>(start.tokens.size());
  seq.max_positions = max_positions;
  seq.next_sample = seq.known;
  seq.prompt_tokens = start.prompt_tokens;
  if (start.sampling.prompt_logprobs) seq.prompt_next = start.prompt_logprobs_from;
  seq.planned = cached;
  seq.tokens = start.tokens;
  seq.salt = std::move(prefix.salt);
  // A warm-up's keys and values are not those of its tokens.
  seq.own_pages = !limits_.prefix_cache || start.sampling.every_expert;
  seq.start = std::move(start);
  CONCLAVE_CHECK(sequences_.emplace(id, std::move(seq)).second);
  running_.push_back(id);
  return cached;
}

void WorkerPlanner::end(SeqId id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end() || it->second.ended) return;
  Sequence& seq = it->second;
  seq.ended = true;
  std::erase(running_, id);
  pool_.give_up_promise(seq.promised);
  seq.promised = 0;
  if (!seq.introduced) {  // no plan names it: nothing to wait for
    pool_.release(seq.blocks);
    sequences_.erase(it);
    return;
  }
  if (faults_.free_before_retire) {
    pool_.release(seq.blocks);
    seq.blocks.clear();
  }
  pending_ends_.push_back(id);
}

void WorkerPlanner::add_slice(BatchPlan& plan, Step& step, SeqId id, Sequence& seq, uint32_t count) {
  PlanSlice slice;
  slice.seq = id;
  slice.start = seq.planned;
  slice.count = count;
  if (faults_.short_chunk && seq.planned > 0 && count > 1) {
    ++slice.start;
    --slice.count;
  }
  const uint32_t end = seq.planned + count;
  if (!seq.introduced) slice.new_blocks = seq.blocks;  // shared pages: the slice begins after them
  while (seq.blocks.size() < blocks_for(end)) {
    CONCLAVE_CHECK(seq.promised > 0);
    --seq.promised;
    seq.blocks.push_back(pool_.take());
    slice.new_blocks.push_back(seq.blocks.back());
  }
  slice.sample = end >= seq.known;
  if (slice.sample) step.samples.push_back(id);
  // The row at p yields the prompt token at p + 1.
  const uint32_t prompt_end = std::min(end + 1, seq.prompt_tokens);
  if (seq.prompt_next > 0 && seq.prompt_next < prompt_end) {
    step.prompts.push_back({id, seq.prompt_next, prompt_end - seq.prompt_next});
    seq.prompt_next = prompt_end;
  }
  seq.planned = end;
  step.slices.push_back({id, end});
  if (!seq.introduced) {
    seq.introduced = true;
    plan.starts.push_back(*std::move(seq.start));
    seq.start.reset();
  }
  plan.slices.push_back(std::move(slice));
}

std::optional<BatchPlan> WorkerPlanner::plan(bool ends_only, TimePoint now) {
  if (in_flight_.size() >= 2 * limits_.steps_in_flight) return std::nullopt;
  ends_only = ends_only || working_steps() >= limits_.steps_in_flight;
  BatchPlan plan;
  Step step;
  PlanCounts counts;
  uint32_t budget = limits_.step_tokens;
  if (!ends_only) {
    // A sequence past its prefill has one slice a step until all its tokens are granted: the slice at
    // position p yields the token at p + 1, and the last token's own position is never computed.
    for (const SeqId id : running_) {
      Sequence& seq = sequences_.at(id);
      if (seq.planned < seq.known || seq.planned + 1 >= seq.max_positions) continue;
      add_slice(plan, step, id, seq, 1);
      --budget;
      ++counts.decode_slices;
    }
    for (const SeqId id : running_) {
      if (budget == 0) break;
      Sequence& seq = sequences_.at(id);
      if (seq.planned >= seq.known) continue;
      const uint32_t count = std::min({seq.known - seq.planned, limits_.chunk_tokens, budget});
      add_slice(plan, step, id, seq, count);
      budget -= count;
      counts.prefill_tokens += count;
    }
  }
  if (plan.slices.empty() && pending_ends_.empty()) return std::nullopt;
  plan.step = step.id = StepId(next_step_++);
  plan.ends = step.ends = std::move(pending_ends_);
  pending_ends_.clear();
  if (in_flight_.empty()) owing_since_ = now;
  in_flight_.push_back(std::move(step));
  last_plan_ = counts;
  return plan;
}

uint32_t WorkerPlanner::working_steps() const {
  return static_cast<uint32_t>(std::count_if(in_flight_.begin(), in_flight_.end(),
                                             [](const Step& step) { return !step.slices.empty(); }));
}

Status WorkerPlanner::check_prompts(const StepResult& result, const Step& step) const {
  std::set<SeqId> answered;
  for (const PromptLogprobs& piece : result.prompt_logprobs) {
    const std::string name = "prompt log-probabilities of sequence " + std::to_string(piece.seq.value);
    const auto want = std::find_if(step.prompts.begin(), step.prompts.end(),
                                   [&](const Step::Prompt& p) { return p.seq == piece.seq; });
    if (want == step.prompts.end() || !answered.insert(piece.seq).second) {
      return invalid_field("prompt_logprobs", name + " are not due in the step");
    }
    if (piece.start != want->start || piece.tokens.size() != want->count) {
      return invalid_field("prompt_logprobs", name + ": " + std::to_string(piece.tokens.size()) + " from " +
                                                  std::to_string(piece.start) + " where " +
                                                  std::to_string(want->count) + " from " +
                                                  std::to_string(want->start) + " are due");
    }
  }
  for (const StepResult::Failure& failure : result.failures) answered.insert(failure.seq);
  for (const Step::Prompt& want : step.prompts) {
    if (!answered.contains(want.seq) && !sequences_.at(want.seq).ended) {
      return invalid_field("prompt_logprobs",
                           "sequence " + std::to_string(want.seq.value) + " has none of those due");
    }
  }
  for (const SeqId id : result.released) {
    const auto it = sequences_.find(id);
    if (it == sequences_.end() || !it->second.ended || !it->second.introduced) {
      return invalid_field("released", "sequence " + std::to_string(id.value) + " has not been ended");
    }
  }
  return OkStatus();
}

Status WorkerPlanner::check_result(const StepResult& result) const {
  if (in_flight_.empty()) {
    return invalid_field(
        "step", "result of step " + std::to_string(result.step.value) + ", but no step is in flight");
  }
  const Step& step = in_flight_.front();
  if (result.step != step.id) {
    return invalid_field("step", "result of step " + std::to_string(result.step.value) + " where step " +
                                     std::to_string(step.id.value) + " is due");
  }
  const std::set<SeqId> expected(step.samples.begin(), step.samples.end());
  std::set<SeqId> answered;
  for (const SampledToken& token : result.sampled) {
    const std::string name = "sampled sequence " + std::to_string(token.seq.value);
    if (!expected.contains(token.seq))
      return invalid_field("sampled", name + " has no sampling slice in the step");
    if (!answered.insert(token.seq).second) return invalid_field("sampled", name + " appears twice");
    const Sequence& seq = sequences_.at(token.seq);
    if (seq.ended) continue;
    if (token.position != seq.next_sample) {
      return invalid_field("position", name + " has position " + std::to_string(token.position) + " where " +
                                           std::to_string(seq.next_sample) + " is due");
    }
    if (limits_.vocab_size != 0 && token.token >= limits_.vocab_size) {
      return invalid_field("token", name + " has token " + std::to_string(token.token) +
                                        ", the vocabulary has " + std::to_string(limits_.vocab_size));
    }
    if (token.finish != FinishReason::kNone && token.finish != FinishReason::kStop &&
        token.finish != FinishReason::kLength) {
      return invalid_field("finish", name + " finished for a reason that is not a worker's");
    }
  }
  for (const StepResult::Failure& failure : result.failures) {
    if (!sequences_.contains(failure.seq)) {
      return invalid_field("failures", "sequence " + std::to_string(failure.seq.value) + " is unknown");
    }
    answered.insert(failure.seq);
  }
  for (const SeqId id : step.samples) {
    if (!answered.contains(id) && !sequences_.at(id).ended) {
      return invalid_field("sampled", "sequence " + std::to_string(id.value) + " has no token");
    }
  }
  return check_prompts(result, step);
}

StatusOr<StepOutcome> WorkerPlanner::on_result(const StepResult& result, TimePoint now) {
  RETURN_IF_ERROR(check_result(result));
  const Step step = std::move(in_flight_.front());
  in_flight_.pop_front();
  owing_since_ = now;
  StepOutcome outcome;
  for (const PromptLogprobs& piece : result.prompt_logprobs) {
    if (!sequences_.at(piece.seq).ended) outcome.prompt_logprobs.push_back(piece);
  }
  // What the step computed may be shared, unless its rows failed or were masked because their sequence ended.
  std::set<SeqId> failed;
  for (const StepResult::Failure& failure : result.failures) failed.insert(failure.seq);
  for (const Granted& slice : step.slices) {
    Sequence& seq = sequences_.at(slice.seq);
    if (!seq.ended && !failed.contains(slice.seq)) publish(seq, slice.end);
  }
  for (const SampledToken& token : result.sampled) {
    Sequence& seq = sequences_.at(token.seq);
    if (seq.ended) {
      ++outcome.discarded;
      continue;
    }
    seq.next_sample = token.position + 1;
    seq.tokens.push_back(token.token);
    outcome.sampled.push_back(token);
    // Nothing beyond this position was granted, so this is the end whether or not the worker counted the
    // same.
    if (seq.next_sample >= seq.max_positions && token.finish == FinishReason::kNone) {
      outcome.sampled.back().finish = FinishReason::kLength;
    }
    if (outcome.sampled.back().finish != FinishReason::kNone) end(token.seq);
  }
  for (const StepResult::Failure& failure : result.failures) {
    if (sequences_.at(failure.seq).ended) continue;
    outcome.failures.push_back(failure);
    end(failure.seq);
  }
  for (const SeqId id : result.released) {
    std::vector<BlockId>& blocks = sequences_.at(id).blocks;
    if (faults_.leak_block && !blocks.empty()) blocks.pop_back();
    pool_.release(blocks);
    blocks.clear();
  }
  for (const SeqId id : step.ends) retire(id);
  return outcome;
}

void WorkerPlanner::publish(Sequence& seq, uint32_t computed) {
  while (!seq.own_pages && (seq.shared + 1) * kBlockTokens <= computed) {
    CONCLAVE_CHECK(computed <= seq.tokens.size());
    KvCache::PageTokens page;
    std::copy_n(seq.tokens.begin() + seq.shared * kBlockTokens, kBlockTokens, page.begin());
    std::optional<BlockId> parent;
    if (seq.shared > 0 && !faults_.share_by_tokens) parent = seq.blocks[seq.shared - 1];
    if (pool_.publish(seq.blocks[seq.shared], parent, seq.salt, page)) {
      ++seq.shared;
    } else {
      seq.own_pages = true;
    }
  }
}

void WorkerPlanner::retire(SeqId id) {
  const auto it = sequences_.find(id);
  CONCLAVE_CHECK(it != sequences_.end() && it->second.ended);
  std::vector<BlockId>& blocks = it->second.blocks;
  if (faults_.leak_block && !blocks.empty()) blocks.pop_back();
  pool_.release(blocks);
  sequences_.erase(it);
}

Status WorkerPlanner::audit() const {
  uint64_t used = 0;
  uint64_t promised = 0;
  uint32_t live = 0;
  std::set<BlockId> owned, shared;
  for (const auto& [id, seq] : sequences_) {
    const std::string name = "sequence " + std::to_string(id.value);
    promised += seq.promised;
    for (size_t i = 0; i < seq.blocks.size(); ++i) {
      const BlockId block = seq.blocks[i];
      const bool twice =
          i < seq.shared ? owned.contains(block) : shared.contains(block) || owned.contains(block);
      if (twice) return internal_error(name + " shares block " + std::to_string(block));
      if ((i < seq.shared ? shared : owned).insert(block).second) ++used;
    }
    if (seq.ended) continue;
    ++live;
    if (seq.blocks.size() != blocks_for(seq.planned))
      return internal_error(name + " has the wrong number of blocks");
    if (seq.blocks.size() + seq.promised != blocks_for(seq.max_positions)) {
      return internal_error(name + " is not covered by its promise");
    }
  }
  if (used != pool_.used()) {
    return internal_error("sequences own " + std::to_string(used) + " blocks, the pool counts " +
                          std::to_string(pool_.used()));
  }
  RETURN_IF_ERROR(pool_.audit());
  if (promised != pool_.promised()) return internal_error("promises differ from the pool's count");
  if (live != running_.size()) return internal_error("running list differs from the live sequences");
  if (working_steps() > limits_.steps_in_flight || in_flight_.size() > 2 * limits_.steps_in_flight) {
    return internal_error("too many steps in flight");
  }
  if (running_.size() > limits_.sequences) return internal_error("too many running sequences");
  return OkStatus();
}

}  // namespace conclave::scheduler
