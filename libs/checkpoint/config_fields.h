// Reading the fields of a checkpoint's JSON files. Private to libs/checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libs/checkpoint/faults.h"
#include "libs/checkpoint/json.h"
#include "libs/checkpoint/model_config.h"
#include "libs/model/model_spec.h"

namespace conclave::config {

// Upper limits that no model of these families comes near; they keep all size arithmetic inside 64 bits.
inline constexpr uint64_t kMaxWidth = 1u << 20;
inline constexpr uint64_t kMaxLayers = 4096;
inline constexpr uint64_t kMaxExperts = 65535;  // expert ids are 16 bits wide
inline constexpr uint64_t kMaxVocab = 1u << 24;
inline constexpr uint64_t kMaxPositions = 1u << 30;

inline constexpr const char* kConfig = "config.json";
inline constexpr const char* kGeneration = "generation_config.json";
inline constexpr const char* kTokenizerConfig = "tokenizer_config.json";

// Reads fields of one object and records what is wrong with them.
class Fields {
 public:
  Fields(const json::object& object, std::string file, FaultList& faults)
      : object_(object), file_(std::move(file)), faults_(faults) {}

  void fault(std::string_view key, std::string_view what) {
    faults_.add(file_ + ": " + std::string(key), what);
  }

  const json::value* find(std::string_view key) const { return json::find(object_, key); }

  // A whole number in [low, high]; absent is a fault unless there is a fallback.
  uint64_t count(std::string_view key, uint64_t low, uint64_t high,
                 std::optional<uint64_t> fallback = std::nullopt) {
    const json::value* v = find(key);
    if (v == nullptr) {
      if (!fallback) fault(key, "missing");
      return fallback.value_or(0);
    }
    const auto n = json::as_count(*v);
    if (!n || *n < low || *n > high) {
      fault(key, "must be a whole number from " + std::to_string(low) + " to " + std::to_string(high) +
                     ", got " + printable(boost::json::serialize(*v)));
      return 0;
    }
    return *n;
  }

  std::optional<double> number(std::string_view key) {
    const json::value* v = find(key);
    if (v == nullptr) return std::nullopt;
    const auto n = json::as_number(*v);
    if (!n) fault(key, "must be a number, got " + json::type_name(*v));
    return n;
  }

  bool flag(std::string_view key, bool fallback) {
    const json::value* v = find(key);
    if (v == nullptr) return fallback;
    if (!v->is_bool()) {
      fault(key, "must be true or false, got " + json::type_name(*v));
      return fallback;
    }
    return v->get_bool();
  }

  std::optional<std::string> text(std::string_view key) {
    const json::value* v = find(key);
    if (v == nullptr) return std::nullopt;
    if (!v->is_string()) {
      fault(key, "must be a string, got " + json::type_name(*v));
      return std::nullopt;
    }
    return std::string(json::view(v->get_string()));
  }

  // A token id or a list of them, each below `vocab`.
  std::vector<TokenId> token_ids(std::string_view key, uint32_t vocab) {
    std::vector<TokenId> ids;
    const json::value* v = find(key);
    if (v == nullptr) return ids;
    auto one = [&](const json::value& item) {
      const auto n = json::as_count(item);
      if (!n || *n >= vocab) {
        fault(key, "must be a token id below vocab_size " + std::to_string(vocab) + ", got " +
                       printable(boost::json::serialize(item)));
      } else {
        ids.push_back(static_cast<TokenId>(*n));
      }
    };
    if (v->is_array()) {
      for (const json::value& item : v->get_array()) one(item);
    } else {
      one(*v);
    }
    return ids;
  }

 private:
  const json::object& object_;
  std::string file_;
  FaultList& faults_;
};

// Stop and first tokens and sampling defaults: generation_config.json, then tokenizer_config.json, then
// `config` itself.
void token_defaults(const ConfigTexts& texts, Fields& config, ModelSpec& spec, FaultList& faults);

}  // namespace conclave::config
