// A request as the gateway hands it to the scheduler, and what comes back.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/status.h"

namespace conclave {

// Bounds of one request; front doors may set lower ones.
inline constexpr uint32_t kMaxChoices = 128;
inline constexpr uint32_t kMaxStopTokenIds = 4096;
inline constexpr uint32_t kMaxTopLogprobs = 128;
inline constexpr uint32_t kMaxLogitBias = 1024;         // entries
inline constexpr float kMaxLogitBiasValue = 1e9f;       // of one entry, either sign
inline constexpr float kMaxPenalty = 2.0f;              // presence and frequency, either sign
inline constexpr float kMinRepetitionPenalty = 0.001f;  // and its inverse at most
inline constexpr size_t kMaxCacheSaltBytes = 256;
inline constexpr size_t kMaxRouterContextBytes = 1u << 20;

// Added to a token's logit. At -infinity the token is forbidden; large finite values only make it unlikely or
// sure.
struct TokenBias {
  TokenId token = 0;
  float bias = 0;
};

// Validated, all defaults filled in. temperature 0 is greedy. Defaults of the optional ones mean "off"; the
// order in which they act is in docs/numerics.md.
struct SamplingParams {
  float temperature = 1.0f;
  float top_p = 1.0f;
  uint32_t top_k = 0;  // 0: all
  float min_p = 0.0f;
  uint64_t seed = 0;        // drawn at acceptance when the client gave none
  uint32_t max_tokens = 0;  // tokens to generate, >= 1
  uint32_t min_tokens = 0;
  bool ignore_eos = false;
  // End the sequence: the request's, and the checkpoint's unless ignore_eos. min_tokens forbids them first.
  std::vector<TokenId> stop_token_ids;
  // Ids at or above are never sampled: rows of lm_head that have no token (M2: 200054..200063). 0: no limit.
  uint32_t vocab_limit = 0;
  uint32_t top_logprobs = 0;
  bool logprobs = false;
  float repetition_penalty = 1.0f;    // of tokens of the prompt and the output; 1: off
  float presence_penalty = 0.0f;      // of tokens of the output; 0: off
  float frequency_penalty = 0.0f;     // of tokens of the output, for each time; 0: off
  std::vector<TokenBias> logit_bias;  // each token once
  // Log-probabilities of the prompt's own tokens, from the second on, with the most likely ones beside each.
  // They are reported for the request once, by its choice 0.
  bool prompt_logprobs = false;
  uint32_t prompt_top_logprobs = 0;
  // For warming up: position p takes experts p * k, p * k + 1, ... (modulo their number) of every layer
  // instead of the gate's k, so that a prompt of enough tokens goes through each expert. Its tokens mean
  // nothing, and its pages are never shared.
  bool every_expert = false;

  // Whether sampling depends on which tokens came before.
  bool has_penalties() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
};

// Every rule that holds whatever the model; the error names the field as clients know it. The one place for
// these ranges: front doors, the wire and the scheduler all ask here.
Status validate(const SamplingParams& params);
// The same with what depends on the model: token ids below vocab_size.
Status validate(const SamplingParams& params, uint32_t vocab_size);

// What a client already has of one choice: fed back after a scheduler restart, never generated again.
struct DeliveredChoice {
  std::vector<TokenId> tokens;
  bool ended = false;  // its end too: the choice is not run again
};

// Where a request stands in its client's trace (W3C Trace Context), and whether its timeline is kept.
struct TraceContext {
  uint64_t trace_hi = 0, trace_lo = 0;  // the trace id; both 0: none
  uint64_t span = 0;                    // of this request within it
  bool followed = false;  // each process notes what it does for the request (libs/model/timeline.h)
};

struct AcceptedRequest {
  RequestId id;
  std::vector<TokenId> prompt;  // 1 .. context length - 1 ids, all below vocab_size
  SamplingParams sampling;
  uint32_t choices = 1;  // n, at most kMaxChoices; choice c draws with (seed, c, position)
  // Who is admitted first when not all fit: the lower number, then the earlier arrival.
  int32_t priority = 0;
  // Requests share cached prefixes only with equal salts.
  std::string cache_salt;
  // Wall-clock independent: nanoseconds the request may still take, counted from its arrival at the
  // scheduler.
  Nanos time_left = 600 * kSecond;
  std::string tenant;  // for fairness later; empty: the default tenant
  // Replay after a scheduler restart: by choice; those past the end have nothing yet.
  std::vector<DeliveredChoice> delivered;
  uint32_t prompt_logprobs_delivered = 0;  // of how many prompt tokens the client has them
  // A scheduler acknowledged this request before: it must not be shed, whatever bound is reached (design rule
  // 2).
  bool resubmitted = false;
  // What another router needs to go on writing the answer: the scheduler keeps it and does not look inside.
  // Empty: only the router that submitted the request can go on with it.
  std::string router_context = {};
  TraceContext trace = {};
};

// A request that a gateway has taken over from another one, or from itself: its tokens follow from the first
// one on.
struct AdoptedRequest {
  AcceptedRequest request;  // as it was submitted; nothing is in `delivered`
  uint64_t generated = 0;   // tokens of all its choices so far
};

enum class FinishReason : uint8_t {
  kNone = 0,
  kStop = 1,
  kLength = 2,
  kCancelled = 3,
  kDeadline = 4,
  kError = 5
};

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0;
};

// Of one prompt token, given those before it.
struct PromptLogprob {
  float logprob = 0;
  std::vector<TokenLogprob> top;  // the most likely tokens at its place, in descending order
  uint32_t rank = 0;              // its own among all tokens, from 1; 0: unknown
};

// Tokens of one choice in order; `index` is the position of tokens[0] among the generated ones, so a repeat
// or a gap is visible. Every choice ends exactly once, with finish != kNone; the request is over when all its
// choices are.
struct TokenEvent {
  RequestId request;
  uint32_t choice = 0;
  uint32_t index = 0;
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;                          // one per token where asked for
  std::vector<std::vector<TokenLogprob>> top_logprobs;  // one list per token where asked for
  FinishReason finish = FinishReason::kNone;
  std::string error;  // finish == kError: the cause
  // A piece of the prompt's log-probabilities (choice 0, where asked for): of the prompt tokens at positions
  // prompt_start, prompt_start + 1, ... Pieces come in order from position 1 on, without gaps, all before the
  // first token.
  uint32_t prompt_start = 0;
  std::vector<PromptLogprob> prompt_logprobs;
  // Prompt tokens that needed no computing when the request was first admitted, since their pages were in the
  // prefix cache. With the request's first tokens; a restarted scheduler may say it again of its own cache.
  std::optional<uint32_t> cached_tokens;
};

}  // namespace conclave
