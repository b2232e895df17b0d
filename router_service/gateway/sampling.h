// From what a client asked for to the sampling parameters that the scheduler gets.
#pragma once

#include <cstdint>

#include "libs/base/status.h"
#include "libs/model/model_spec.h"
#include "libs/model/request.h"
#include "router_service/gateway/admission.h"
#include "router_service/gateway/request.h"

namespace conclave::gateway {

// Everything that can be known before the prompt is tokenized: checked, with the checkpoint's defaults filled
// in. max_tokens stays 0 where the client gave none. `vocab_limit`: ids from there on are never sampled.
StatusOr<SamplingParams> make_sampling(const GenerateRequest& request, const ModelSpec& model,
                                       uint32_t vocab_limit, const AdmissionLimits& limits);

}  // namespace conclave::gateway
