// One step's work for one worker, and what the worker reports. Plans are deltas: a worker keeps each
// sequence's block table and tokens from the plans before, and executes plans strictly in order of StepId.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libs/base/ids.h"
#include "libs/model/request.h"

namespace conclave {

inline constexpr uint32_t kBlockTokens = 16;  // positions a KV page holds

// Introduces a sequence to a worker, in the plan that first has a slice of it.
struct SequenceStart {
  SeqId seq;
  RequestId request;
  uint32_t choice = 0;
  std::vector<TokenId> tokens;  // the prompt, then tokens already delivered (replay)
  uint32_t prompt_tokens = 0;   // how many of them are the prompt
  SamplingParams sampling;
  // Prompt log-probabilities, where asked for, are wanted from this position on (at least 1); those before
  // were reported by an earlier sequence of the request.
  uint32_t prompt_logprobs_from = 1;
};

// Positions [start, start + count) of a sequence. Tokens below the sequence's known length are fed from its
// history (prefill); a decode slice has count 1 and start == the position of its newest token, which the
// worker itself may have sampled in a step the scheduler has not heard of yet. Blocks arrive in order,
// appended to the sequence's table. The first slice of a sequence may begin after whole pages that it shares
// with other sequences of this worker: its new_blocks then begin with those, which are only read.
struct PlanSlice {
  SeqId seq;
  uint32_t start = 0;
  uint32_t count = 0;
  bool sample = false;  // sample after the last position of the slice
  std::vector<BlockId> new_blocks;
};

// The worker copies a whole page, in every layer, before the plan's slices run: what a sequence shares with
// another up to the middle of a page (copy on write). Only rows below the slice's start are meant.
struct PageCopy {
  BlockId from = 0;
  BlockId to = 0;
};

struct BatchPlan {
  StepId step;
  std::vector<PageCopy> copies;
  std::vector<SequenceStart> starts;
  std::vector<PlanSlice> slices;
  // Sequences to forget before the step runs: finished, cancelled, past their deadline. Their blocks return
  // to the scheduler's pool when this step has been reported, or an earlier one released them. The worker
  // leaves their rows out from when it has the plan.
  std::vector<SeqId> ends;
  bool timed = false;  // the result is to say how the step's time went
};

struct SampledToken {
  SeqId seq;
  uint32_t position = 0;  // of the token in its sequence (prompt included)
  TokenId token = 0;
  FinishReason finish = FinishReason::kNone;  // kStop or kLength when the worker saw the end
  float logprob = 0;
  std::vector<TokenLogprob> top_logprobs;
};

// Log-probabilities of the prompt tokens at positions start, start + 1, ... of a sequence.
struct PromptLogprobs {
  SeqId seq;
  uint32_t start = 0;
  std::vector<PromptLogprob> tokens;
};

// What one shard had to do with a step, as its worker saw it.
struct ShardTiming {
  Incarnation shard;
  uint32_t replies = 0;
  uint32_t items = 0;        // (token, expert) pairs of these
  Nanos outstanding_ns = 0;  // while at least one dispatch was there
  Nanos slowest_ns = 0;      // from a dispatch to its reply
  Nanos compute_ns = 0;  // sum over the replies: the shard's time for the group that they were computed in
};
inline constexpr size_t kMaxTimedShards = 16;  // of a step: those with the most time outstanding

// How a step's time went, on the worker's own clock.
struct StepTiming {
  Nanos queued_ns = 0;  // from the plan's arrival to the step's beginning, behind other steps
  Nanos wall_ns = 0;    // from its beginning to its end
  // Of StepResult::compute_ns, summed over layers and micro-batches. The rest of it is the embedding and
  // copies of pages.
  Nanos attention_ns = 0;
  Nanos dispatch_ns = 0;
  Nanos combine_ns = 0;
  Nanos head_ns = 0;
  Nanos hidden_ns = 0;  // computing while another micro-batch was at the experts
  uint32_t rows = 0;
  uint32_t micro_batches = 0;
  uint32_t retried_items = 0;
  uint32_t deadlines = 0;  // dispatches past theirs
  std::vector<ShardTiming> shards;
};

// Reported once per plan, in order. A slice whose sequence had already finished on the worker is skipped
// silently: the scheduler planned it before it knew.
struct StepResult {
  StepId step;
  std::vector<SampledToken> sampled;
  // Sequences that cannot go on (an internal error); the request ends with this cause.
  struct Failure {
    SeqId seq;
    std::string cause;
  };
  std::vector<Failure> failures;
  // A row of the plan that is not the prompt's last yields that of the next prompt token; of a sequence in
  // order, without gaps.
  std::vector<PromptLogprobs> prompt_logprobs;
  // Ended by plans that wait, and not touched by anything after this step: their blocks are free already.
  std::vector<SeqId> released;
  Nanos compute_ns = 0;      // busy time of the step
  Nanos expert_wait_ns = 0;  // time without anything to compute, waiting for experts
  // Between the step before and this one: time the worker stood still for want of a plan although it had
  // sequences. What planning one step ahead is to hide.
  Nanos plan_wait_ns = 0;
  std::optional<StepTiming> timing = {};  // of a plan that asked for it
};

}  // namespace conclave
