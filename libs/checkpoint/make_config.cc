#include <set>

#include "libs/checkpoint/json.h"
#include "libs/checkpoint/make_internal.h"
#include "libs/checkpoint/model_config.h"

namespace conclave::make {
namespace {

// Fields that our templates leave out and that may still be set.
const std::set<std::string, std::less<>>& optional_fields() {
  static const std::set<std::string, std::less<>> kFields{"rope_parameters", "partial_rotary_factor"};
  return kFields;
}

// config.json of MiniMax-M2 (facts of the published file), in its order.
json::object m2_config() {
  return json::object{{"architectures", json::array{"MiniMaxM2ForCausalLM"}},
                      {"attn_type_list", json::array{}},
                      {"head_dim", 128},
                      {"hidden_act", "silu"},
                      {"hidden_size", 3072},
                      {"intermediate_size", 1536},
                      {"max_position_embeddings", 196608},
                      {"model_type", "minimax_m2"},
                      {"mtp_transformer_layers", 1},
                      {"num_attention_heads", 48},
                      {"num_experts_per_tok", 8},
                      {"num_hidden_layers", 62},
                      {"num_key_value_heads", 8},
                      {"num_local_experts", 256},
                      {"num_mtp_modules", 3},
                      {"qk_norm_type", "per_layer"},
                      {"rms_norm_eps", 1e-06},
                      {"rope_theta", 5000000},
                      {"rotary_dim", 64},
                      {"scoring_func", "sigmoid"},
                      {"shared_intermediate_size", 0},
                      {"tie_word_embeddings", false},
                      {"use_cache", true},
                      {"use_mtp", true},
                      {"use_qk_norm", true},
                      {"use_routing_bias", true},
                      {"vocab_size", 200064}};
}

json::object tiny_m2_config() {
  json::object c = m2_config();
  c["head_dim"] = 32;
  c["hidden_size"] = 128;
  c["intermediate_size"] = 64;
  c["num_attention_heads"] = 8;
  c["num_experts_per_tok"] = 4;
  c["num_hidden_layers"] = 4;
  c["num_key_value_heads"] = 2;
  c["num_local_experts"] = 16;
  c["rotary_dim"] = 16;
  c["vocab_size"] = 1024;
  return c;
}

Status set_field(json::object& config, const std::string& key, const std::string& text) {
  const size_t dot = key.find('.');
  const std::string top = key.substr(0, dot);
  if (config.if_contains(top) == nullptr && optional_fields().count(top) == 0) {
    return invalid_field(key, "--set " + key + ": config.json has no such field");
  }
  boost::json::error_code error;
  json::value v = boost::json::parse(text, error);
  if (error) v = boost::json::string(text);
  if (dot == std::string::npos) {
    config[top] = std::move(v);
    return OkStatus();
  }
  json::value& inner = config[top];
  if (inner.is_null()) inner.emplace_object();
  if (!inner.is_object() || dot + 1 == key.size())
    return invalid_field(key, "--set " + key + ": " + top + " is not an object");
  inner.get_object()[key.substr(dot + 1)] = std::move(v);
  return OkStatus();
}

// One field a line, as published files are; nested values stay on their line.
std::string pretty(const json::object& o) {
  std::string out = "{\n";
  bool first = true;
  for (const auto& [key, v] : o) {
    if (!first) out += ",\n";
    first = false;
    out += "  " + boost::json::serialize(key) + ": " + boost::json::serialize(v);
  }
  return out + "\n}\n";
}

}  // namespace

StatusOr<MadeConfig> make_config(const MakeOptions& options) {
  json::object config;
  if (options.geometry == "m2") {
    config = m2_config();
  } else if (options.geometry == "tiny-m2") {
    config = tiny_m2_config();
  } else if (options.geometry == "m1" || options.geometry == "tiny-m1") {
    return invalid_field(
        "geometry",
        "geometry " + options.geometry +
            " is not supported yet: it comes with MiniMax-M1's lightning layers; use m2 or tiny-m2");
  } else {
    return invalid_field("geometry", "unknown geometry \"" + options.geometry + "\": m2 or tiny-m2");
  }
  if (options.layers != 0) config["num_hidden_layers"] = options.layers;
  bool own_types = false;
  for (const auto& [key, text] : options.set) {
    RETURN_IF_ERROR(set_field(config, key, text));
    own_types = own_types || key == "attn_type_list";
  }
  if (!own_types) {
    const auto n = json::as_count(config["num_hidden_layers"]);
    if (n && *n <= 4096) config["attn_type_list"] = json::array(*n, json::value(1));
  }
  if (options.dtype == "fp8") {
    config["quantization_config"] =
        json::object{{"activation_scheme", "dynamic"},
                     {"fmt", "float8_e4m3fn"},
                     {"modules_to_not_convert", json::array{"gate", "e_score_correction_bias", "lm_head"}},
                     {"quant_method", "fp8"},
                     {"weight_block_size", json::array{128, 128}}};
  } else if (options.dtype == "bf16" || options.dtype == "f32") {
    config["dtype"] = options.dtype == "bf16" ? "bfloat16" : "float32";
  } else {
    return invalid_field("dtype", "unknown dtype \"" + options.dtype + "\": fp8, bf16 or f32");
  }
  MadeConfig made;
  made.config_json = pretty(config);
  FaultList faults;
  ConfigTexts texts;
  texts.config = made.config_json;
  made.spec = parse_config(texts, directory_name(options.out), faults).spec;
  if (faults.empty() && made.spec.vocab_size < min_vocab_size()) {
    faults.add("config.json: vocab_size",
               "must be at least " + std::to_string(min_vocab_size()) +
                   " to hold the 256 bytes and the added tokens of the made tokenizer");
  }
  if (faults.empty() && options.dtype == "fp8" && options.fused && made.spec.intermediate_size % 128 != 0) {
    faults.add("config.json: intermediate_size", "must be a multiple of 128 for fused FP8 experts");
  }
  RETURN_IF_ERROR(faults.to_status("cannot make this checkpoint"));
  return made;
}

}  // namespace conclave::make
