#include "scheduler/core/worker_planner.h"

#include <algorithm>
#include <set>

#include "libs/base/check.h"
#include "scheduler/core/requests.h"

namespace conclave::scheduler {

WorkerPlanner::WorkerPlanner(uint32_t kv_blocks, WorkerLimits limits, PlantedFaults faults)
    : limits_(limits), faults_(faults), pool_(kv_blocks) {
  CONCLAVE_CHECK(limits_.sequences >= 1 && limits_.sequences <= limits_.step_tokens);
  CONCLAVE_CHECK(limits_.chunk_tokens >= 1 && limits_.steps_in_flight >= 1);
}

uint32_t WorkerPlanner::blocks_for(uint64_t positions) {
  return static_cast<uint32_t>((positions + kBlockTokens - 1) / kBlockTokens);
}

TokenId WorkerPlanner::token_at(const Sequence& seq, size_t position) {
  const std::vector<TokenId>& prompt = seq.owner->request->accepted.prompt;
  return position < prompt.size() ? prompt[position] : seq.owner->generated[position - prompt.size()];
}

WorkerPlanner::Begin WorkerPlanner::begin(std::span<const TokenId> known, const PrefixUse& prefix) const {
  Begin result;
  if (!limits_.prefix_cache || !prefix.lookup || known.empty()) return result;
  result.shared = pool_.match(prefix.salt, known.first(known.size() - 1));
  const size_t pages = result.shared.size();
  result.planned = static_cast<uint32_t>(pages) * kBlockTokens;
  const auto it = prefix.like ? sequences_.find(prefix.like) : sequences_.end();
  if (it == sequences_.end() || it->second.ended || it->second.blocks.size() <= pages) return result;
  const Sequence& other = it->second;
  const size_t limit = std::min<size_t>({known.size() - 1, other.computed, (pages + 1) * kBlockTokens});
  size_t same = 0;
  while (same < limit && known[same] == token_at(other, same)) ++same;
  if (same <= result.planned) return result;
  result.copied = other.blocks[pages];
  result.planned = static_cast<uint32_t>(same);
  return result;
}

uint32_t WorkerPlanner::first_pages(std::span<const TokenId> known, Room room, const Begin& begin) const {
  const uint64_t reserved =
      std::min<uint64_t>(room.max_positions, known.size() + uint64_t{room.reserve_positions});
  return blocks_for(reserved) - static_cast<uint32_t>(begin.shared.size());
}

std::optional<uint32_t> WorkerPlanner::fit(std::span<const TokenId> known, Room room,
                                           const PrefixUse& prefix) const {
  if (running_.size() >= limits_.sequences || owes_prefill()) return std::nullopt;
  const Begin start = begin(known, prefix);
  const uint64_t needed = uint64_t{first_pages(known, room, start)} + pool_.cached_among(start.shared) +
                          uint64_t{running_.size()} * limits_.growth_pages;
  if (needed > pool_.available()) return std::nullopt;
  return start.planned;
}

uint32_t WorkerPlanner::admit(SequenceStart start, Room room, Rank rank, PrefixUse prefix, Choice& owner) {
  CONCLAVE_CHECK(!start.tokens.empty() && start.tokens.size() < room.max_positions);
  CONCLAVE_CHECK(running_.size() < limits_.sequences);
  Begin first = begin(start.tokens, prefix);
  const auto [it, fresh] = sequences_.try_emplace(start.seq);
  CONCLAVE_CHECK(fresh);
  Sequence& seq = it->second;
  seq.id = start.seq;
  seq.owner = &owner;
  seq.timed = owner.request != nullptr && owner.request->timeline != nullptr;
  seq.rank = rank;
  seq.promised = first_pages(start.tokens, room, first);
  seq.blocks = std::move(first.shared);
  seq.shared = static_cast<uint32_t>(seq.blocks.size());
  CONCLAVE_CHECK(pool_.admit(seq.blocks, seq.promised));
  if (first.copied) {
    --seq.promised;
    seq.blocks.push_back(pool_.take());
    if (!faults_.copy_nothing) pending_copies_.push_back({*first.copied, seq.blocks.back()});
  }
  seq.known = static_cast<uint32_t>(start.tokens.size());
  seq.max_positions = room.max_positions;
  seq.next_sample = seq.known;
  seq.prompt_tokens = start.prompt_tokens;
  if (start.sampling.prompt_logprobs) seq.prompt_next = start.prompt_logprobs_from;
  seq.planned = seq.computed = first.planned;
  seq.salt = std::move(prefix.salt);
  // A warm-up's keys and values are not those of its tokens.
  seq.own_pages = !limits_.prefix_cache || start.sampling.every_expert;
  seq.start = std::move(start);
  const auto place = std::upper_bound(running_.begin(), running_.end(), &seq,
                                      [](const Sequence* a, const Sequence* b) { return a->rank < b->rank; });
  running_.insert(place, &seq);
  prefilling_.push_back(&seq);
  return first.planned;
}

void WorkerPlanner::end(SeqId id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end() || it->second.ended) return;
  Sequence& seq = it->second;
  seq.ended = true;
  seq.owner = nullptr;
  std::erase(running_, &seq);
  if (seq.planned < seq.known) std::erase(prefilling_, &seq);
  pool_.give_up_promise(seq.promised);
  seq.promised = 0;
  if (!seq.introduced) {  // no plan names it: nothing to wait for
    std::erase_if(pending_copies_,
                  [&](const PageCopy& copy) { return !seq.blocks.empty() && seq.blocks.back() == copy.to; });
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

bool WorkerPlanner::cover(Sequence& seq, uint32_t end) {
  const uint32_t have = static_cast<uint32_t>(seq.blocks.size()) + seq.promised;
  if (blocks_for(end) <= have) return true;
  const uint32_t more = blocks_for(end) - have;
  if (!pool_.admit({}, more)) return false;
  seq.promised += more;
  return true;
}

void WorkerPlanner::add_slice(BatchPlan& plan, Step& step, Sequence& seq, uint32_t count) {
  PlanSlice& slice = plan.slices.emplace_back();
  slice.seq = seq.id;
  slice.start = seq.planned;
  slice.count = count;
  if (faults_.short_chunk && seq.planned > 0 && count > 1) {
    ++slice.start;
    --slice.count;
  }
  const uint32_t end = seq.planned + count;
  // The first slice names the pages it begins after: shared ones and a copied one.
  if (!seq.introduced) slice.new_blocks = seq.blocks;
  while (seq.blocks.size() < blocks_for(end)) {
    CONCLAVE_CHECK(seq.promised > 0);
    --seq.promised;
    seq.blocks.push_back(pool_.take());
    slice.new_blocks.push_back(seq.blocks.back());
  }
  slice.sample = end >= seq.known;
  if (seq.timed) {
    plan.timed = true;
    step.timed.push_back({&seq, seq.planned, count, slice.sample});
  }
  if (slice.sample) step.samples.push_back(&seq);
  // The row at p yields the prompt token at p + 1.
  const uint32_t prompt_end = std::min(end + 1, seq.prompt_tokens);
  if (seq.prompt_next > 0 && seq.prompt_next < prompt_end) {
    step.prompts.push_back({seq.id, seq.prompt_next, prompt_end - seq.prompt_next});
    seq.prompt_next = prompt_end;
  }
  seq.planned = end;
  step.slices.push_back({&seq, end});
  if (!seq.introduced) {
    seq.introduced = true;
    plan.starts.push_back(*std::move(seq.start));
    seq.start.reset();
  }
}

// A sequence past its prefill has one slice a step until all its tokens are granted: the slice at position p
// yields the token at p + 1, and the last token's own position is never computed.
void WorkerPlanner::plan_decodes(BatchPlan& plan, Step& step) {
  const auto decodes = [](const Sequence& seq) {
    return seq.planned >= seq.known && seq.planned + 1 < seq.max_positions;
  };
  std::vector<Rank> without_page;  // ranks, since who is preempted may be gone
  for (Sequence* seq : running_) {
    if (decodes(*seq) && !cover(*seq, seq->planned + 1)) without_page.push_back(seq->rank);
  }
  if (!without_page.empty()) make_room(without_page);
  for (Sequence* seq : running_) {
    if (!decodes(*seq) || !cover(*seq, seq->planned + 1)) continue;
    add_slice(plan, step, *seq, 1);
    ++step.decode_rows;
  }
}

void WorkerPlanner::make_room(std::span<const Rank> without_page) {
  uint32_t needed = 0;
  for (const Rank& rank : without_page) {
    ++needed;
    while (coming() + pool_.available() < needed) {
      Sequence* const last = running_.back();
      if (!(rank < last->rank)) return;  // nobody is less important: it waits
      preempted_.push_back(last->id);
      end(last->id);
    }
  }
}

uint32_t WorkerPlanner::coming() const {
  uint32_t pages = 0;
  for (const auto& [id, seq] : sequences_) {
    if (seq.ended) pages += pool_.sole_use(seq.blocks);
  }
  return pages;
}

void WorkerPlanner::plan_prefill(BatchPlan& plan, Step& step) {
  uint32_t budget = limits_.step_tokens - step.decode_rows;
  // With nobody's next token waiting only those who come meanwhile are held up.
  const Nanos target = step.decode_rows > 0 ? limits_.step_target : limits_.prefill_target;
  budget = step_time_.prefill_rows(target, limits_.min_prefill, budget);
  size_t behind = prefilling_.size();
  for (Sequence* seq : prefilling_) {
    if (budget == 0) break;
    // While others wait for theirs, one takes half of what is left: a long prompt neither wastes a step nor
    // keeps short ones from it.
    const uint32_t share = --behind == 0 ? budget : (budget + 1) / 2;
    const uint32_t count = std::min({seq->known - seq->planned, limits_.chunk_tokens, share});
    add_slice(plan, step, *seq, count);
    budget -= count;
    step.prefill_rows += count;
  }
  std::erase_if(prefilling_, [](const Sequence* seq) { return seq->planned >= seq->known; });
}

bool WorkerPlanner::owes_prefill() const {
  if (limits_.owed_prefill == 0) return false;
  uint64_t owed = 0;
  for (const Sequence* seq : prefilling_) {
    owed +=
        std::min({seq->known - seq->planned, limits_.chunk_tokens, std::max(limits_.step_tokens / 8, 1u)});
    if (owed >= limits_.owed_prefill) return true;
  }
  return false;
}

std::optional<BatchPlan> WorkerPlanner::plan(bool ends_only, TimePoint now) {
  if (in_flight_.size() >= 2 * limits_.steps_in_flight) return std::nullopt;
  ends_only = ends_only || working_steps() >= limits_.steps_in_flight;
  BatchPlan plan;
  Step step;
  if (!ends_only) {
    plan.slices.reserve(running_.size());
    step.slices.reserve(running_.size());
    step.samples.reserve(running_.size());
    plan_decodes(plan, step);
    plan_prefill(plan, step);
  }
  if (plan.slices.empty() && pending_ends_.empty()) return std::nullopt;
  plan.step = step.id = StepId(next_step_++);
  plan.ends = step.ends = std::exchange(pending_ends_, {});
  plan.copies = std::exchange(pending_copies_, {});
  if (in_flight_.empty()) owing_since_ = now;
  step.planned = now;
  last_plan_ = {step.prefill_rows, step.decode_rows};
  in_flight_.push_back(std::move(step));
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
  const std::vector<Sequence*>& due = step.samples;
  std::vector<uint8_t> answered(due.size(), 0);
  // Workers answer in the order of the plan, with gaps where a sequence ended: one pass finds all.
  size_t cursor = 0;
  const auto place = [&](SeqId id) {
    for (size_t i = 0; i < due.size(); ++i) {
      const size_t at = cursor + i < due.size() ? cursor + i : cursor + i - due.size();
      if (due[at]->id == id) return cursor = at;
    }
    return due.size();
  };
  const auto name = [](SeqId id) { return "sampled sequence " + std::to_string(id.value); };
  for (const SampledToken& token : result.sampled) {
    const size_t at = place(token.seq);
    if (at == due.size()) {
      return invalid_field("sampled", name(token.seq) + " has no sampling slice in the step");
    }
    if (answered[at]++) return invalid_field("sampled", name(token.seq) + " appears twice");
    const Sequence& seq = *due[at];
    if (seq.ended) continue;
    if (token.position != seq.next_sample) {
      return invalid_field("position", name(token.seq) + " has position " + std::to_string(token.position) +
                                           " where " + std::to_string(seq.next_sample) + " is due");
    }
    if (limits_.vocab_size != 0 && token.token >= limits_.vocab_size) {
      return invalid_field("token", name(token.seq) + " has token " + std::to_string(token.token) +
                                        ", the vocabulary has " + std::to_string(limits_.vocab_size));
    }
    if (token.finish != FinishReason::kNone && token.finish != FinishReason::kStop &&
        token.finish != FinishReason::kLength) {
      return invalid_field("finish", name(token.seq) + " finished for a reason that is not a worker's");
    }
  }
  for (const StepResult::Failure& failure : result.failures) {
    if (!sequences_.contains(failure.seq)) {
      return invalid_field("failures", "sequence " + std::to_string(failure.seq.value) + " is unknown");
    }
    if (const size_t at = place(failure.seq); at < due.size()) answered[at] = 1;
  }
  for (size_t i = 0; i < due.size(); ++i) {
    if (answered[i] == 0 && !due[i]->ended) {
      return invalid_field("sampled", "sequence " + std::to_string(due[i]->id.value) + " has no token");
    }
  }
  if (step.prompts.empty() && result.prompt_logprobs.empty() && result.released.empty()) return OkStatus();
  return check_prompts(result, step);
}

StatusOr<StepOutcome> WorkerPlanner::on_result(StepResult&& result, TimePoint now) {
  RETURN_IF_ERROR(check_result(result));
  const Step step = std::move(in_flight_.front());
  in_flight_.pop_front();
  owing_since_ = now;
  StepOutcome outcome;
  outcome.planned = step.planned;
  for (const Step::Timed& slice : step.timed) {
    if (!slice.seq->ended)
      outcome.timed.push_back({slice.seq->owner, slice.start, slice.count, slice.sampled});
  }
  for (PromptLogprobs& piece : result.prompt_logprobs) {
    if (!sequences_.at(piece.seq).ended) outcome.prompt_logprobs.push_back(std::move(piece));
  }
  // What the step computed may be shared, unless its rows failed or were masked because their sequence ended.
  std::set<SeqId> failed;
  for (const StepResult::Failure& failure : result.failures) failed.insert(failure.seq);
  for (const Granted& slice : step.slices) {
    Sequence& seq = *slice.seq;
    if (seq.ended || (!failed.empty() && failed.contains(seq.id))) continue;
    seq.computed = slice.end;
    if ((seq.shared + 1) * kBlockTokens <= slice.end) publish(seq, slice.end);
  }
  step_time_.observe(step.decode_rows, step.prefill_rows, result.compute_ns + result.expert_wait_ns);
  outcome.sampled.reserve(result.sampled.size());
  auto due = step.samples.begin();
  for (SampledToken& token : result.sampled) {
    // check_result found it; it is the next one, or a few further, unless the worker mixed the order.
    const auto from = due;
    while (due != step.samples.end() && (*due)->id != token.seq) ++due;
    if (due == step.samples.end()) {
      due = std::find_if(step.samples.begin(), from, [&](const Sequence* s) { return s->id == token.seq; });
    }
    Sequence& seq = **due;
    if (seq.ended) {
      ++outcome.discarded;
      continue;
    }
    seq.next_sample = token.position + 1;
    // Nothing beyond this position was granted, so this is the end whether or not the worker counted the
    // same.
    if (seq.next_sample >= seq.max_positions && token.finish == FinishReason::kNone) {
      token.finish = FinishReason::kLength;
    }
    const bool last = token.finish != FinishReason::kNone;
    outcome.sampled.push_back({seq.owner, std::move(token)});
    if (last) end(seq.id);
  }
  for (StepResult::Failure& failure : result.failures) {
    Sequence& seq = sequences_.at(failure.seq);
    if (seq.ended) continue;
    outcome.failures.push_back(std::move(failure));
    end(seq.id);
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
    KvCache::PageTokens page;
    for (uint32_t i = 0; i < kBlockTokens; ++i) page[i] = token_at(seq, seq.shared * kBlockTokens + i);
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
    if (seq.blocks.size() + seq.promised < blocks_for(seq.known) ||
        seq.blocks.size() + seq.promised > blocks_for(seq.max_positions)) {
      return internal_error(name + " is promised too little or too much");
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
  for (size_t i = 1; i < running_.size(); ++i) {
    if (!(running_[i - 1]->rank < running_[i]->rank)) return internal_error("running list is out of order");
  }
  if (running_.size() > limits_.sequences) return internal_error("too many running sequences");
  return OkStatus();
}

}  // namespace conclave::scheduler
