// Log-probabilities on the wire, shared by plans and the gateway's session. Internal to libs/rpc.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "conclave/v1/attention.pb.h"
#include "libs/base/status.h"
#include "libs/model/request.h"

namespace conclave::rpc {

using TopLogprobList = google::protobuf::RepeatedPtrField<::conclave::v1::TokenLogprob>;
using PromptLogprobList = google::protobuf::RepeatedPtrField<::conclave::v1::PromptLogprob>;

void to_proto(std::span<const TokenLogprob> from, TopLogprobList* to);
void to_proto(std::span<const PromptLogprob> from, PromptLogprobList* to);
// The errors name `field` and its parts.
StatusOr<std::vector<TokenLogprob>> top_logprobs_from_proto(std::string_view field,
                                                            const TopLogprobList& from);
// Of the prompt tokens from position `start` on.
StatusOr<std::vector<PromptLogprob>> prompt_logprobs_from_proto(uint32_t start,
                                                                const PromptLogprobList& from);

}  // namespace conclave::rpc
