// What a tokenizer.json says, in plain types.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/text/bpe.h"

namespace conclave::text {

struct AddedToken {
  std::string content;
  TokenId id = 0;
  bool special = false;
  bool normalized = false;   // matched in the normalized text instead of the raw one
  bool single_word = false;  // only where no word character adjoins
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
};

// One step of the pre-tokenizer.
struct SplitStep {
  enum class Behavior { kRemoved, kIsolated };
  std::string pattern;
  bool is_regex = true;
  Behavior behavior = Behavior::kIsolated;
  bool invert = false;  // with kRemoved: the matches stay and what lies between goes
};

struct TokenizerSpec {
  struct Token {
    uint32_t offset = 0;
    uint32_t length = 0;
    bool present = false;
    bool special = false;
    bool added = false;
  };
  bool nfc = false;
  std::vector<SplitStep> splits;
  // ByteLevel's flag: each piece that does not start with a space gets one, after all splits, or before them
  // when the only split is ByteLevel's own expression.
  bool add_prefix_space = false;
  bool prefix_before_splits = false;
  bool ignore_merges = false;
  // The bytes that each id decodes to lie in `bytes`; ids without a token are not present.
  std::string bytes;
  std::vector<Token> tokens;
  std::array<TokenId, 256> byte_ids{};
  std::vector<Merge> merges;
  std::vector<AddedToken> added;
};

// Bounds on a tokenizer file.
inline constexpr size_t kMaxTokenizerFileBytes = 256u << 20;
inline constexpr TokenId kMaxTokenId = (1u << 24) - 1;

// Reads the JSON text of a tokenizer file. Whatever it asks for that is not implemented is INVALID_ARGUMENT
// whose field is the JSON path, e.g. "pre_tokenizer.pretokenizers[1].type".
StatusOr<TokenizerSpec> parse_tokenizer_json(std::string_view json);

}  // namespace conclave::text
