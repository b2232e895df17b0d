// Plans and their results.
#include <algorithm>

#include "libs/rpc/convert.h"
#include "libs/rpc/convert_checks.h"
#include "libs/rpc/convert_logprobs.h"

namespace conclave::rpc {
namespace {

// Length of the valid UTF-8 sequence at the start of `text`, or 0.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t n = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < n) return 0;
  for (size_t i = 1; i < n; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  if (lead == 0xe0 && byte(1) < 0xa0) return 0;  // overlong
  if (lead == 0xed && byte(1) > 0x9f) return 0;  // surrogate
  if (lead == 0xf0 && byte(1) < 0x90) return 0;  // overlong
  if (lead == 0xf4 && byte(1) > 0x8f) return 0;  // past U+10FFFF
  return n;
}

StatusOr<PromptLogprobs> piece_from_proto(const pb::PromptLogprobs& from) {
  PromptLogprobs to;
  RETURN_IF_ERROR(check_nonzero("prompt_logprobs.seq", from.seq()));
  to.seq = SeqId(from.seq());
  ASSIGN_OR_RETURN(to.tokens, prompt_logprobs_from_proto(from.start(), from.tokens()));
  to.start = from.start();
  return to;
}

void start_to_proto(const SequenceStart& from, pb::SequenceStart* to) {
  to->set_seq(from.seq.value);
  to_proto(from.request, to->mutable_request());
  to->set_choice(from.choice);
  to->mutable_tokens()->Assign(from.tokens.begin(), from.tokens.end());
  to->set_prompt_tokens(from.prompt_tokens);
  to_proto(from.sampling, to->mutable_sampling());
  to->set_prompt_logprobs_from(from.prompt_logprobs_from);
}

StatusOr<SequenceStart> start_from_proto(const pb::SequenceStart& from) {
  RETURN_IF_ERROR(check_nonzero("starts.seq", from.seq()));
  RETURN_IF_ERROR(check_at_most("starts.choice", from.choice(), kMaxChoices - 1));
  RETURN_IF_ERROR(check_count("starts.tokens", from.tokens_size(), kMaxPositions));
  if (from.tokens_size() == 0) return invalid_field("starts.tokens", "starts.tokens is empty");
  RETURN_IF_ERROR(check_nonzero("starts.prompt_tokens", from.prompt_tokens()));
  RETURN_IF_ERROR(
      check_at_most("starts.prompt_tokens", from.prompt_tokens(), static_cast<uint64_t>(from.tokens_size())));
  for (uint32_t token : from.tokens()) RETURN_IF_ERROR(check_at_most("starts.tokens", token, kMaxVocab));
  SequenceStart to;
  to.seq = SeqId(from.seq());
  ASSIGN_OR_RETURN(to.request, from_proto(from.request()));
  to.choice = from.choice();
  to.tokens.assign(from.tokens().begin(), from.tokens().end());
  to.prompt_tokens = from.prompt_tokens();
  RETURN_IF_ERROR(check_at_most("starts.prompt_logprobs_from", from.prompt_logprobs_from(), kMaxPositions));
  to.prompt_logprobs_from = std::max(from.prompt_logprobs_from(), 1u);
  ASSIGN_OR_RETURN(to.sampling, from_proto(from.sampling()));
  return to;
}

void slices_to_proto(const std::vector<PlanSlice>& from, pb::PlanSlices* to) {
  const int count = static_cast<int>(from.size());
  to->mutable_seq()->Reserve(count);
  to->mutable_start()->Reserve(count);
  bool counts = false;
  bool samples = false;
  bool blocks = false;
  for (const PlanSlice& slice : from) {
    to->mutable_seq()->AddAlreadyReserved(slice.seq.value);
    to->mutable_start()->AddAlreadyReserved(slice.start);
    counts = counts || slice.count != 1;
    samples = samples || !slice.sample;
    blocks = blocks || !slice.new_blocks.empty();
  }
  // A column that has nothing to say costs an allocation all the same.
  if (counts) {
    to->mutable_count()->Reserve(count);
    for (const PlanSlice& slice : from) to->mutable_count()->AddAlreadyReserved(slice.count);
  }
  if (samples) {
    to->mutable_sample()->Reserve(count);
    for (const PlanSlice& slice : from) to->mutable_sample()->AddAlreadyReserved(slice.sample);
  }
  if (!blocks) return;
  to->mutable_block_count()->Reserve(count);
  for (const PlanSlice& slice : from) {
    to->mutable_block_count()->AddAlreadyReserved(static_cast<uint32_t>(slice.new_blocks.size()));
    to->mutable_new_blocks()->Add(slice.new_blocks.begin(), slice.new_blocks.end());
  }
}

// A column that may be left out.
Status check_optional_column(std::string_view field, int size, int rows) {
  return size == 0 ? OkStatus() : check_column(field, size, rows);
}

Status slices_from_proto(const pb::PlanSlices& from, std::vector<PlanSlice>& to) {
  const int size = from.seq_size();
  RETURN_IF_ERROR(check_count("plan.slices", size, kMaxPlanEntries));
  RETURN_IF_ERROR(check_column("slices.start", from.start_size(), size));
  RETURN_IF_ERROR(check_optional_column("slices.count", from.count_size(), size));
  RETURN_IF_ERROR(check_optional_column("slices.sample", from.sample_size(), size));
  RETURN_IF_ERROR(check_optional_column("slices.block_count", from.block_count_size(), size));
  RETURN_IF_ERROR(check_count("slices.new_blocks", from.new_blocks_size(), kMaxPlanEntries));
  RETURN_IF_ERROR(check_all_nonzero("slices.seq", from.seq()));
  RETURN_IF_ERROR(check_all_nonzero("slices.count", from.count()));
  RETURN_IF_ERROR(check_all_at_most("slices.start", from.start(), kMaxPositions));
  RETURN_IF_ERROR(check_all_at_most("slices.count", from.count(), kMaxPlanRows));
  const bool counts = from.count_size() != 0;
  uint64_t rows = counts ? 0 : static_cast<uint64_t>(size);
  uint64_t blocks = 0;
  for (const uint32_t count : from.count()) rows += count;
  for (const uint32_t count : from.block_count()) blocks += count;
  RETURN_IF_ERROR(check_at_most("plan rows", rows, kMaxPlanRows));
  if (blocks != static_cast<uint64_t>(from.new_blocks_size())) {
    return invalid_field("slices.block_count", "slices.block_count adds up to " + std::to_string(blocks) +
                                                   ", slices.new_blocks has " +
                                                   std::to_string(from.new_blocks_size()) + " entries");
  }
  to.resize(static_cast<size_t>(size));
  auto block = from.new_blocks().begin();
  for (int i = 0; i < size; ++i) {
    PlanSlice& slice = to[static_cast<size_t>(i)];
    slice.seq = SeqId(from.seq(i));
    slice.start = from.start(i);
    slice.count = counts ? from.count(i) : 1;
    slice.sample = from.sample_size() == 0 || from.sample(i);
    if (from.block_count_size() == 0) continue;
    if (const uint32_t count = from.block_count(i); count > 0) {
      slice.new_blocks.assign(block, block + count);
      block += count;
    }
  }
  return OkStatus();
}

void sampled_to_proto(const std::vector<SampledToken>& from, pb::SampledTokens* to) {
  const int count = static_cast<int>(from.size());
  to->mutable_seq()->Reserve(count);
  to->mutable_position()->Reserve(count);
  to->mutable_token()->Reserve(count);
  bool finishes = false;
  bool logprobs = false;
  for (const SampledToken& token : from) {
    to->mutable_seq()->AddAlreadyReserved(token.seq.value);
    to->mutable_position()->AddAlreadyReserved(token.position);
    to->mutable_token()->AddAlreadyReserved(token.token);
    finishes = finishes || token.finish != FinishReason::kNone;
    logprobs = logprobs || token.logprob != 0;
    if (!token.top_logprobs.empty()) {
      pb::SampledTokens::Top* top = to->add_top_logprobs();
      top->set_row(static_cast<uint32_t>(to->seq_size() - 1));
      to_proto(token.top_logprobs, top->mutable_entries());
    }
  }
  if (finishes) {
    to->mutable_finish()->Reserve(count);
    for (const SampledToken& token : from) to->add_finish(static_cast<pb::FinishReason>(token.finish));
  }
  if (logprobs) {
    to->mutable_logprob()->Reserve(count);
    for (const SampledToken& token : from) to->add_logprob(token.logprob);
  }
}

Status sampled_from_proto(const pb::SampledTokens& from, std::vector<SampledToken>& to) {
  const int size = from.seq_size();
  RETURN_IF_ERROR(check_count("result.sampled", size, kMaxPlanEntries));
  RETURN_IF_ERROR(check_column("sampled.position", from.position_size(), size));
  RETURN_IF_ERROR(check_column("sampled.token", from.token_size(), size));
  RETURN_IF_ERROR(check_optional_column("sampled.finish", from.finish_size(), size));
  RETURN_IF_ERROR(check_optional_column("sampled.logprob", from.logprob_size(), size));
  RETURN_IF_ERROR(check_all_nonzero("sampled.seq", from.seq()));
  RETURN_IF_ERROR(check_all_at_most("sampled.position", from.position(), kMaxPositions));
  RETURN_IF_ERROR(check_all_at_most("sampled.token", from.token(), kMaxVocab));
  for (const int finish : from.finish()) {
    RETURN_IF_ERROR(check_enum("sampled.finish", finish, 0, static_cast<int>(FinishReason::kError)));
  }
  for (const float logprob : from.logprob()) RETURN_IF_ERROR(check_logprob("sampled.logprob", logprob));
  to.resize(static_cast<size_t>(size));
  for (int i = 0; i < size; ++i) {
    SampledToken& token = to[static_cast<size_t>(i)];
    token.seq = SeqId(from.seq(i));
    token.position = from.position(i);
    token.token = from.token(i);
  }
  for (int i = 0; i < from.finish_size(); ++i) {
    to[static_cast<size_t>(i)].finish = static_cast<FinishReason>(from.finish(i));
  }
  for (int i = 0; i < from.logprob_size(); ++i) to[static_cast<size_t>(i)].logprob = from.logprob(i);
  uint64_t next = 0;
  for (const pb::SampledTokens::Top& top : from.top_logprobs()) {
    if (top.row() < next || top.row() >= to.size()) {
      return invalid_field(
          "sampled.top_logprobs.row",
          "sampled.top_logprobs.row " + std::to_string(top.row()) + " is out of order or range");
    }
    next = uint64_t{top.row()} + 1;
    ASSIGN_OR_RETURN(to[top.row()].top_logprobs, top_logprobs_from_proto("top_logprobs", top.entries()));
  }
  return OkStatus();
}

}  // namespace

void to_proto(std::span<const TokenLogprob> from, TopLogprobList* to) {
  for (const TokenLogprob& entry : from) {
    pb::TokenLogprob* out = to->Add();
    out->set_token(entry.token);
    out->set_logprob(entry.logprob);
  }
}

StatusOr<std::vector<TokenLogprob>> top_logprobs_from_proto(std::string_view field,
                                                            const TopLogprobList& from) {
  RETURN_IF_ERROR(check_count(field, from.size(), kMaxTopLogprobs));
  std::vector<TokenLogprob> to;
  for (const pb::TokenLogprob& entry : from) {
    RETURN_IF_ERROR(check_at_most(std::string(field) + ".token", entry.token(), kMaxVocab));
    RETURN_IF_ERROR(check_logprob(std::string(field) + ".logprob", entry.logprob()));
    to.push_back({entry.token(), entry.logprob()});
  }
  return to;
}

void to_proto(std::span<const PromptLogprob> from, PromptLogprobList* to) {
  for (const PromptLogprob& entry : from) {
    pb::PromptLogprob* out = to->Add();
    out->set_logprob(entry.logprob);
    to_proto(entry.top, out->mutable_top());
    out->set_rank(entry.rank);
  }
}

StatusOr<std::vector<PromptLogprob>> prompt_logprobs_from_proto(uint32_t start,
                                                                const PromptLogprobList& from) {
  RETURN_IF_ERROR(check_at_most("prompt_logprobs.start", start, kMaxPositions));
  RETURN_IF_ERROR(check_count("prompt_logprobs", from.size(), kMaxPositions - start));
  if (!from.empty()) RETURN_IF_ERROR(check_nonzero("prompt_logprobs.start", start));
  std::vector<PromptLogprob> to;
  for (const pb::PromptLogprob& entry : from) {
    RETURN_IF_ERROR(check_logprob("prompt_logprobs.logprob", entry.logprob()));
    PromptLogprob& out = to.emplace_back();
    out.logprob = entry.logprob();
    RETURN_IF_ERROR(check_at_most("prompt_logprobs.rank", entry.rank(), kMaxVocab));
    out.rank = entry.rank();
    ASSIGN_OR_RETURN(out.top, top_logprobs_from_proto("prompt_logprobs.top", entry.top()));
  }
  return to;
}

std::string wire_text(std::string_view text, size_t limit) {
  std::string out;
  out.reserve(std::min(text.size(), limit));
  while (!text.empty()) {
    const size_t n = utf8_length(text);
    if (out.size() + std::max<size_t>(n, 1) > limit) break;
    if (n == 0) {
      out += '?';
      text.remove_prefix(1);
    } else {
      out += text.substr(0, n);
      text.remove_prefix(n);
    }
  }
  return out;
}

void to_proto(RequestId from, pb::RequestId* to) {
  to->set_hi(from.hi);
  to->set_lo(from.lo);
}

StatusOr<RequestId> from_proto(const pb::RequestId& from) {
  if (from.hi() == 0 && from.lo() == 0) return invalid_field("request.id", "request.id is missing");
  return RequestId{from.hi(), from.lo()};
}

void to_proto(const SamplingParams& from, pb::SamplingParams* to) {
  to->set_temperature(from.temperature);
  to->set_top_p(from.top_p);
  to->set_top_k(from.top_k);
  to->set_min_p(from.min_p);
  to->set_seed(from.seed);
  to->set_max_tokens(from.max_tokens);
  to->set_min_tokens(from.min_tokens);
  to->set_ignore_eos(from.ignore_eos);
  to->mutable_stop_token_ids()->Assign(from.stop_token_ids.begin(), from.stop_token_ids.end());
  to->set_vocab_limit(from.vocab_limit);
  to->set_logprobs(from.logprobs);
  to->set_top_logprobs(from.top_logprobs);
  to->set_repetition_penalty(from.repetition_penalty);
  to->set_presence_penalty(from.presence_penalty);
  to->set_frequency_penalty(from.frequency_penalty);
  for (const TokenBias& entry : from.logit_bias) {
    pb::TokenBias* out = to->add_logit_bias();
    out->set_token(entry.token);
    out->set_bias(entry.bias);
  }
  to->set_prompt_logprobs(from.prompt_logprobs);
  to->set_prompt_top_logprobs(from.prompt_top_logprobs);
  to->set_every_expert(from.every_expert);
}

StatusOr<SamplingParams> from_proto(const pb::SamplingParams& from) {
  RETURN_IF_ERROR(check_at_most("sampling.max_tokens", from.max_tokens(), kMaxPositions));
  RETURN_IF_ERROR(check_at_most("sampling.vocab_limit", from.vocab_limit(), kMaxVocab));
  SamplingParams to;
  to.temperature = from.temperature();
  to.top_p = from.top_p();
  to.top_k = from.top_k();
  to.min_p = from.min_p();
  to.seed = from.seed();
  to.max_tokens = from.max_tokens();
  to.min_tokens = from.min_tokens();
  to.ignore_eos = from.ignore_eos();
  to.stop_token_ids.assign(from.stop_token_ids().begin(), from.stop_token_ids().end());
  to.vocab_limit = from.vocab_limit();
  to.logprobs = from.logprobs();
  to.top_logprobs = from.top_logprobs();
  if (from.has_repetition_penalty()) to.repetition_penalty = from.repetition_penalty();
  to.presence_penalty = from.presence_penalty();
  to.frequency_penalty = from.frequency_penalty();
  for (const pb::TokenBias& entry : from.logit_bias()) to.logit_bias.push_back({entry.token(), entry.bias()});
  to.prompt_logprobs = from.prompt_logprobs();
  to.prompt_top_logprobs = from.prompt_top_logprobs();
  to.every_expert = from.every_expert();
  if (const Status fits = validate(to, kMaxVocab + 1); !fits.ok()) {
    const std::string field = "sampling." + field_of(fits);
    return invalid_field(field, field + " " + message_of(fits));
  }
  return to;
}

void to_proto(const BatchPlan& from, pb::BatchPlan* to) {
  to->set_step(from.step.value);
  for (const SequenceStart& start : from.starts) start_to_proto(start, to->add_starts());
  if (!from.slices.empty()) slices_to_proto(from.slices, to->mutable_slices());
  for (SeqId seq : from.ends) to->add_ends(seq.value);
  for (const PageCopy& copy : from.copies) {
    pb::PageCopy* out = to->add_copies();
    out->set_from(copy.from);
    out->set_to(copy.to);
  }
  to->set_timed(from.timed);
}

StatusOr<BatchPlan> from_proto(const pb::BatchPlan& from) {
  RETURN_IF_ERROR(check_nonzero("plan.step", from.step()));
  RETURN_IF_ERROR(check_count("plan.starts", from.starts_size(), kMaxPlanEntries));
  RETURN_IF_ERROR(check_count("plan.ends", from.ends_size(), kMaxPlanEntries));
  BatchPlan to;
  to.step = StepId(from.step());
  to.starts.reserve(static_cast<size_t>(from.starts_size()));
  for (const pb::SequenceStart& start : from.starts()) {
    ASSIGN_OR_RETURN(SequenceStart converted, start_from_proto(start));
    to.starts.push_back(std::move(converted));
  }
  RETURN_IF_ERROR(slices_from_proto(from.slices(), to.slices));
  for (uint64_t seq : from.ends()) {
    RETURN_IF_ERROR(check_nonzero("plan.ends", seq));
    to.ends.push_back(SeqId(seq));
  }
  RETURN_IF_ERROR(check_count("plan.copies", from.copies_size(), kMaxPlanEntries));
  for (const pb::PageCopy& copy : from.copies()) to.copies.push_back({copy.from(), copy.to()});
  to.timed = from.timed();
  return to;
}

void to_proto(const StepResult& from, pb::StepResult* to) {
  to->set_step(from.step.value);
  if (!from.sampled.empty()) sampled_to_proto(from.sampled, to->mutable_sampled());
  for (const StepResult::Failure& failure : from.failures) {
    pb::StepResult::Failure* out = to->add_failures();
    out->set_seq(failure.seq.value);
    out->set_cause(wire_text(failure.cause));
  }
  for (const PromptLogprobs& piece : from.prompt_logprobs) {
    pb::PromptLogprobs* out = to->add_prompt_logprobs();
    out->set_seq(piece.seq.value);
    out->set_start(piece.start);
    to_proto(piece.tokens, out->mutable_tokens());
  }
  for (SeqId seq : from.released) to->add_released(seq.value);
  to->set_compute_ns(from.compute_ns);
  to->set_expert_wait_ns(from.expert_wait_ns);
  to->set_plan_wait_ns(from.plan_wait_ns);
  if (from.timing) to_proto(*from.timing, to->mutable_timing());
}

StatusOr<StepResult> from_proto(const pb::StepResult& from) {
  RETURN_IF_ERROR(check_nonzero("result.step", from.step()));
  RETURN_IF_ERROR(check_count("result.failures", from.failures_size(), kMaxPlanEntries));
  RETURN_IF_ERROR(check_duration("result.compute_ns", from.compute_ns(), kMaxDuration));
  RETURN_IF_ERROR(check_duration("result.expert_wait_ns", from.expert_wait_ns(), kMaxDuration));
  RETURN_IF_ERROR(check_duration("result.plan_wait_ns", from.plan_wait_ns(), kMaxDuration));
  StepResult to;
  to.step = StepId(from.step());
  RETURN_IF_ERROR(sampled_from_proto(from.sampled(), to.sampled));
  for (const pb::StepResult::Failure& failure : from.failures()) {
    RETURN_IF_ERROR(check_nonzero("failures.seq", failure.seq()));
    RETURN_IF_ERROR(check_text("failures.cause", failure.cause(), kMaxTextBytes));
    to.failures.push_back({SeqId(failure.seq()), failure.cause()});
  }
  RETURN_IF_ERROR(check_count("result.prompt_logprobs", from.prompt_logprobs_size(), kMaxPlanEntries));
  for (const pb::PromptLogprobs& piece : from.prompt_logprobs()) {
    ASSIGN_OR_RETURN(PromptLogprobs converted, piece_from_proto(piece));
    to.prompt_logprobs.push_back(std::move(converted));
  }
  RETURN_IF_ERROR(check_count("result.released", from.released_size(), kMaxPlanEntries));
  for (uint64_t seq : from.released()) {
    RETURN_IF_ERROR(check_nonzero("result.released", seq));
    to.released.push_back(SeqId(seq));
  }
  to.compute_ns = from.compute_ns();
  to.expert_wait_ns = from.expert_wait_ns();
  to.plan_wait_ns = from.plan_wait_ns();
  if (from.has_timing()) {
    ASSIGN_OR_RETURN(to.timing, from_proto(from.timing()));
  }
  return to;
}

}  // namespace conclave::rpc
