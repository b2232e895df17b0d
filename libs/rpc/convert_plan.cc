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

StatusOr<PlanSlice> slice_from_proto(const pb::PlanSlice& from) {
  RETURN_IF_ERROR(check_nonzero("slices.seq", from.seq()));
  RETURN_IF_ERROR(check_nonzero("slices.count", from.count()));
  RETURN_IF_ERROR(check_at_most("slices.start", from.start(), kMaxPositions));
  RETURN_IF_ERROR(check_at_most("slices.count", from.count(), kMaxPlanRows));
  RETURN_IF_ERROR(check_count("slices.new_blocks", from.new_blocks_size(), kMaxPlanEntries));
  PlanSlice to;
  to.seq = SeqId(from.seq());
  to.start = from.start();
  to.count = from.count();
  to.sample = from.sample();
  to.new_blocks.assign(from.new_blocks().begin(), from.new_blocks().end());
  return to;
}

StatusOr<SampledToken> sampled_from_proto(const pb::SampledToken& from) {
  RETURN_IF_ERROR(check_nonzero("sampled.seq", from.seq()));
  RETURN_IF_ERROR(check_at_most("sampled.position", from.position(), kMaxPositions));
  RETURN_IF_ERROR(check_at_most("sampled.token", from.token(), kMaxVocab));
  RETURN_IF_ERROR(check_enum("sampled.finish", from.finish(), 0, static_cast<int>(FinishReason::kError)));
  RETURN_IF_ERROR(check_logprob("sampled.logprob", from.logprob()));
  RETURN_IF_ERROR(check_count("sampled.top_logprobs", from.top_logprobs_size(), kMaxTopLogprobs));
  SampledToken to;
  to.seq = SeqId(from.seq());
  to.position = from.position();
  to.token = from.token();
  to.finish = static_cast<FinishReason>(from.finish());
  to.logprob = from.logprob();
  ASSIGN_OR_RETURN(to.top_logprobs, top_logprobs_from_proto("top_logprobs", from.top_logprobs()));
  return to;
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
  for (const PlanSlice& slice : from.slices) {
    pb::PlanSlice* out = to->add_slices();
    out->set_seq(slice.seq.value);
    out->set_start(slice.start);
    out->set_count(slice.count);
    out->set_sample(slice.sample);
    out->mutable_new_blocks()->Assign(slice.new_blocks.begin(), slice.new_blocks.end());
  }
  for (SeqId seq : from.ends) to->add_ends(seq.value);
  for (const PageCopy& copy : from.copies) {
    pb::PageCopy* out = to->add_copies();
    out->set_from(copy.from);
    out->set_to(copy.to);
  }
}

StatusOr<BatchPlan> from_proto(const pb::BatchPlan& from) {
  RETURN_IF_ERROR(check_nonzero("plan.step", from.step()));
  RETURN_IF_ERROR(check_count("plan.starts", from.starts_size(), kMaxPlanEntries));
  RETURN_IF_ERROR(check_count("plan.slices", from.slices_size(), kMaxPlanEntries));
  RETURN_IF_ERROR(check_count("plan.ends", from.ends_size(), kMaxPlanEntries));
  BatchPlan to;
  to.step = StepId(from.step());
  to.starts.reserve(static_cast<size_t>(from.starts_size()));
  for (const pb::SequenceStart& start : from.starts()) {
    ASSIGN_OR_RETURN(SequenceStart converted, start_from_proto(start));
    to.starts.push_back(std::move(converted));
  }
  uint64_t rows = 0;
  to.slices.reserve(static_cast<size_t>(from.slices_size()));
  for (const pb::PlanSlice& slice : from.slices()) {
    ASSIGN_OR_RETURN(PlanSlice converted, slice_from_proto(slice));
    rows += converted.count;
    to.slices.push_back(std::move(converted));
  }
  RETURN_IF_ERROR(check_at_most("plan rows", rows, kMaxPlanRows));
  for (uint64_t seq : from.ends()) {
    RETURN_IF_ERROR(check_nonzero("plan.ends", seq));
    to.ends.push_back(SeqId(seq));
  }
  RETURN_IF_ERROR(check_count("plan.copies", from.copies_size(), kMaxPlanEntries));
  for (const pb::PageCopy& copy : from.copies()) to.copies.push_back({copy.from(), copy.to()});
  return to;
}

void to_proto(const StepResult& from, pb::StepResult* to) {
  to->set_step(from.step.value);
  for (const SampledToken& token : from.sampled) {
    pb::SampledToken* out = to->add_sampled();
    out->set_seq(token.seq.value);
    out->set_position(token.position);
    out->set_token(token.token);
    out->set_finish(static_cast<pb::FinishReason>(token.finish));
    out->set_logprob(token.logprob);
    to_proto(token.top_logprobs, out->mutable_top_logprobs());
  }
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
}

StatusOr<StepResult> from_proto(const pb::StepResult& from) {
  RETURN_IF_ERROR(check_nonzero("result.step", from.step()));
  RETURN_IF_ERROR(check_count("result.sampled", from.sampled_size(), kMaxPlanEntries));
  RETURN_IF_ERROR(check_count("result.failures", from.failures_size(), kMaxPlanEntries));
  RETURN_IF_ERROR(check_duration("result.compute_ns", from.compute_ns(), kMaxDuration));
  RETURN_IF_ERROR(check_duration("result.expert_wait_ns", from.expert_wait_ns(), kMaxDuration));
  RETURN_IF_ERROR(check_duration("result.plan_wait_ns", from.plan_wait_ns(), kMaxDuration));
  StepResult to;
  to.step = StepId(from.step());
  to.sampled.reserve(static_cast<size_t>(from.sampled_size()));
  for (const pb::SampledToken& token : from.sampled()) {
    ASSIGN_OR_RETURN(SampledToken converted, sampled_from_proto(token));
    to.sampled.push_back(std::move(converted));
  }
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
  return to;
}

}  // namespace conclave::rpc
