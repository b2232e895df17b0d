#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "libs/base/random.h"
#include "libs/checkpoint/model_config.h"
#include "tests/checkpoint/test_files.h"

namespace conclave {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The fields of the published MiniMax-M2.5 config.json.
const char* const kM2 = R"({
  "architectures": ["MiniMaxM2ForCausalLM"],
  "attn_type_list": [1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],
  "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
  "max_position_embeddings": 196608, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
  "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
  "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
  "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
  "tie_word_embeddings": false, "use_mtp": true, "use_qk_norm": true, "use_routing_bias": true, "vocab_size": 200064,
  "eos_token_id": 2,
  "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}})";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

ModelSpec parsed(const std::string& config, std::optional<std::string> generation = std::nullopt,
                 std::optional<std::string> tokenizer_config = std::nullopt,
                 std::optional<std::string> tokenizer = std::nullopt) {
  FaultList faults;
  ModelSpec spec = parse_config({config, generation, tokenizer_config, tokenizer}, "name", faults).spec;
  EXPECT_TRUE(faults.empty()) << message_of(faults.to_status("config"));
  return spec;
}

std::string faults_of(const std::string& config, std::optional<std::string> generation = std::nullopt) {
  FaultList faults;
  parse_config({config, generation, std::nullopt, std::nullopt}, "name", faults);
  return faults.empty() ? "none" : message_of(faults.to_status("config"));
}

std::string edited(const std::string& from, const std::string& to) {
  return faults_of(replaced(kM2, from, to));
}

TEST(Config, ReadsThePublishedFile) {
  const ModelSpec s = parsed(kM2);
  EXPECT_EQ(s.model_type, "minimax_m2");
  EXPECT_EQ(s.name, "name");
  EXPECT_EQ(s.hidden_size, 3072u);
  EXPECT_EQ(s.q_size(), 6144u);  // not the hidden size
  EXPECT_EQ(s.kv_size(), 1024u);
  EXPECT_EQ(s.rotary_dim, 64u);
  EXPECT_EQ(s.rope_theta, 5e6);
  EXPECT_FLOAT_EQ(s.rms_norm_eps, 1e-6f);
  EXPECT_EQ(s.num_experts, 256u);
  EXPECT_EQ(s.experts_per_token, 8u);
  EXPECT_EQ(s.weight_block, 128u);
  EXPECT_EQ(s.layer_kinds.size(), 62u);
  ASSERT_EQ(s.notes.size(), 1u);
  EXPECT_THAT(s.notes[0], HasSubstr("num_mtp_modules"));
}

TEST(Config, RotationFieldsMustAgree) {
  const std::string none = replaced(kM2, "\"rotary_dim\": 64, ", "");
  EXPECT_EQ(parsed(none).rotary_dim, 128u);  // absent everywhere: all of the head
  EXPECT_EQ(parsed(replaced(none, "\"use_mtp\"", "\"partial_rotary_factor\": 0.5, \"use_mtp\"")).rotary_dim,
            64u);
  const std::string inner =
      "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 5000000, \"partial_rotary_factor\": "
      "0.5}, ";
  EXPECT_EQ(parsed(replaced(none, "\"use_mtp\"", inner + "\"use_mtp\"")).rotary_dim, 64u);
  EXPECT_EQ(parsed(replaced(kM2, "\"use_mtp\"", inner + "\"use_mtp\"")).rotary_dim, 64u);
  const std::string other = replaced(inner, "0.5", "1.0");
  EXPECT_THAT(edited("\"use_mtp\"", other + "\"use_mtp\""),
              HasSubstr("rope_parameters.partial_rotary_factor: says that 128 dimensions of a head are "
                        "rotated, but rotary_dim says 64"));
  EXPECT_THAT(edited("\"use_mtp\"", "\"partial_rotary_factor\": 0.25, \"use_mtp\""),
              HasSubstr("but rotary_dim says 64"));
  EXPECT_THAT(edited("\"use_mtp\"", "\"partial_rotary_factor\": 0.3, \"use_mtp\""),
              HasSubstr("whole number of dimensions"));
  EXPECT_THAT(edited("\"rotary_dim\": 64", "\"rotary_dim\": 63"), HasSubstr("must be even"));
  EXPECT_THAT(edited("\"rotary_dim\": 64", "\"rotary_dim\": 256"), HasSubstr("more than head_dim 128"));
}

TEST(Config, ThetaFromEitherPlace) {
  const std::string none = replaced(kM2, "\"rope_theta\": 5000000, ", "");
  EXPECT_EQ(parsed(replaced(none, "\"use_mtp\"", "\"rope_parameters\": {\"rope_theta\": 1e4}, \"use_mtp\""))
                .rope_theta,
            1e4);
  EXPECT_THAT(edited("\"use_mtp\"", "\"rope_parameters\": {\"rope_theta\": 1e4}, \"use_mtp\""),
              HasSubstr("rope_theta: differs"));
  EXPECT_THAT(edited("\"use_mtp\"", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4}, \"use_mtp\""),
              HasSubstr("only \"default\" is supported, got \"yarn\""));
}

