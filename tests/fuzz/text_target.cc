#include "tests/fuzz/text_target.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "libs/base/check.h"
#include "libs/text/byte_alphabet.h"
#include "libs/text/detokenizer.h"
#include "libs/text/split_pattern.h"
#include "libs/text/tokenizer.h"
#include "libs/text/utf8.h"

namespace conclave::fuzz {
namespace {

using text::Detokenizer;
using text::SpecialTokens;
using text::Tokenizer;

constexpr std::string_view kSamples[] = {
    "", "Hello, wörld! <sep> 123\r\n", "  a\xcc\x81\xe4\xbd\xa0<sep><mark>\xff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};

std::string quoted(std::string_view s) {
  std::string out = "\"";
  for (char c : s) {
    if (c == '"' || c == '\\') out.push_back('\\');
    out.push_back(c);
  }
  return out + "\"";
}

const Tokenizer& seed_tokenizer() {
  static const std::unique_ptr<Tokenizer> instance = [] {
    auto loaded = Tokenizer::from_json(seed_tokenizer_json());
    CONCLAVE_CHECK(loaded.ok());
    return std::move(*loaded);
  }();
  return *instance;
}

}  // namespace

std::string seed_tokenizer_json() {
  std::string vocab;
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    vocab += quoted(text::alphabet_of_bytes({&byte, 1})) + ":" + std::to_string(b) + ",";
  }
  return R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[)"
         R"({"id":260,"content":"<sep>","single_word":false,"lstrip":true,"rstrip":false,"normalized":false,"special":true},)"
         R"({"id":261,"content":"<mark>","single_word":false,"lstrip":false,"rstrip":true,"normalized":true,"special":false}],)"
         R"("normalizer":null,"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":)"
         R"(" ?[\\p{L}\\p{M}]+|\\p{N}{1,3}|\\s+(?!\\S)|(?i:'s)|[^\\s\\p{L}]+|\\s"},"behavior":"Isolated","invert":false},)"
         R"({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]},)"
         R"("post_processor":null,"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","dropout":null,"unk_token":null,)"
         R"("continuing_subword_prefix":"","end_of_word_suffix":"","fuse_unk":false,"byte_fallback":false,"vocab":{)" +
         vocab + R"("aa":256,"aaa":257,"lo":258,"llo":259},"merges":["a a",["aa","a"],"l o","l lo"]}})";
}

bool try_tokenizer_json(std::string_view json) {
  const auto loaded = Tokenizer::from_json(json);
  if (!loaded.ok()) {
    CONCLAVE_CHECK(!message_of(loaded.status()).empty());
    return false;
  }
  const Tokenizer& t = **loaded;
  for (const std::string_view sample : kSamples) {
    for (const auto mode : {SpecialTokens::kParse, SpecialTokens::kAsText}) {
      const auto ids = t.encode(sample, mode);
      if (!ids.ok()) continue;  // a pattern that backtracks too much
      for (const TokenId id : *ids) {
        CONCLAVE_CHECK(t.has_token(id));
        CONCLAVE_CHECK(mode == SpecialTokens::kParse || !t.is_special(id));
      }
      CONCLAVE_CHECK(text::is_valid_utf8(t.decode(*ids, false)));
    }
  }
  return true;
}

bool try_split_pattern(std::string_view pattern) {
  const auto compiled = text::SplitPattern::regex(pattern);
  if (!compiled.ok()) {
    CONCLAVE_CHECK(!message_of(compiled.status()).empty());
    return false;
  }
  for (const std::string_view raw : kSamples) {
    const std::string sample = text::replace_invalid_utf8(raw);
    std::vector<text::ByteRange> matches;
    if (!compiled->find_all(sample, matches).ok()) continue;
    uint32_t done = 0;
    for (const text::ByteRange match : matches) {
      CONCLAVE_CHECK(match.begin >= done && match.end >= match.begin && match.end <= sample.size());
      done = match.end;
    }
  }
  return true;
}

void try_text(std::string_view input) {
  const Tokenizer& t = seed_tokenizer();
  const auto ids = t.encode(input, SpecialTokens::kAsText);
  CONCLAVE_CHECK(ids.ok());
  CONCLAVE_CHECK(t.decode(*ids, false) == text::replace_invalid_utf8(input));
  const auto parsed = t.encode(input, SpecialTokens::kParse);
  CONCLAVE_CHECK(parsed.ok());
}

void try_token_ids(std::span<const uint8_t> input, uint8_t cuts) {
  const Tokenizer& t = seed_tokenizer();
  std::vector<TokenId> ids;
  // Mostly the bytes themselves; 250 and up reach merged, added and missing tokens too.
  for (const uint8_t b : input) ids.push_back(b < 250 ? b : 256u + (b + ids.size()) % 10);
  for (const bool skip : {false, true}) {
    Detokenizer stream(t, skip);
    std::string got;
    for (size_t at = 0; at < ids.size();) {
      const size_t n = std::min<size_t>(1 + (cuts >> (at % 7) & 3), ids.size() - at);
      const std::string piece = stream.push(std::span<const TokenId>(ids).subspan(at, n));
      CONCLAVE_CHECK(text::is_valid_utf8(piece));
      got += piece;
      at += n;
    }
    got += stream.flush();
    CONCLAVE_CHECK(got == t.decode(ids, skip));
  }
}

}  // namespace conclave::fuzz
