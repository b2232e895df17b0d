#include "libs/checkpoint/config_fields.h"

namespace conclave::config {
namespace {

// The id of a token by its text, from tokenizer_config's added_tokens_decoder or tokenizer.json's
// added_tokens.
std::optional<TokenId> token_id_of(const std::string& content, const json::object& tokenizer_config,
                                   const std::optional<std::string>& tokenizer, FaultList& faults) {
  auto content_is = [&](const json::value& entry) {
    if (!entry.is_object()) return false;
    const json::value* c = json::find(entry.get_object(), "content");
    return c != nullptr && c->is_string() && json::view(c->get_string()) == content;
  };
  const json::value* decoder = json::find(tokenizer_config, "added_tokens_decoder");
  if (decoder != nullptr && decoder->is_object()) {
    for (const auto& [key, entry] : decoder->get_object()) {
      if (!content_is(entry)) continue;
      const std::string digits(key.data(), key.size());
      if (!digits.empty() && digits.size() < 10 &&
          digits.find_first_not_of("0123456789") == std::string::npos) {
        return static_cast<TokenId>(std::stoul(digits));
      }
    }
  }
  if (!tokenizer) return std::nullopt;
  auto parsed = json::parse_object(*tokenizer, "tokenizer.json");
  if (!parsed.ok()) {
    faults.add("tokenizer.json", message_of(parsed.status()));
    return std::nullopt;
  }
  const json::value* added = json::find(*parsed, "added_tokens");
  if (added == nullptr || !added->is_array()) return std::nullopt;
  for (const json::value& entry : added->get_array()) {
    if (!content_is(entry)) continue;
    const json::value* id = json::find(entry.get_object(), "id");
    const auto n = id != nullptr ? json::as_count(*id) : std::nullopt;
    if (n && *n < kMaxVocab) return static_cast<TokenId>(*n);
  }
  return std::nullopt;
}

// A token field of tokenizer_config: a string, or an object with "content".
std::optional<std::string> token_text(const json::object& o, std::string_view key) {
  const json::value* v = json::find(o, key);
  if (v != nullptr && v->is_object()) v = json::find(v->get_object(), "content");
  if (v == nullptr || !v->is_string()) return std::nullopt;
  return std::string(json::view(v->get_string()));
}

}  // namespace

void token_defaults(const ConfigTexts& texts, Fields& config, ModelSpec& spec, FaultList& faults) {
  json::object generation;
  if (texts.generation_config) {
    auto parsed = json::parse_object(*texts.generation_config, kGeneration);
    if (parsed.ok()) {
      generation = std::move(*parsed);
    } else {
      faults.add(kGeneration, message_of(parsed.status()));
    }
  }
  Fields g(generation, kGeneration, faults);
  spec.stop_token_ids = g.token_ids("eos_token_id", spec.vocab_size);
  const auto bos = g.token_ids("bos_token_id", spec.vocab_size);
  if (!bos.empty()) spec.bos_token_id = bos.front();
  if (g.flag("do_sample", true)) {
    if (const auto t = g.number("temperature")) {
      if (!(*t >= 0 && *t <= 100)) g.fault("temperature", "must be from 0 to 100");
      spec.default_temperature = static_cast<float>(*t);
    }
    if (const auto p = g.number("top_p")) {
      if (!(*p > 0 && *p <= 1)) g.fault("top_p", "must be in (0, 1]");
      spec.default_top_p = static_cast<float>(*p);
    }
    if (g.find("top_k") != nullptr)
      spec.default_top_k = static_cast<uint32_t>(g.count("top_k", 0, kMaxVocab));
    if (const auto p = g.number("min_p")) {
      if (!(*p >= 0 && *p <= 1)) g.fault("min_p", "must be in [0, 1]");
      spec.default_min_p = static_cast<float>(*p);
    }
  } else {
    spec.default_temperature = 0.0f;
  }
  if (const auto r = g.number("repetition_penalty")) {
    if (!(*r > 0 && *r <= 1000)) g.fault("repetition_penalty", "must be in (0, 1000]");
    spec.default_repetition_penalty = static_cast<float>(*r);
  }
  if (spec.stop_token_ids.empty() && texts.tokenizer_config) {
    auto parsed = json::parse_object(*texts.tokenizer_config, kTokenizerConfig);
    if (!parsed.ok()) {
      faults.add(kTokenizerConfig, message_of(parsed.status()));
    } else if (const auto eos = token_text(*parsed, "eos_token")) {
      const auto id = token_id_of(*eos, *parsed, texts.tokenizer, faults);
      if (id && *id < spec.vocab_size) spec.stop_token_ids.push_back(*id);
    }
  }
  // Last resort: config.json carries defaults of other models in some re-releases.
  if (spec.stop_token_ids.empty()) spec.stop_token_ids = config.token_ids("eos_token_id", spec.vocab_size);
  if (spec.stop_token_ids.empty()) {
    spec.notes.push_back(
        "no stop token in generation_config.json, tokenizer_config.json or config.json: only max_tokens ends "
        "an answer");
  }
}

}  // namespace conclave::config
