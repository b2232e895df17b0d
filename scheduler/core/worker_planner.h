// The sequences and pages of one worker, and the plans made for it. Step N+1 is planned while step N runs, so
// a decode slice is granted before its token is known here; pages return when the plan that ends their
// sequence was reported. A full page becomes shareable when the step that filled it was reported; a sequence
// begins after the pages that it shares, and computes at least its last known token itself.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/model/plan.h"
#include "scheduler/core/kv_cache.h"
#include "scheduler/core/options.h"
#include "scheduler/core/planted_faults.h"

namespace conclave::scheduler {

struct WorkerLimits {
  uint32_t step_tokens = 0;   // rows of a plan
  uint32_t chunk_tokens = 0;  // of one sequence in a plan
  uint32_t sequences = 0;     // running at a time; <= step_tokens, so every decode fits in every step
  uint32_t steps_in_flight = 0;
  uint32_t vocab_size = 0;  // 0: unknown
  bool prefix_cache = true;
};

// Whose pages a sequence may share.
struct PrefixUse {
  std::string salt;
  bool lookup = true;  // false: computes its whole prompt (prompt log-probabilities need every position)
};

// What a valid StepResult means for requests: only of sequences that have not ended here.
struct StepOutcome {
  std::vector<SampledToken> sampled;
  std::vector<StepResult::Failure> failures;
  std::vector<PromptLogprobs> prompt_logprobs;
  uint32_t discarded = 0;  // samples of sequences that had ended here
};

struct PlanCounts {
  uint32_t prefill_tokens = 0;
  uint32_t decode_slices = 0;
};

class WorkerPlanner {
 public:
  WorkerPlanner(uint32_t kv_blocks, WorkerLimits limits, PlantedFaults faults = {});

  // Pages a sequence of that many positions needs at worst.
  static uint32_t blocks_for(uint64_t positions);

  // How many known tokens would need no computing here; nothing when there is no slot or too few pages for
  // max_positions.
  std::optional<uint32_t> fit(std::span<const TokenId> known, uint32_t max_positions,
                              const PrefixUse& prefix) const;
  // Takes a sequence in: `start.tokens` are known, further ones are sampled until there are max_positions in
  // all. Promises all its pages at once, so that what runs never runs out. Returns how many tokens were
  // cached. CHECKs that it fits.
  uint32_t admit(SequenceStart start, uint32_t max_positions, PrefixUse prefix = {});
  // No further slices; the worker is told with its next plan. Unknown or already ended: nothing happens.
  void end(SeqId seq);

  // The next plan, or nullopt when the worker holds enough steps or there is nothing to say. Decodes first,
  // then prefill in order of admission. With `ends_only`, or when the worker holds steps_in_flight steps with
  // slices, no slices are planned: ends go out at once, so that a cancelled sequence leaves the running step
  // and its pages are free after it. At most twice steps_in_flight plans are with the worker.
  std::optional<BatchPlan> plan(bool ends_only, TimePoint now);

  // Retires the oldest step. An error means that the worker broke the protocol: nothing was changed, and the
  // worker must not be used further.
  StatusOr<StepOutcome> on_result(const StepResult& result, TimePoint now);
  // Since when the worker owes the step it must report next; kNever: it owes none.
  TimePoint owing_since() const { return in_flight_.empty() ? kNever : owing_since_; }
  // The time in which it could not have finished does not count.
  void forgive(TimePoint now) { owing_since_ = now; }

  const KvCache& pool() const { return pool_; }
  // Sequences that get slices.
  uint32_t running() const { return static_cast<uint32_t>(running_.size()); }
  uint32_t steps_in_flight() const { return static_cast<uint32_t>(in_flight_.size()); }
  PlanCounts last_plan() const { return last_plan_; }
  // True when the worker knows no sequence and owes no step.
  bool idle() const { return sequences_.empty() && in_flight_.empty() && pending_ends_.empty(); }
  Status audit() const;

 private:
  struct Sequence {
    std::optional<SequenceStart> start;  // until the first plan took it
    uint32_t known = 0;                  // tokens at admission
    uint32_t max_positions = 0;
    uint32_t planned = 0;      // positions [0, planned) have been granted
    uint32_t next_sample = 0;  // position of the next token to be reported
    uint32_t promised = 0;     // pages still to come
    uint32_t prompt_tokens = 0;
    uint32_t prompt_next = 0;  // prompt position whose log-probability is planned next; 0: not wanted
    std::vector<BlockId> blocks;
    std::vector<TokenId> tokens;  // known, then reported
    std::string salt;
    uint32_t shared = 0;      // leading blocks that are shareable
    bool own_pages = false;   // a page met its equal: it and what follows are not shared
    bool introduced = false;  // some plan has named it
    bool ended = false;
  };
  struct Granted {
    SeqId seq;
    uint32_t end = 0;  // positions below it are computed when the step was reported
  };
  struct Step {
    StepId id;
    std::vector<Granted> slices;
    std::vector<SeqId> samples;  // one token expected of each
    std::vector<SeqId> ends;
    struct Prompt {
      SeqId seq;
      uint32_t start = 0;
      uint32_t count = 0;
    };
    std::vector<Prompt> prompts;  // log-probabilities expected
  };

  uint32_t working_steps() const;  // in flight, with slices
  Status check_result(const StepResult& result) const;
  Status check_prompts(const StepResult& result, const Step& step) const;
  void add_slice(BatchPlan& plan, Step& step, SeqId id, Sequence& seq, uint32_t count);
  std::vector<BlockId> shareable_prefix(std::span<const TokenId> known, const PrefixUse& prefix) const;
  // Makes the full pages below `computed` shareable.
  void publish(Sequence& seq, uint32_t computed);
  void retire(SeqId id);

  const WorkerLimits limits_;
  const PlantedFaults faults_;
  KvCache pool_;
  std::map<SeqId, Sequence> sequences_;
  std::vector<SeqId> running_;  // in order of admission
  std::vector<SeqId> pending_ends_;
  std::deque<Step> in_flight_;
  uint64_t next_step_ = 1;
  TimePoint owing_since_ = 0;
  PlanCounts last_plan_;
};

}  // namespace conclave::scheduler
