// From what a client asked for to the sampling parameters that the scheduler gets.
#pragma once

#include <cstdint>

#include "libs/base/status.h"
#include "libs/model/model_spec.h"
#include "libs/model/request.h"
#include "router_service/gateway/request.h"

namespace conclave::gateway {

// What one request may ask for. Beyond: INVALID_ARGUMENT that names the field.
struct RequestLimits {
  uint32_t max_stop_strings = 16;
  uint32_t max_stop_string_bytes = 1024;
  uint32_t max_stop_token_ids = 256;
  uint32_t max_choices = 64;       // n
  uint32_t max_top_logprobs = 20;  // alternatives for a token, of the answer or the prompt
  uint32_t max_name_bytes = 128;   // the client's own name for a request
  // Text with more bytes than this for each token of the context is refused before it is tokenized. Prose has
  // 4 or 5.
  uint32_t max_bytes_per_token = 32;
};

// Everything that can be known before the prompt is tokenized: checked, with the checkpoint's defaults filled
// in. max_tokens stays 0 where the client gave none. `vocab_limit`: ids from there on are never sampled.
StatusOr<SamplingParams> make_sampling(const GenerateRequest& request, const ModelSpec& model,
                                       uint32_t vocab_limit, const RequestLimits& limits);

}  // namespace conclave::gateway