TEST(Config, EachWrongFieldIsNamed) {
  struct Wrong {
    const char* from;
    const char* to;
    const char* expected;
  };
  const Wrong kWrongs[] = {
      {"\"hidden_size\": 3072", "\"hidden_size\": 0",
       "config.json: hidden_size: must be a whole number from 1"},
      {"\"hidden_size\": 3072", "\"hidden_size\": -5", "hidden_size: must be a whole number"},
      {"\"hidden_size\": 3072", "\"hidden_size\": \"3072\"", "hidden_size: must be a whole number"},
      {"\"hidden_size\": 3072", "\"hidden_size\": 1e30", "hidden_size: must be a whole number"},
      {"\"hidden_size\": 3072, ", "", "hidden_size: missing"},
      {"\"num_attention_heads\": 48", "\"num_attention_heads\": 50",
       "50 is not a multiple of num_key_value_heads 8"},
      {"\"num_key_value_heads\": 8", "\"num_key_value_heads\": 0", "num_key_value_heads: must be"},
      {"\"num_experts_per_tok\": 8", "\"num_experts_per_tok\": 257",
       "257 is more than num_local_experts 256"},
      {"\"num_local_experts\": 256", "\"num_local_experts\": 70000", "num_local_experts: must be"},
      {"\"num_hidden_layers\": 62", "\"num_hidden_layers\": 61",
       "attn_type_list: must be an array of num_hidden_layers = 61"},
      {"\"attn_type_list\": [1", "\"attn_type_list\": [0", "attn_type_list: only 1"},
      {"\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 2", "rms_norm_eps: must be between"},
      {"\"rope_theta\": 5000000", "\"rope_theta\": 0", "rope_theta: must be above 1"},
      {"\"silu\"", "\"gelu\"", "hidden_act: only \"silu\""},
      {"\"sigmoid\"", "\"softmax\"", "scoring_func: only \"sigmoid\""},
      {"\"per_layer\"", "\"per_head\"", "qk_norm_type: only \"per_layer\""},
      {"\"use_qk_norm\": true", "\"use_qk_norm\": 1", "use_qk_norm: must be true or false"},
      {"\"shared_intermediate_size\": 0", "\"shared_intermediate_size\": 8",
       "shared experts are not supported"},
      {"\"fp8\"", "\"gptq\"", "quantization_config: quant_method: only \"fp8\""},
      {"[128, 128]", "[64, 128]", "weight_block_size: only [128, 128]"},
      {"\"dynamic\"", "\"static\"", "activation_scheme: only \"dynamic\""},
      {"\"minimax_m2\"", "\"minimax_m1\"", "it comes with MiniMax-M1"},
      {"\"minimax_m2\"", "\"llama\"", "only minimax_m2 is supported, got \"llama\""},
      {"\"model_type\": \"minimax_m2\", ", "", "model_type: missing"},
      {"{", "[", "config.json"},
  };
  for (const Wrong& w : kWrongs) EXPECT_THAT(edited(w.from, w.to), HasSubstr(w.expected)) << w.to;
}

TEST(Config, AllWrongFieldsAreListed) {
  std::string text = replaced(kM2, "\"hidden_size\": 3072", "\"hidden_size\": 0");
  text = replaced(text, "\"silu\"", "\"relu\"");
  text = replaced(text, "\"rotary_dim\": 64", "\"rotary_dim\": 7");
  const std::string error = faults_of(text);
  EXPECT_THAT(error, HasSubstr("3 faults"));
  for (const char* field : {"hidden_size", "hidden_act", "rotary_dim"}) EXPECT_THAT(error, HasSubstr(field));
}

