#include "libs/model/request.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

namespace conclave {
namespace {

SamplingParams valid() {
  SamplingParams p;
  p.max_tokens = 8;
  return p;
}

void refuses(const std::function<void(SamplingParams&)>& edit, const std::string& field) {
  SamplingParams p = valid();
  edit(p);
  const Status status = validate(p, 100);
  ASSERT_FALSE(status.ok()) << field;
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(field_of(status), field);
}

TEST(SamplingParams, DefaultsAreValidAndOff) {
  EXPECT_TRUE(validate(valid(), 1).ok());
  EXPECT_FALSE(valid().has_penalties());
  SamplingParams p = valid();
  p.repetition_penalty = 1.1f;
  EXPECT_TRUE(p.has_penalties());
}

TEST(SamplingParams, EveryRuleNamesItsField) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    refuses([&](auto& p) { p.temperature = bad; }, "temperature");
    refuses([&](auto& p) { p.top_p = bad; }, "top_p");
    refuses([&](auto& p) { p.min_p = bad; }, "min_p");
    refuses([&](auto& p) { p.repetition_penalty = bad; }, "repetition_penalty");
    refuses([&](auto& p) { p.presence_penalty = bad; }, "presence_penalty");
    refuses([&](auto& p) { p.frequency_penalty = bad; }, "frequency_penalty");
  }
  refuses([](auto& p) { p.temperature = -0.1f; }, "temperature");
  refuses([](auto& p) { p.top_p = 1.1f; }, "top_p");
  refuses([](auto& p) { p.min_p = -0.1f; }, "min_p");
  refuses([](auto& p) { p.max_tokens = 0; }, "max_tokens");
  refuses([](auto& p) { p.min_tokens = 9; }, "min_tokens");
  refuses([](auto& p) { p.repetition_penalty = 0; }, "repetition_penalty");
  refuses([](auto& p) { p.presence_penalty = 2.5f; }, "presence_penalty");
  refuses([](auto& p) { p.frequency_penalty = -2.5f; }, "frequency_penalty");
  refuses([](auto& p) { p.top_logprobs = kMaxTopLogprobs + 1; }, "top_logprobs");
  refuses([](auto& p) { p.prompt_top_logprobs = kMaxTopLogprobs + 1; }, "prompt_logprobs");
  refuses([](auto& p) { p.stop_token_ids.resize(kMaxStopTokenIds + 1); }, "stop_token_ids");
  refuses([](auto& p) { p.stop_token_ids = {100}; }, "stop_token_ids");
  refuses([](auto& p) { p.logit_bias.resize(kMaxLogitBias + 1); }, "logit_bias");
  refuses([](auto& p) { p.logit_bias = {{100, 1.0f}}; }, "logit_bias");
  refuses([](auto& p) { p.logit_bias = {{5, 1.0f}, {6, 1.0f}, {5, 2.0f}}; }, "logit_bias");
  refuses([](auto& p) { p.logit_bias = {{5, INFINITY}}; }, "logit_bias");
  refuses([](auto& p) { p.logit_bias = {{5, NAN}}; }, "logit_bias");
  refuses([](auto& p) { p.logit_bias = {{5, 2e9f}}; }, "logit_bias");
}

TEST(SamplingParams, ABiasMayForbid) {
  SamplingParams p = valid();
  p.logit_bias = {{5, -INFINITY}, {6, kMaxLogitBiasValue}, {7, -kMaxLogitBiasValue}};
  EXPECT_TRUE(validate(p, 100).ok());
}

}  // namespace
}  // namespace conclave
