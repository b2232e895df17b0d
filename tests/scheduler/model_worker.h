// A worker without a model: it obeys plans exactly, holds them to their contract (order, positions, who uses
// and who writes which page, that a page it did not write for this sequence holds what it would have written)
// and samples from an oracle, so every token is known beforehand.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "libs/base/random.h"
#include "libs/model/plan.h"

namespace conclave::scheduler {

inline constexpr uint32_t kOracleVocab = 1000;

// The next token is a function of the seed, the choice and everything before it, as a real model's is.
inline TokenId oracle_token(uint64_t seed, uint32_t choice, const std::vector<TokenId>& history) {
  uint64_t h = seed ^ 0x6a09e667f3bcc909ull ^ (choice * 0x9e3779b97f4a7c15ull);
  for (const TokenId token : history) h = internal::mix64(h ^ (token + 0x9e3779b97f4a7c15ull));
  return static_cast<TokenId>(h % kOracleVocab);
}

inline FinishReason oracle_finish(const SamplingParams& sampling, TokenId token, size_t generated) {
  const auto& stops = sampling.stop_token_ids;
  if (generated > sampling.min_tokens && std::find(stops.begin(), stops.end(), token) != stops.end()) {
    return FinishReason::kStop;
  }
  return generated >= sampling.max_tokens ? FinishReason::kLength : FinishReason::kNone;
}

// The log-probability of the prompt token at a position.
inline float oracle_prompt_logprob(const std::vector<TokenId>& prompt, size_t position) {
  return -static_cast<float>(prompt[position] + position);
}

// Everything a choice of a request generates when nobody stops it.
inline std::vector<TokenId> oracle_answer(const std::vector<TokenId>& prompt, const SamplingParams& sampling,
                                          uint32_t choice = 0) {
  std::vector<TokenId> history = prompt;
  std::vector<TokenId> answer;
  for (;;) {
    const TokenId token = oracle_token(sampling.seed, choice, history);
    history.push_back(token);
    answer.push_back(token);
    if (oracle_finish(sampling, token, answer.size()) != FinishReason::kNone) return answer;
  }
}

class ModelWorker {
 public:
  explicit ModelWorker(uint32_t kv_blocks) : pages_(kv_blocks) {}

  // Executes the plan; `later` are those that wait behind it. The first breach of the plan contract is kept
  // in breach().
  StepResult run(const BatchPlan& plan, const std::deque<BatchPlan>& later = {}) {
    StepResult result;
    result.step = plan.step;
    result.compute_ns = 1000;
    if (plan.step.value != ++last_step_)
      breach("step " + std::to_string(plan.step.value) + " is out of order");
    std::vector<SeqId> forgotten;
    for (const SeqId id : plan.ends) {
      const auto it = sequences_.find(id);
      if (it == sequences_.end()) {
        breach("ends an unknown sequence");
        continue;
      }
      forgotten.push_back(id);
    }
    // What a plan that waits ends is left out of everything before it.
    std::vector<SeqId> ending;
    for (const BatchPlan& waits : later) {
      for (const SeqId id : waits.ends) {
        const auto it = sequences_.find(id);
        if (it != sequences_.end() && !it->second.released) ending.push_back(id);
        if (it != sequences_.end()) it->second.finished = true;
      }
    }
    for (const SequenceStart& start : plan.starts) {
      Sequence seq;
      seq.history = start.tokens;
      seq.prompt_tokens = start.prompt_tokens;
      seq.sampling = start.sampling;
      seq.choice = start.choice;
      seq.prompt_next = start.sampling.prompt_logprobs ? start.prompt_logprobs_from : start.prompt_tokens;
      if (start.tokens.empty() || start.prompt_tokens > start.tokens.size()) breach("a start without tokens");
      if (!sequences_.emplace(start.seq, std::move(seq)).second) breach("a sequence starts twice");
    }
    for (const PageCopy& copy : plan.copies) {
      if (copy.from >= pages_.size() || copy.to >= pages_.size()) {
        breach("a copy names a block that does not exist");
        continue;
      }
      if (!pages_[copy.to].users.empty()) breach("a copy overwrites a page that is used");
      pages_[copy.to].content = pages_[copy.from].content;
      ++copies_;
    }
    for (const PlanSlice& slice : plan.slices) run_slice(slice, result, forgotten);
    for (const SeqId id : forgotten) {
      release(id);
      sequences_.erase(id);
    }
    for (const SeqId id : ending) {
      release(id);
      result.released.push_back(id);
    }
    return result;
  }

