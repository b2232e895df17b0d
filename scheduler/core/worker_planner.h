// The sequences and pages of one worker, and the plans made for it. Step N+1 is planned while step N runs, so
// a decode slice is granted before its token is known here; pages return when the plan that ends their
// sequence was reported. A full page becomes shareable when the step that filled it was reported; a sequence
// begins after the pages that it shares, and computes at least its last known token itself.
//
// Pages: a sequence is promised what its known tokens and a reserve take, and asks for more as it grows. When
// there are none, the least important sequence that runs here is preempted for a more important one; the most
// important one therefore always goes on, ends, and makes room. Who finds nobody less important skips the
// step.
#pragma once

#include <compare>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/model/plan.h"
#include "scheduler/core/kv_cache.h"
#include "scheduler/core/options.h"
#include "scheduler/core/planted_faults.h"
#include "scheduler/core/step_time.h"

namespace conclave::scheduler {

struct WorkerLimits {
  uint32_t step_tokens = 0;   // rows of a plan
  uint32_t chunk_tokens = 0;  // of one sequence in a plan
  uint32_t sequences = 0;     // running at a time; <= step_tokens, so every decode fits in every step
  uint32_t steps_in_flight = 0;
  uint32_t vocab_size = 0;  // 0: unknown
  bool prefix_cache = true;
  uint32_t growth_pages = 1;  // that stay free at an admission for each sequence that runs
  Nanos step_target = 0;      // prefill beside decodes is cut so that a step takes this; 0: it is not
  Nanos prefill_target = 0;   // the same for prefill alone
  uint32_t min_prefill = 16;  // rows of prefill a step carries however slow it is
  uint32_t owed_prefill = 0;  // rows of it beyond which nobody is admitted; 0: no bound
};

// Importance of a running sequence, most important first.
struct Rank {
  int32_t band = 0;
  uint64_t arrival = 0;
  uint32_t choice = 0;
  auto operator<=>(const Rank&) const = default;
};

// Whose pages a sequence may share.
struct PrefixUse {
  std::string salt;
  bool lookup = true;  // false: computes its whole prompt (prompt log-probabilities need every position)
  // A sequence with the same salt (another choice of the request): where the shared pages end, the page that
  // it fills is copied as far as both agree. Ignored where it does not run.
  SeqId like;
};

// What a sequence takes at worst, and what it is promised at first.
struct Room {
  uint32_t max_positions = 0;
  uint32_t reserve_positions = ~0u;  // beyond the known tokens
};

struct Choice;

// What a valid StepResult means for requests: only of sequences that had not ended here before it.
struct StepOutcome {
  struct Sample {
    Choice* owner = nullptr;
    SampledToken token;
  };
  std::vector<Sample> sampled;
  std::vector<StepResult::Failure> failures;
  std::vector<PromptLogprobs> prompt_logprobs;
  uint32_t discarded = 0;  // samples of sequences that had ended here
  struct Timed {
    Choice* owner = nullptr;
    uint32_t start = 0;
    uint32_t count = 0;
    bool sampled = false;
  };
  std::vector<Timed> timed;  // slices of requests that are followed
  TimePoint planned = 0;     // when the step was, if there are any
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
  // Beside what it needs, growth_pages stay free for each running sequence: they are about to grow.
  std::optional<uint32_t> fit(std::span<const TokenId> known, Room room, const PrefixUse& prefix) const;
  // Takes a sequence in: `start.tokens` are known, further ones are sampled until there are max_positions in
  // all. Returns how many tokens were cached. CHECKs that its first pages are there.
  // `owner` has the tokens: its request's prompt and what it generated, to which the caller adds each sample
  // that on_result returns before anything else is asked of this. It must last until the sequence ends here.
  uint32_t admit(SequenceStart start, Room room, Rank rank, PrefixUse prefix, Choice& owner);
  // No further slices; the worker is told with its next plan. Unknown or already ended: nothing happens.
  void end(SeqId seq);

  // The next plan, or nullopt when the worker holds enough steps or there is nothing to say. Decodes first,
  // in order of rank, then prefill in order of admission. With `ends_only`, or when the worker holds
  // steps_in_flight steps with slices, no slices are planned: ends go out at once, so that a cancelled
  // sequence leaves the running step and its pages are free after it. At most twice steps_in_flight plans are
  // with the worker.
  std::optional<BatchPlan> plan(bool ends_only, TimePoint now);

  // The sequences that the last plan() preempted; ended here, to be started again from their tokens.
  std::vector<SeqId> take_preempted() { return std::exchange(preempted_, {}); }

  // Retires the oldest step. An error means that the worker broke the protocol: nothing was changed, and the
  // worker must not be used further.
  StatusOr<StepOutcome> on_result(StepResult&& result, TimePoint now);
  // Since when the worker owes the step it must report next; kNever: it owes none.
  TimePoint owing_since() const { return in_flight_.empty() ? kNever : owing_since_; }
  // The time in which it could not have finished does not count.
  void forgive(TimePoint now) { owing_since_ = now; }

