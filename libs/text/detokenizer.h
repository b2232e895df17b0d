// Text from tokens as they come, never half a character.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "libs/text/tokenizer.h"
#include "libs/text/utf8.h"

namespace conclave::text {

// For one stream; not thread-safe. The tokenizer must outlive it. The concatenation of everything push() and
// flush() return equals Tokenizer::decode of all ids, for every way to cut them; U+FFFD appears only for
// bytes that can no longer become a character.
class Detokenizer {
 public:
  // `kept`: special tokens that become text though `skip_special` is set. Some releases of a tokenizer flag
  // the tags of thinking and tool calls as special, and whoever parses the output needs them.
  Detokenizer(const Tokenizer& tokenizer, bool skip_special, std::vector<TokenId> kept = {})
      : tokenizer_(&tokenizer), skip_special_(skip_special), kept_(std::move(kept)) {}

  // The text that `id` completes; often empty in the middle of a character.
  std::string push(TokenId id) { return push(std::span<const TokenId>(&id, 1)); }
  std::string push(std::span<const TokenId> ids) {
    std::string out;
    for (const TokenId id : ids) {
      if (skip_special_ && tokenizer_->is_special(id) &&
          std::find(kept_.begin(), kept_.end(), id) == kept_.end()) {
        continue;
      }
      stream_.push(tokenizer_->token_bytes(id), out);
    }
    return out;
  }
  // The end: U+FFFD if a character is unfinished, else empty. The object is then as new.
  std::string flush() {
    std::string out;
    stream_.flush(out);
    return out;
  }
  // Bytes held back, at most 3.
  size_t held() const { return stream_.held(); }

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::vector<TokenId> kept_;
  Utf8Stream stream_;
};

}  // namespace conclave::text
