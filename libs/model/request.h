// A request as the gateway hands it to the scheduler, and what comes back.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"

namespace conclave {

// Validated, all defaults filled in. temperature 0 is greedy.
struct SamplingParams {
  float temperature = 1.0f;
  float top_p = 1.0f;
  uint32_t top_k = 0;  // 0: all
  float min_p = 0.0f;
  uint64_t seed = 0;        // drawn at acceptance when the client gave none
  uint32_t max_tokens = 0;  // tokens to generate, >= 1
  uint32_t min_tokens = 0;
  bool ignore_eos = false;
  std::vector<TokenId> stop_token_ids;  // the checkpoint's and the request's, together
  // Ids at or above are never sampled: rows of lm_head that have no token (M2: 200054..200063). 0: no limit.
  uint32_t vocab_limit = 0;
  uint32_t top_logprobs = 0;
  bool logprobs = false;
};

struct AcceptedRequest {
  RequestId id;
  std::vector<TokenId> prompt;  // 1 .. context length - 1 ids, all below vocab_size
  SamplingParams sampling;
  uint32_t choices = 1;  // n; only 1 until the API issue
  // Wall-clock independent: nanoseconds the request may still take, counted from its arrival at the
  // scheduler.
  Nanos time_left = 600 * kSecond;
  std::string tenant;  // for fairness later; empty: the default tenant
  // Tokens of choice 0 that the client already has (replay after a scheduler restart): fed back, never
  // generated again.
  std::vector<TokenId> delivered;
  // A scheduler acknowledged this request before: it must not be shed, whatever bound is reached (design rule 2).
  bool resubmitted = false;
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

// Tokens of one choice in order; `index` is the position of tokens[0] among the generated ones, so a repeat
// or a gap is visible. A request ends exactly once per choice, with finish != kNone.
struct TokenEvent {
  RequestId request;
  uint32_t choice = 0;
  uint32_t index = 0;
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;                          // one per token where asked for
  std::vector<std::vector<TokenLogprob>> top_logprobs;  // one list per token where asked for
  FinishReason finish = FinishReason::kNone;
  std::string error;  // finish == kError: the cause
};

}  // namespace conclave