  const KvCache& pool() const { return pool_; }
  const StepTime& step_time() const { return step_time_; }
  // Sequences that get slices.
  uint32_t running() const { return static_cast<uint32_t>(running_.size()); }
  uint32_t steps_in_flight() const { return static_cast<uint32_t>(in_flight_.size()); }
  // Whether all of the known tokens of a sequence that runs here were computed.
  bool past_prefill(SeqId seq) const {
    const auto it = sequences_.find(seq);
    return it != sequences_.end() && it->second.computed >= it->second.known;
  }
  PlanCounts last_plan() const { return last_plan_; }
  // True when the worker knows no sequence and owes no step.
  bool idle() const { return sequences_.empty() && in_flight_.empty() && pending_ends_.empty(); }
  Status audit() const;

 private:
  // What a token touches comes first: thousands of these do not stay in the processor's cache.
  struct Sequence {
    SeqId id;
    Choice* owner = nullptr;  // null once it has ended
    uint32_t known = 0;       // tokens at admission
    uint32_t planned = 0;     // positions [0, planned) have been granted
    uint32_t max_positions = 0;
    uint32_t next_sample = 0;  // position of the next token to be reported
    uint32_t computed = 0;     // positions that were reported
    uint32_t promised = 0;     // pages still to come without asking
    uint32_t shared = 0;       // leading blocks that are shareable
    uint32_t prompt_tokens = 0;
    uint32_t prompt_next = 0;  // prompt position whose log-probability is planned next; 0: not wanted
    bool own_pages = false;    // a page met its equal: it and what follows are not shared
    bool introduced = false;   // some plan has named it
    bool ended = false;
    bool timed = false;  // its request is followed
    std::vector<BlockId> blocks;
    Rank rank;
    std::string salt;
    std::optional<SequenceStart> start;  // until the first plan took it
  };
  struct Granted {
    Sequence* seq = nullptr;
    uint32_t end = 0;  // positions below it are computed when the step was reported
  };
  // Sequences stay where they are until the plan that ends them was reported, which is after all that name
  // them.
  struct Step {
    StepId id;
    std::vector<Granted> slices;
    uint32_t decode_rows = 0;
    uint32_t prefill_rows = 0;
    std::vector<Sequence*> samples;  // one token expected of each
    std::vector<SeqId> ends;
    struct Prompt {
      SeqId seq;
      uint32_t start = 0;
      uint32_t count = 0;
    };
    std::vector<Prompt> prompts;  // log-probabilities expected
    struct Timed {
      Sequence* seq = nullptr;
      uint32_t start = 0;
      uint32_t count = 0;
      bool sampled = false;
    };
    std::vector<Timed> timed;
    TimePoint planned = 0;  // where there are any
  };

  uint32_t working_steps() const;  // in flight, with slices
  Status check_result(const StepResult& result) const;
  Status check_prompts(const StepResult& result, const Step& step) const;
  // Pages for positions up to `end`; false, with nothing changed, when there are none.
  bool cover(Sequence& seq, uint32_t end);
  // CHECKs that its pages are there.
  void add_slice(BatchPlan& plan, Step& step, Sequence& seq, uint32_t count);
  void plan_decodes(BatchPlan& plan, Step& step);
  void plan_prefill(BatchPlan& plan, Step& step);
  // Preempts until those that wait for a page, in order of rank, will have one each.
  void make_room(std::span<const Rank> without_page);
  // Whether those admitted before take up the next step or more.
  bool owes_prefill() const;
  // Pages that become available once all that ended here is retired.
  uint32_t coming() const;
  // Where a new sequence begins.
  struct Begin {
    std::vector<BlockId> shared;
    std::optional<BlockId> copied;  // the page to copy after them
    uint32_t planned = 0;           // tokens that need no computing
  };
  Begin begin(std::span<const TokenId> known, const PrefixUse& prefix) const;
  uint32_t first_pages(std::span<const TokenId> known, Room room, const Begin& begin) const;
  static TokenId token_at(const Sequence& seq, size_t position);
  // Makes the full pages below `computed` shareable.
  void publish(Sequence& seq, uint32_t computed);
  void retire(SeqId id);

  const WorkerLimits limits_;
  const PlantedFaults faults_;
  KvCache pool_;
  std::unordered_map<SeqId, Sequence> sequences_;
  std::vector<Sequence*> running_;     // in order of rank
  std::vector<Sequence*> prefilling_;  // of those, with known tokens not yet granted, in order of admission
  std::vector<SeqId> pending_ends_;
  std::vector<SeqId> preempted_;
  // For the next plan, whatever else it holds: the page copied from cannot be given away before that.
  std::vector<PageCopy> pending_copies_;
  StepTime step_time_;
  std::deque<Step> in_flight_;
  uint64_t next_step_ = 1;
  TimePoint owing_since_ = 0;
  PlanCounts last_plan_;
};

}  // namespace conclave::scheduler
