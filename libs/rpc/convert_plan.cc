// Plans and their results.
#include <algorithm>

#include "libs/rpc/convert.h"
#include "libs/rpc/convert_checks.h"

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

StatusOr<TokenLogprob> logprob_from_proto(const pb::TokenLogprob& from) {
  RETURN_IF_ERROR(check_at_most("top_logprobs.token", from.token(), kMaxVocab));
  RETURN_IF_ERROR(check_logprob("top_logprobs.logprob", from.logprob()));
  return TokenLogprob{from.token(), from.logprob()};
}

void start_to_proto(const SequenceStart& from, pb::SequenceStart* to) {
  to->set_seq(from.seq.value);
  to_proto(from.request, to->mutable_request());
  to->set_choice(from.choice);
  to->mutable_tokens()->Assign(from.tokens.begin(), from.tokens.end());
  to->set_prompt_tokens(from.prompt_tokens);
  to_proto(from.sampling, to->mutable_sampling());
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
  for (const pb::TokenLogprob& entry : from.top_logprobs()) {
    ASSIGN_OR_RETURN(const TokenLogprob converted, logprob_from_proto(entry));
    to.top_logprobs.push_back(converted);
  }
  return to;
}

}  // namespace

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
}

StatusOr<SamplingParams> from_proto(const pb::SamplingParams& from) {
  RETURN_IF_ERROR(check_finite("sampling.temperature", from.temperature(), 0, 1e6f));
  RETURN_IF_ERROR(check_finite("sampling.top_p", from.top_p(), 0, 1));
  RETURN_IF_ERROR(check_finite("sampling.min_p", from.min_p(), 0, 1));
  RETURN_IF_ERROR(check_nonzero("sampling.max_tokens", from.max_tokens()));
  RETURN_IF_ERROR(check_at_most("sampling.max_tokens", from.max_tokens(), kMaxPositions));
  RETURN_IF_ERROR(check_at_most("sampling.min_tokens", from.min_tokens(), from.max_tokens()));
  RETURN_IF_ERROR(check_count("sampling.stop_token_ids", from.stop_token_ids_size(), kMaxStopTokens));
  RETURN_IF_ERROR(check_at_most("sampling.vocab_limit", from.vocab_limit(), kMaxVocab));
  RETURN_IF_ERROR(check_at_most("sampling.top_logprobs", from.top_logprobs(), kMaxTopLogprobs));
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
    for (const TokenLogprob& entry : token.top_logprobs) {
      pb::TokenLogprob* top = out->add_top_logprobs();
      top->set_token(entry.token);
      top->set_logprob(entry.logprob);
    }
  }
  for (const StepResult::Failure& failure : from.failures) {
    pb::StepResult::Failure* out = to->add_failures();
    out->set_seq(failure.seq.value);
    out->set_cause(wire_text(failure.cause));
  }
  to->set_compute_ns(from.compute_ns);
  to->set_expert_wait_ns(from.expert_wait_ns);
}

StatusOr<StepResult> from_proto(const pb::StepResult& from) {
  RETURN_IF_ERROR(check_nonzero("result.step", from.step()));
  RETURN_IF_ERROR(check_count("result.sampled", from.sampled_size(), kMaxPlanEntries));
  RETURN_IF_ERROR(check_count("result.failures", from.failures_size(), kMaxPlanEntries));
  RETURN_IF_ERROR(check_duration("result.compute_ns", from.compute_ns(), kMaxDuration));
  RETURN_IF_ERROR(check_duration("result.expert_wait_ns", from.expert_wait_ns(), kMaxDuration));
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
  to.compute_ns = from.compute_ns();
  to.expert_wait_ns = from.expert_wait_ns();
  return to;
}

}  // namespace conclave::rpc
