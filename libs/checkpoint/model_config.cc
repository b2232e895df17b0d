#include "libs/checkpoint/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <vector>

#include "libs/checkpoint/config_fields.h"
#include "libs/checkpoint/json.h"

namespace conclave {
namespace {

using config::Fields;
using config::kConfig;
using config::kMaxExperts;
using config::kMaxLayers;
using config::kMaxPositions;
using config::kMaxVocab;
using config::kMaxWidth;

// The rotated part of a head: rotary_dim, or partial_rotary_factor (of the config or of rope_parameters)
// times head_dim. Files may have any of them, and must not contradict themselves.
uint32_t rotary_dim(Fields& config, const json::object* rope, uint32_t head_dim, FaultList& faults) {
  struct Source {
    std::string key;
    uint32_t dims;
  };
  std::vector<Source> sources;
  if (config.find("rotary_dim") != nullptr) {
    sources.push_back({"rotary_dim", static_cast<uint32_t>(config.count("rotary_dim", 2, kMaxWidth))});
  }
  auto from_factor = [&](Fields& fields, const std::string& shown) {
    const auto factor = fields.number("partial_rotary_factor");
    if (!factor) return;
    const double dims = *factor * head_dim;
    if (!(*factor > 0 && *factor <= 1) || std::abs(dims - std::round(dims)) > 1e-6 * head_dim) {
      fields.fault(
          "partial_rotary_factor",
          "must be in (0, 1] and give a whole number of dimensions of head_dim " + std::to_string(head_dim));
      return;
    }
    sources.push_back({shown, static_cast<uint32_t>(std::lround(dims))});
  };
  from_factor(config, "partial_rotary_factor");
  if (rope != nullptr) {
    Fields fields(*rope, std::string(kConfig) + ": rope_parameters", faults);
    from_factor(fields, "rope_parameters.partial_rotary_factor");
  }
  if (sources.empty()) return head_dim;
  for (size_t i = 1; i < sources.size(); ++i) {
    if (sources[i].dims != sources[0].dims) {
      config.fault(sources[i].key, "says that " + std::to_string(sources[i].dims) +
                                       " dimensions of a head are rotated, but " + sources[0].key + " says " +
                                       std::to_string(sources[0].dims));
    }
  }
  const uint32_t dims = sources[0].dims;
  if (dims % 2 != 0)
    config.fault(sources[0].key, "the rotated part must be even, got " + std::to_string(dims));
  if (dims > head_dim) {
    config.fault(sources[0].key, "rotates " + std::to_string(dims) + " dimensions, more than head_dim " +
                                     std::to_string(head_dim));
  }
  return dims;
}

double rope_theta(Fields& config, const json::object* rope, FaultList& faults) {
  std::optional<double> theta = config.number("rope_theta");
  if (rope != nullptr) {
    Fields fields(*rope, std::string(kConfig) + ": rope_parameters", faults);
    if (const auto inner = fields.number("rope_theta")) {
      if (theta && *theta != *inner) fields.fault("rope_theta", "differs from the top-level rope_theta");
      theta = inner;
    }
    for (const char* key : {"rope_type", "type"}) {
      const auto kind = fields.text(key);
      if (kind && *kind != "default")
        fields.fault(key, "only \"default\" is supported, got \"" + printable(*kind) + "\"");
    }
  }
  if (!theta) return 5e6;
  if (!(*theta > 1 && *theta < 1e30)) config.fault("rope_theta", "must be above 1");
  return *theta;
}

std::optional<uint32_t> weight_block(Fields& config, FaultList& faults) {
  const json::value* v = config.find("quantization_config");
  if (v == nullptr) return std::nullopt;
  if (!v->is_object()) {
    config.fault("quantization_config", "must be an object, got " + json::type_name(*v));
    return std::nullopt;
  }
  Fields q(v->get_object(), std::string(kConfig) + ": quantization_config", faults);
  const auto method = q.text("quant_method");
  if (!method || *method != "fp8") {
    q.fault("quant_method", "only \"fp8\" (E4M3 with 128x128 block scales) is supported, got " +
                                (method ? "\"" + printable(*method) + "\"" : std::string("nothing")));
    return std::nullopt;
  }
  const auto format = q.text("fmt");
  if (format && *format != "float8_e4m3fn" && *format != "e4m3") {
    q.fault("fmt", "only \"float8_e4m3fn\" is supported, got \"" + printable(*format) + "\"");
  }
  const auto activation = q.text("activation_scheme");
  if (activation && *activation != "dynamic") {
    q.fault("activation_scheme", "only \"dynamic\" is supported, got \"" + printable(*activation) + "\"");
  }
  const json::value* block = q.find("weight_block_size");
  const bool ok = block != nullptr && block->is_array() && block->get_array().size() == 2 &&
                  json::as_count(block->get_array()[0]) == 128u &&
                  json::as_count(block->get_array()[1]) == 128u;
  if (!ok) {
    q.fault("weight_block_size",
            "only [128, 128] is supported, got " +
                (block != nullptr ? printable(boost::json::serialize(*block)) : "nothing"));
  }
  return 128;
}

void layer_kinds(Fields& config, ModelSpec& spec) {
  spec.layer_kinds.assign(spec.num_layers, LayerKind::kFullAttention);
  const json::value* v = config.find("attn_type_list");
  if (v != nullptr) {
    if (!v->is_array() || v->get_array().size() != spec.num_layers) {
      config.fault("attn_type_list",
                   "must be an array of num_hidden_layers = " + std::to_string(spec.num_layers) + " entries");
    } else {
      for (const json::value& item : v->get_array()) {
        if (json::as_count(item) != 1u) {
          config.fault("attn_type_list",
                       "only 1 (full attention) is supported; lightning layers come with MiniMax-M1");
          break;
        }
      }
    }
  }
  if (config.find("sliding_window") != nullptr) config.fault("sliding_window", "not supported");
}

// Refuses other families before their fields make a confusing list.
bool known_family(Fields& config, ModelSpec& spec) {
  const auto type = config.text("model_type");
  if (!type) {
    config.fault("model_type", "missing");
    return false;
  }
  spec.model_type = *type;
  if (*type == "minimax_m2") return true;
  if (*type == "minimax_m1" || *type == "minimax" || *type == "minimax_text_01") {
    config.fault("model_type", "\"" + *type +
                                   "\" (lightning attention) is not supported yet: it comes with MiniMax-M1; "
                                   "this release serves minimax_m2");
  } else {
    config.fault("model_type", "only minimax_m2 is supported, got \"" + printable(*type) + "\"");
  }
  return false;
}

void check_conventions(Fields& config, ModelSpec& spec) {
  const auto act = config.text("hidden_act");
  if (act && *act != "silu")
    config.fault("hidden_act", "only \"silu\" is supported, got \"" + printable(*act) + "\"");
  const auto scoring = config.text("scoring_func");
  if (scoring && *scoring != "sigmoid") {
    config.fault("scoring_func", "only \"sigmoid\" is supported, got \"" + printable(*scoring) + "\"");
  }
  spec.use_qk_norm = config.flag("use_qk_norm", true);
  const auto norm = config.text("qk_norm_type");
  if (norm && *norm != "per_layer") {
    config.fault("qk_norm_type", "only \"per_layer\" is supported, got \"" + printable(*norm) + "\"");
  }
  spec.use_routing_bias = config.flag("use_routing_bias", true);
  spec.tie_word_embeddings = config.flag("tie_word_embeddings", false);
  if (config.count("shared_intermediate_size", 0, kMaxWidth, 0) != 0) {
    config.fault("shared_intermediate_size", "shared experts are not supported, must be 0");
  }
  if (config.flag("attention_bias", false)) config.fault("attention_bias", "not supported, must be false");
}

}  // namespace

ParsedConfig parse_config(const ConfigTexts& texts, const std::string& name, FaultList& faults) {
  ParsedConfig out;
  ModelSpec& spec = out.spec;
  spec.name = name;
  auto parsed = json::parse_object(texts.config, kConfig);
  if (!parsed.ok()) {
    faults.add(kConfig, message_of(parsed.status()));
    return out;
  }
  Fields config(*parsed, kConfig, faults);
  if (!known_family(config, spec)) return out;
  auto count = [&](std::string_view key, uint64_t high) {
    return static_cast<uint32_t>(config.count(key, 1, high));
  };
  spec.hidden_size = count("hidden_size", kMaxWidth);
  spec.intermediate_size = count("intermediate_size", kMaxWidth);
  spec.num_layers = count("num_hidden_layers", kMaxLayers);
  spec.num_heads = count("num_attention_heads", kMaxWidth);
  spec.num_kv_heads = count("num_key_value_heads", kMaxWidth);
  spec.head_dim = count("head_dim", kMaxWidth);
  spec.num_experts =
      count(config.find("num_local_experts") == nullptr && config.find("num_experts") != nullptr
                ? "num_experts"
                : "num_local_experts",
            kMaxExperts);
  spec.experts_per_token = count("num_experts_per_tok", kMaxExperts);
  spec.vocab_size = count("vocab_size", kMaxVocab);
  spec.max_positions = count("max_position_embeddings", kMaxPositions);
  if (spec.num_kv_heads != 0 && spec.num_heads % spec.num_kv_heads != 0) {
    config.fault("num_attention_heads", std::to_string(spec.num_heads) +
                                            " is not a multiple of num_key_value_heads " +
                                            std::to_string(spec.num_kv_heads));
  }
  if (static_cast<uint64_t>(spec.num_heads) * spec.head_dim > kMaxWidth) {
    config.fault("head_dim", "num_attention_heads * head_dim is above " + std::to_string(kMaxWidth));
  }
  if (spec.num_experts != 0 && spec.experts_per_token > spec.num_experts) {
    config.fault("num_experts_per_tok", std::to_string(spec.experts_per_token) +
                                            " is more than num_local_experts " +
                                            std::to_string(spec.num_experts));
  }
  const auto eps = config.number("rms_norm_eps");
  if (eps) {
    if (!(*eps > 0 && *eps < 1)) config.fault("rms_norm_eps", "must be between 0 and 1");
    spec.rms_norm_eps = static_cast<float>(*eps);
  }
  const json::object* rope = nullptr;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const json::value* v = config.find(key);
    if (v == nullptr) continue;
    if (!v->is_object()) {
      config.fault(key, "must be an object, got " + json::type_name(*v));
    } else if (rope == nullptr) {
      rope = &v->get_object();
    }
  }
  if (spec.head_dim != 0) spec.rotary_dim = rotary_dim(config, rope, spec.head_dim, faults);
  spec.rope_theta = rope_theta(config, rope, faults);
  check_conventions(config, spec);
  layer_kinds(config, spec);
  spec.weight_block = weight_block(config, faults);
  if (spec.vocab_size != 0) config::token_defaults(texts, config, spec, faults);