  const std::string& breach() const { return breach_; }
  uint64_t copies() const { return copies_; }
  size_t sequences() const { return sequences_.size(); }
  uint32_t owned_blocks() const {
    return static_cast<uint32_t>(
        std::count_if(pages_.begin(), pages_.end(), [](const Page& page) { return !page.users.empty(); }));
  }

 private:
  struct Page {
    std::set<SeqId> users;
    // What each position holds: as a real page, a function of all tokens up to it.
    std::array<uint64_t, kBlockTokens> content{};
  };
  struct Sequence {
    std::vector<TokenId> history;
    uint32_t prompt_tokens = 0;
    uint32_t computed = 0;
    uint32_t prompt_next = 0;
    uint32_t choice = 0;
    bool finished = false;  // or ending
    bool released = false;
    SamplingParams sampling;
    std::vector<BlockId> blocks;
  };

  void release(SeqId id) {
    Sequence& seq = sequences_.at(id);
    for (const BlockId block : seq.blocks) pages_[block].users.erase(id);
    seq.blocks.clear();
    seq.released = true;
  }

  void breach(const std::string& what) {
    if (breach_.empty()) breach_ = "step " + std::to_string(last_step_) + ": " + what;
  }

  void run_slice(const PlanSlice& slice, StepResult& result, const std::vector<SeqId>& forgotten) {
    const auto it = sequences_.find(slice.seq);
    if (it == sequences_.end()) return breach("a slice of an unknown sequence");
    if (std::find(forgotten.begin(), forgotten.end(), slice.seq) != forgotten.end()) {
      return breach("a slice of a sequence that ends in the same plan");
    }
    Sequence& seq = it->second;
    if (seq.released) return;  // planned before the end was known
    if (seq.blocks.empty() && seq.computed == 0) {
      // Within a page only after a copy: that the page holds the right prefix is checked below.
      seq.computed = slice.start;
    }
    for (const BlockId block : slice.new_blocks) {
      if (block >= pages_.size()) return breach("block " + std::to_string(block) + " does not exist");
      const bool shared = seq.blocks.size() < slice.start / kBlockTokens;
      if (!pages_[block].users.empty() && !shared) {
        return breach("block " + std::to_string(block) + " of sequence " +
                      std::to_string(pages_[block].users.begin()->value) + " is given to " +
                      std::to_string(slice.seq.value));
      }
      pages_[block].users.insert(slice.seq);
      seq.blocks.push_back(block);
    }
    if (seq.finished) return;  // planned before the end was known
    const uint32_t end = slice.start + slice.count;
    if (slice.count == 0 || slice.start != seq.computed)
      return breach("a slice does not continue its sequence");
    if (end > seq.history.size()) return breach("a slice passes the known tokens");
    if (seq.blocks.size() != (end + kBlockTokens - 1) / kBlockTokens)
      return breach("a slice has the wrong blocks");
    if (slice.sample != (end == seq.history.size())) return breach("a slice samples at the wrong place");
    uint64_t content = seq.prompt_tokens > 0 ? 1 : 0;
    for (uint32_t position = 0; position < end; ++position) {
      content = internal::mix64(content ^ (seq.history[position] + 0x9e3779b97f4a7c15ull));
      Page& page = pages_[seq.blocks[position / kBlockTokens]];
      uint64_t& there = page.content[position % kBlockTokens];
      if (position < slice.start) {
        if (there != content)
          return breach("position " + std::to_string(position) + " of sequence " +
                        std::to_string(slice.seq.value) + " holds another prefix");
        continue;
      }
      if (page.users.size() > 1) return breach("a slice writes into a page that others read");
      there = content;
    }
    seq.computed = end;
    PromptLogprobs piece{slice.seq, seq.prompt_next, {}};
    for (; seq.prompt_next < std::min(end + 1, seq.prompt_tokens); ++seq.prompt_next) {
      piece.tokens.push_back({oracle_prompt_logprob(seq.history, seq.prompt_next), {}});
    }
    if (!piece.tokens.empty()) result.prompt_logprobs.push_back(std::move(piece));
    if (!slice.sample) return;
    SampledToken sampled;
    sampled.seq = slice.seq;
    sampled.position = end;
    sampled.token = oracle_token(seq.sampling.seed, seq.choice, seq.history);
    sampled.logprob = -static_cast<float>(sampled.token);
    seq.history.push_back(sampled.token);
    sampled.finish = oracle_finish(seq.sampling, sampled.token, seq.history.size() - seq.prompt_tokens);
    seq.finished = sampled.finish != FinishReason::kNone;
    result.sampled.push_back(std::move(sampled));
  }

  std::map<SeqId, Sequence> sequences_;
  std::vector<Page> pages_;
  uint64_t last_step_ = 0;
  uint64_t copies_ = 0;
  std::string breach_;
};

}  // namespace conclave::scheduler