TEST(Config, StopIdsInOrderOfTrust) {
  EXPECT_THAT(parsed(kM2).stop_token_ids, ElementsAre(2u));
  const std::string generation =
      R"({"bos_token_id": 200019, "eos_token_id": [200020, 7], "temperature": 0.5, "top_p": 0.95, "top_k": 40})";
  const std::string tokenizer_config =
      R"({"eos_token": "[e~[", "added_tokens_decoder": {"200019": {"content": "]~b]"}, "200020": {"content": "[e~["}}})";
  const ModelSpec s = parsed(kM2, generation, tokenizer_config);
  EXPECT_THAT(s.stop_token_ids, ElementsAre(200020u, 7u));
  EXPECT_EQ(s.bos_token_id, 200019u);
  EXPECT_FLOAT_EQ(*s.default_temperature, 0.5f);
  EXPECT_FLOAT_EQ(*s.default_top_p, 0.95f);
  EXPECT_EQ(s.default_top_k, 40u);
  EXPECT_THAT(parsed(kM2, "{}", tokenizer_config).stop_token_ids, ElementsAre(200020u));
  EXPECT_THAT(parsed(kM2, std::nullopt, R"({"eos_token": {"content": "[e~["}})",
                     R"({"added_tokens": [{"id": 200020, "content": "[e~["}]})")
                  .stop_token_ids,
              ElementsAre(200020u));
  EXPECT_EQ(parsed(kM2, R"({"do_sample": false, "temperature": 1.0})").default_temperature, 0.0f);
  const ModelSpec none = parsed(replaced(kM2, "\"eos_token_id\": 2,", ""));
  EXPECT_TRUE(none.stop_token_ids.empty());
  EXPECT_THAT(none.notes[0], HasSubstr("no stop token"));
  EXPECT_THAT(faults_of(kM2, R"({"eos_token_id": 200064})"),
              HasSubstr("generation_config.json: eos_token_id"));
  EXPECT_THAT(faults_of(kM2, R"({"top_p": 1.5})"), HasSubstr("generation_config.json: top_p"));
  EXPECT_THAT(faults_of(kM2, "{"), HasSubstr("generation_config.json: not valid JSON"));
}

TEST(Config, RandomDamageNeverCrashes) {
  SplitMix64 random(7);
  const std::string valid = kM2;
  const char* const kPieces[] = {"{",
                                 "}",
                                 "[",
                                 "]",
                                 "\"",
                                 ",",
                                 "-1",
                                 "0",
                                 "1e308",
                                 "1e-400",
                                 "null",
                                 "4294967296",
                                 "18446744073709551615",
                                 "\"x\"",
                                 "true",
                                 "0.5",
                                 "{}",
                                 "[]"};
  size_t clean = 0;
  for (int i = 0; i < 10'000; ++i) {
    std::string text = valid;
    for (uint64_t edits = 1 + random.below(3); edits > 0; --edits) {
      const size_t at = random.below(text.size() + 1);
      switch (random.below(5)) {
        case 0:
          text.resize(at);
          break;
        case 1:
          text.insert(at, kPieces[random.below(std::size(kPieces))]);
          break;
        case 2:
          text.erase(at, 1 + random.below(12));
          break;
        case 3: {  // another value for a field
          const size_t colon = text.find(": ", at);
          if (colon != std::string::npos) {
            const size_t end = text.find_first_of(",}", colon);
            text.replace(colon + 2, end == std::string::npos ? std::string::npos : end - colon - 2,
                         kPieces[random.below(std::size(kPieces))]);
          }
          break;
        }
        default:
          if (at < text.size()) text[at] = static_cast<char>(random.next());
      }
    }
    FaultList faults;
    const ModelSpec s = parse_config({text, text, text, text}, "n", faults).spec;
    if (!faults.empty()) continue;
    ++clean;  // then it must be a model that could exist
    ASSERT_GT(s.hidden_size, 0u);
    ASSERT_GT(s.num_kv_heads, 0u);
    ASSERT_EQ(s.num_heads % s.num_kv_heads, 0u);
    ASSERT_LE(s.rotary_dim, s.head_dim);
    ASSERT_LE(s.experts_per_token, s.num_experts);
    ASSERT_EQ(s.layer_kinds.size(), s.num_layers);
  }
  EXPECT_LT(clean, 8'000u);
}

}  // namespace
}  // namespace conclave
