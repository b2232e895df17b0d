// What is done with hostile tokenizer files, split patterns, token ids and text; shared by the seeded loop
// and libFuzzer. Each aborts when what was accepted breaks a promise.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace conclave::fuzz {

// A small valid tokenizer file to mutate: all bytes, a few merges and added tokens.
std::string seed_tokenizer_json();
// Parses a tokenizer file and, when it is accepted, encodes and decodes with it. Returns whether it was
// accepted.
bool try_tokenizer_json(std::string_view json);
// Compiles a split pattern and, when it is accepted, matches with it. Returns whether it was accepted.
bool try_split_pattern(std::string_view pattern);
// Any bytes are text: encoding never fails and decoding gives them back, ill-formed parts replaced.
void try_text(std::string_view text);
// Any ids are tokens: streaming, cut as `cuts` says, equals decoding at once.
void try_token_ids(std::span<const uint8_t> ids, uint8_t cuts);

}  // namespace conclave::fuzz
