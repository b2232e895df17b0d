#include "attention_service/core/sequence_table.h"

#include <algorithm>
#include <string>

namespace conclave {

std::shared_ptr<Sequence> SequenceTable::find(SeqId id) const {
  const auto it = sequences_.find(id);
  return it == sequences_.end() ? nullptr : it->second;
}

Status SequenceTable::start(const SequenceStart& start) {
  if (start.tokens.empty()) return invalid_field("plan.starts.tokens", "no tokens");
  if (start.prompt_tokens == 0 || start.prompt_tokens > start.tokens.size()) {
    return invalid_field("plan.starts.prompt_tokens", std::to_string(start.prompt_tokens) + " of " +
                                                          std::to_string(start.tokens.size()) + " tokens");
  }
  if (start.tokens.size() > spec_.max_positions) {
    return invalid_field("plan.starts.tokens", "longer than the model's context");
  }
  for (TokenId token : start.tokens) {
    if (token >= spec_.vocab_size) {
      return invalid_field("plan.starts.tokens", "token id " + std::to_string(token) + " out of range");
    }
  }
  if (const Status fits = validate(start.sampling, spec_.vocab_size); !fits.ok()) {
    return invalid_field("plan.starts.sampling." + field_of(fits), message_of(fits));
  }
  auto sequence = std::make_shared<Sequence>();
  sequence->id = start.seq;
  sequence->request = start.request;
  sequence->choice = start.choice;
  sequence->tokens = start.tokens;
  sequence->prompt_tokens = start.prompt_tokens;
  sequence->sampling = start.sampling;
  sequence->prompt_logprobs_from = start.prompt_logprobs_from;
  if (start.sampling.has_penalties()) {
    for (uint32_t i = 0; i < start.tokens.size(); ++i) {
      if (i < start.prompt_tokens) {
        sequence->counts.add_prompt(start.tokens[i]);
      } else {
        sequence->counts.add_output(start.tokens[i]);
      }
    }
  }
  sequences_[start.seq] = std::move(sequence);
  return OkStatus();
}

void SequenceTable::clear() {
  sequences_.clear();
  copied_.assign(copied_.size(), false);
}

bool SequenceTable::any_live() const {
  return std::any_of(sequences_.begin(), sequences_.end(),
                     [](const auto& entry) { return !entry.second->finished && !entry.second->ending; });
}

Status SequenceTable::copy(const PageCopy& copy) {
  for (const BlockId block : {copy.from, copy.to}) {
    if (block >= copied_.size()) {
      return invalid_field("plan.copies",
                           std::to_string(block) + " of " + std::to_string(copied_.size()) + " blocks");
    }
  }
  if (copy.from == copy.to) {
    return invalid_field("plan.copies", "block " + std::to_string(copy.from) + " onto itself");
  }
  copied_[copy.to] = true;
  return OkStatus();
}

Status SequenceTable::extend(Sequence& sequence, const PlanSlice& slice) {
  if (slice.count == 0) return invalid_field("plan.slices.count", "0");
  // The first slice may begin after what the sequence shares with others: whole pages, and a part of one if
  // it was copied.
  const auto copied_page = [&](uint32_t index) {
    return index < slice.new_blocks.size() && slice.new_blocks[index] < copied_.size() &&
           copied_[slice.new_blocks[index]];
  };
  const bool shares = sequence.computed == 0 && sequence.blocks.empty() &&
                      slice.start / kBlockTokens <= slice.new_blocks.size() &&
                      (slice.start % kBlockTokens == 0 || copied_page(slice.start / kBlockTokens));
  if (slice.start != sequence.computed && !shares) {
    return invalid_field("plan.slices.start", "position " + std::to_string(slice.start) + " while " +
                                                  std::to_string(sequence.computed) + " are computed");
  }
  const uint64_t end = static_cast<uint64_t>(slice.start) + slice.count;
  if (end > sequence.tokens.size()) {
    return invalid_field("plan.slices.count", "reaches position " + std::to_string(end) + " of " +
                                                  std::to_string(sequence.tokens.size()) + " known tokens");
  }
  if (slice.sample && end != sequence.tokens.size()) {
    return invalid_field("plan.slices.sample", "not at the newest token");
  }
  for (BlockId block : slice.new_blocks) {
    if (block >= copied_.size()) {
      return invalid_field("plan.slices.new_blocks",
                           std::to_string(block) + " of " + std::to_string(copied_.size()) + " blocks");
    }
  }
  if ((sequence.blocks.size() + slice.new_blocks.size()) * kBlockTokens < end) {
    return invalid_field("plan.slices.new_blocks", "too few blocks for position " + std::to_string(end));
  }
  sequence.blocks.insert(sequence.blocks.end(), slice.new_blocks.begin(), slice.new_blocks.end());
  for (BlockId block : slice.new_blocks) copied_[block] = false;
  sequence.computed = static_cast<uint32_t>(end);
  return OkStatus();
}

}  // namespace conclave
