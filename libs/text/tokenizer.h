// Byte-level BPE from a published tokenizer.json, for any vocabulary and its added tokens. Token for token
// what the Python package `tokenizers` computes with add_special_tokens=False.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/text/split_pattern.h"
#include "libs/text/tokenizer_spec.h"

namespace conclave::text {

struct TokenizerOptions {
  // Longest text that encode() takes, in bytes; at most 1 GiB.
  size_t max_input_bytes = 64u << 20;
};

enum class SpecialTokens {
  kParse,   // text that spells an added token becomes that token: for prompts that a template rendered
  kAsText,  // every character is ordinary text; no added token comes out: for what users wrote
};

// Immutable: every member is safe to call from many threads at once.
class Tokenizer {
 public:
  // NOT_FOUND when the file is not there; INVALID_ARGUMENT, whose field is a JSON path, for what it holds.
  static StatusOr<std::unique_ptr<Tokenizer>> load(const std::string& path, TokenizerOptions options = {});
  static StatusOr<std::unique_ptr<Tokenizer>> from_json(std::string_view json, TokenizerOptions options = {});
  ~Tokenizer();

  // Token ids of `text`. Ill-formed UTF-8 is read as U+FFFD, one for each maximal ill-formed part. Within the
  // byte ranges of `literal` (ascending, disjoint) added tokens are ordinary text even under kParse: pass the
  // parts of a rendered prompt that came from users. INVALID_ARGUMENT for text over max_input_bytes, or for
  // ranges that are out of order or meet ill-formed text; RESOURCE_EXHAUSTED when the split expression needs
  // too much work.
  StatusOr<std::vector<TokenId>> encode(std::string_view text, SpecialTokens mode,
                                        std::span<const ByteRange> literal = {}) const;

  // The text of `ids` in valid UTF-8: bytes that form no character become U+FFFD. Ids without a token vanish,
  // and with `skip_special` the special ones.
  std::string decode(std::span<const TokenId> ids, bool skip_special) const;

  // The bytes `id` stands for, possibly part of a character; empty when it has no token.
  std::string_view token_bytes(TokenId id) const;
  // 1 + the highest id that has a token. A model's vocabulary may be larger: the ids beyond must not be
  // sampled.
  size_t vocab_size() const { return spec_.tokens.size(); }
  bool has_token(TokenId id) const { return id < spec_.tokens.size() && spec_.tokens[id].present; }
  // True for added tokens whose "special" flag is set; decode drops these when asked to.
  bool is_special(TokenId id) const { return has_token(id) && spec_.tokens[id].special; }
  // The id of the added token (special or not) that is spelt `name`.
  std::optional<TokenId> special_id(std::string_view name) const;
  // In the order of the file.
  const std::vector<AddedToken>& added_tokens() const { return spec_.added; }

 private:
  struct Engine;
  struct Run;
  Tokenizer(TokenizerSpec spec, TokenizerOptions options);
  Status encode_text(std::string_view text, bool find_normalized, Run& run) const;
  Status encode_plain(std::string_view text, Run& run) const;
  void encode_word(std::string_view word, Run& run) const;

  TokenizerSpec spec_;
  TokenizerOptions options_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace conclave::text
