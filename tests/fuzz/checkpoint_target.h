// What is done with bytes that claim to be a part of a checkpoint; shared by the seeded loop and libFuzzer.
// Each aborts when an accepted input breaks what its parser promises.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace conclave::fuzz {

// A whole safetensors file. Returns whether it was accepted without a fault.
bool try_safetensors(std::span<const std::byte> bytes);
// A file whose header is `json`, followed by `data_bytes` of data: the length field is always right.
bool try_safetensors_header(const std::string& json, size_t data_bytes);
// config.json, with the same text as generation_config.json, tokenizer_config.json and tokenizer.json.
bool try_config(const std::string& text);

}  // namespace conclave::fuzz
