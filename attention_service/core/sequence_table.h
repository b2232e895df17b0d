// Token histories and block tables of the sequences a worker was given. Pure.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "libs/base/status.h"
#include "libs/kernels/ops.h"
#include "libs/model/model_spec.h"
#include "libs/model/plan.h"

namespace conclave {

// How often each token occurs in a sequence: what penalties depend on. A function of the tokens alone, so a
// replay that feeds delivered tokens back counts the same. At most one entry for each distinct token.
class TokenCounts {
 public:
  void add_prompt(TokenId token) { at(token); }
  void add_output(TokenId token) { ++at(token).output_count; }
  std::span<const kernels::SeenToken> seen() const { return seen_; }

 private:
  kernels::SeenToken& at(TokenId token) {
    const auto [it, fresh] = index_.try_emplace(token, static_cast<uint32_t>(seen_.size()));
    if (fresh) seen_.push_back({token, 0});
    return seen_[it->second];
  }

  std::vector<kernels::SeenToken> seen_;
  std::unordered_map<TokenId, uint32_t> index_;
};

struct Sequence {
  SeqId id;
  RequestId request;
  uint32_t choice = 0;
  std::vector<TokenId> tokens;  // prompt, delivered, sampled here
  uint32_t prompt_tokens = 0;
  SamplingParams sampling;
  uint32_t prompt_logprobs_from = 1;
  TokenCounts counts;  // kept only for penalties
  std::vector<BlockId> blocks;
  uint32_t computed =
      0;  // positions whose keys and values are stored in every layer, those of the running step included
  bool finished = false;  // sampled its last token; later slices are skipped
  bool ending = false;    // a plan that waits ends it: its rows are masked
  bool released = false;  // reported as released

  // Appends a sampled token.
  void append(TokenId token) {
    tokens.push_back(token);
    if (sampling.has_penalties()) counts.add_output(token);
  }
};

class SequenceTable {
 public:
  SequenceTable(const ModelSpec& spec, uint32_t kv_blocks) : spec_(spec), copied_(kv_blocks, false) {}

  // Names the field at fault; the table is then unchanged.
  Status start(const SequenceStart& start);
  void end(SeqId id) { sequences_.erase(id); }
  void clear();
  size_t size() const { return sequences_.size(); }
  // Whether a sequence has neither sampled its last token nor is about to be ended.
  bool any_live() const;
  // Null when unknown. Pointers stay valid until the sequence ends: a running step holds shared ownership.
  std::shared_ptr<Sequence> find(SeqId id) const;

  // Checks a copy of a page, and notes that its target holds one. Names the field at fault.
  Status copy(const PageCopy& copy);
  // Checks a slice against what the sequence has, appends its blocks and advances `computed`. The first slice
  // of a sequence may begin past position 0: the pages before it were computed for other sequences with the
  // same tokens. It may begin within a page only where that page is a copy that no sequence was given yet.
  Status extend(Sequence& sequence, const PlanSlice& slice);

 private:
  const ModelSpec& spec_;
  std::vector<bool> copied_;  // by block: the target of a copy, and not given to a sequence since
  std::unordered_map<SeqId, std::shared_ptr<Sequence>> sequences_;
};

}  // namespace conclave
