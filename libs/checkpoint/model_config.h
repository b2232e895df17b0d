// ModelSpec from a checkpoint's own files: config.json, generation_config.json and tokenizer_config.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "libs/base/status.h"
#include "libs/checkpoint/faults.h"
#include "libs/model/model_spec.h"

namespace conclave {

// The texts of the files; an absent file is nullopt. Only config is required.
struct ConfigTexts {
  std::string config;
  std::optional<std::string> generation_config;
  std::optional<std::string> tokenizer_config;
  // Only consulted for the id of tokenizer_config's eos_token, when no other file gives a stop id.
  std::optional<std::string> tokenizer;
};

struct ParsedConfig {
  ModelSpec spec;
  // Layers behind the last one that hold multi-token-prediction weights, if the checkpoint has any: known,
  // not used.
  uint32_t mtp_layers = 0;
};

// Every wrong field is added to `faults`, named as in the file ("config.json: num_attention_heads"); the
// result is meaningful only when none was added. `name` becomes spec.name.
ParsedConfig parse_config(const ConfigTexts& texts, const std::string& name, FaultList& faults);

// Reads the files of `dir`; spec.name is the directory's name. NOT_FOUND when dir or config.json is not
// there; INVALID_ARGUMENT listing every fault otherwise.
StatusOr<ParsedConfig> read_config(const std::string& dir);
StatusOr<ModelSpec> read_model_spec(const std::string& dir);

// The last component of a path, for spec.name.
std::string directory_name(const std::string& dir);

}  // namespace conclave