  const uint64_t modules = config.count("num_mtp_modules", 0, kMaxLayers, 0);
  if (modules > 0 || config.flag("use_mtp", false)) {
    out.mtp_layers = static_cast<uint32_t>(
        std::max<uint64_t>(modules, config.count("mtp_transformer_layers", 0, kMaxLayers, 0)));
    spec.notes.push_back(
        "config.json: num_mtp_modules, mtp_transformer_layers, use_mtp: ignored; multi-token prediction is "
        "not used");
  }
  return out;
}

std::string directory_name(const std::string& dir) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::absolute(dir, error).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  return path.filename().string();
}

StatusOr<ParsedConfig> read_config(const std::string& dir) {
  ConfigTexts texts;
  auto config = json::read_file(dir + "/config.json", json::kMaxConfigBytes);
  if (!config.ok()) {
    if (config.status().code() != StatusCode::kNotFound) return config.status();
    std::error_code error;
    return with_field(not_found(std::filesystem::is_directory(dir, error)
                                    ? dir + " has no config.json: not a checkpoint directory"
                                    : dir + ": no such directory"),
                      dir);
  }
  texts.config = std::move(*config);
  auto optional_file = [&](const char* file, uint64_t limit, std::optional<std::string>& into) -> Status {
    auto text = json::read_file(dir + "/" + file, limit);
    if (text.ok()) {
      into = std::move(*text);
    } else if (text.status().code() != StatusCode::kNotFound) {
      return text.status();
    }
    return OkStatus();
  };
  RETURN_IF_ERROR(optional_file(config::kGeneration, json::kMaxConfigBytes, texts.generation_config));
  RETURN_IF_ERROR(optional_file(config::kTokenizerConfig, json::kMaxConfigBytes, texts.tokenizer_config));
  FaultList faults;
  ParsedConfig parsed = parse_config(texts, directory_name(dir), faults);
  if (faults.empty() && parsed.spec.stop_token_ids.empty()) {
    // The large file only where it can still help.
    RETURN_IF_ERROR(optional_file("tokenizer.json", json::kMaxLargeFileBytes, texts.tokenizer));
    if (texts.tokenizer) parsed = parse_config(texts, directory_name(dir), faults);
  }
  RETURN_IF_ERROR(faults.to_status(dir));
  return parsed;
}

StatusOr<ModelSpec> read_model_spec(const std::string& dir) {
  ASSIGN_OR_RETURN(ParsedConfig parsed, read_config(dir));
  return std::move(parsed.spec);
}

}  // namespace conclave
