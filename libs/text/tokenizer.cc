#include "libs/text/tokenizer.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <unordered_map>

#include "libs/text/added_tokens.h"
#include "libs/text/bpe.h"
#include "libs/text/nfc.h"
#include "libs/text/utf8.h"
#include "libs/text/word_cache.h"

namespace conclave::text {
namespace {

constexpr size_t kMaxInputLimit = 1u << 30;  // byte ranges are 32 bits wide

std::atomic<uint32_t> next_cache_owner{1};

StatusOr<std::string> read_file(const std::string& path, size_t limit) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return not_found("cannot open " + path + ": " + std::strerror(errno));
  in.seekg(0, std::ios::end);
  const std::streamoff size = in.tellg();
  if (size < 0 || static_cast<uint64_t>(size) > limit) {
    return invalid_argument(path + " is larger than " + std::to_string(limit) + " bytes, or not a file");
  }
  std::string text(static_cast<size_t>(size), '\0');
  in.seekg(0);
  in.read(text.data(), size);
  if (!in) return data_loss("cannot read " + path);
  return text;
}

}  // namespace

struct Tokenizer::Engine {
  std::vector<SplitPattern> splits;
  Bpe bpe;
  AddedTokenMatcher raw_tokens;
  AddedTokenMatcher normalized_tokens;
  std::unordered_map<std::string_view, TokenId> whole_words;  // with ignore_merges only
  uint32_t cache_owner = next_cache_owner.fetch_add(1, std::memory_order_relaxed);

  explicit Engine(const TokenizerSpec& spec)
      : bpe(spec.byte_ids, spec.merges),
        raw_tokens(spec.added, /*normalized=*/false, spec.nfc),
        normalized_tokens(spec.added, /*normalized=*/true, spec.nfc) {}
};

// The working state of one encode call.
struct Tokenizer::Run {
  std::vector<TokenId> ids;
  std::vector<Section> sections;
  std::vector<ByteRange> pieces;
  std::vector<ByteRange> next_pieces;
  std::vector<ByteRange> matches;
  std::string normalized;
  std::string prefixed;
  std::string word;
  WordCache& cache = WordCache::of_this_thread();
};

Tokenizer::Tokenizer(TokenizerSpec spec, TokenizerOptions options)
    : spec_(std::move(spec)), options_(options), engine_(std::make_unique<Engine>(spec_)) {
  if (spec_.ignore_merges) {
    for (size_t id = 0; id < spec_.tokens.size(); ++id) {
      const auto token = static_cast<TokenId>(id);
      if (has_token(token) && !spec_.tokens[id].added)
        engine_->whole_words.emplace(token_bytes(token), token);
    }
  }
}

Tokenizer::~Tokenizer() = default;

StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::load(const std::string& path, TokenizerOptions options) {
  ASSIGN_OR_RETURN(const std::string json, read_file(path, kMaxTokenizerFileBytes));
  auto tokenizer = from_json(json, options);
  if (!tokenizer.ok()) return annotate(tokenizer.status(), path);
  return tokenizer;
}

StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::from_json(std::string_view json, TokenizerOptions options) {
  if (options.max_input_bytes > kMaxInputLimit)
    return invalid_field("max_input_bytes", "max_input_bytes is over 1 GiB");
  ASSIGN_OR_RETURN(TokenizerSpec spec, parse_tokenizer_json(json));
  std::vector<SplitPattern> splits;
  for (const SplitStep& step : spec.splits) {
    auto pattern = step.is_regex ? SplitPattern::regex(step.pattern) : SplitPattern::literal(step.pattern);
    if (!pattern.ok()) return with_field(pattern.status(), "pre_tokenizer");
    splits.push_back(std::move(*pattern));
  }
  spec.merges.shrink_to_fit();
  std::unique_ptr<Tokenizer> out(new Tokenizer(std::move(spec), options));
  out->engine_->splits = std::move(splits);
  out->spec_.merges = {};  // now in the merge table
  return out;
}

void Tokenizer::encode_word(std::string_view word, Run& run) const {
  const uint32_t owner = engine_->cache_owner;
  if (run.cache.lookup(owner, word, run.ids)) return;
  const size_t start = run.ids.size();
  const auto whole = spec_.ignore_merges ? engine_->whole_words.find(word) : engine_->whole_words.end();
  if (whole != engine_->whole_words.end()) {
    run.ids.push_back(whole->second);
  } else {
    engine_->bpe.encode(word, run.ids);
  }
  run.cache.store(owner, word, {run.ids.data() + start, run.ids.size() - start});
}

// Text without added tokens, after normalization: split, then merge each piece.
Status Tokenizer::encode_plain(std::string_view text, Run& run) const {
  const auto needs_space = [&](std::string_view s) {
    return spec_.add_prefix_space && s.substr(0, 1) != " ";
  };
  if (spec_.prefix_before_splits && needs_space(text)) {
    run.prefixed.assign(" ").append(text);
    text = run.prefixed;
  }
  run.pieces.assign(1, ByteRange{0, static_cast<uint32_t>(text.size())});
  for (size_t i = 0; i < engine_->splits.size(); ++i) {
    const SplitStep& step = spec_.splits[i];
    const bool isolated = step.behavior == SplitStep::Behavior::kIsolated;
    const bool keep_matches = isolated || step.invert;
    const bool keep_gaps = isolated || !step.invert;
    run.next_pieces.clear();
    const auto keep = [&](uint32_t begin, uint32_t end) {
      if (begin < end) run.next_pieces.push_back({begin, end});
    };
    for (const ByteRange piece : run.pieces) {
      run.matches.clear();
      RETURN_IF_ERROR(
          engine_->splits[i].find_all(text.substr(piece.begin, piece.end - piece.begin), run.matches));
      uint32_t done = piece.begin;
      for (const ByteRange match : run.matches) {
        if (keep_gaps) keep(done, piece.begin + match.begin);
        if (keep_matches) keep(piece.begin + match.begin, piece.begin + match.end);
        done = piece.begin + match.end;
      }
      if (keep_gaps) keep(done, piece.end);
    }
    run.pieces.swap(run.next_pieces);
  }
  for (const ByteRange piece : run.pieces) {
    const std::string_view word = text.substr(piece.begin, piece.end - piece.begin);
    if (!spec_.prefix_before_splits && needs_space(word)) {
      run.word.assign(" ").append(word);
      encode_word(run.word, run);
    } else {
      encode_word(word, run);
    }
  }
  return OkStatus();
}

Status Tokenizer::encode_text(std::string_view text, bool find_normalized, Run& run) const {
  if (spec_.nfc && to_nfc(text, run.normalized)) text = run.normalized;
  if (!find_normalized || engine_->normalized_tokens.empty()) return encode_plain(text, run);
  std::vector<Section> sections;
  engine_->normalized_tokens.split(text, {}, sections);
  for (const Section& section : sections) {
    if (section.is_token) {
      run.ids.push_back(section.token);
    } else {
      RETURN_IF_ERROR(
          encode_plain(text.substr(section.range.begin, section.range.end - section.range.begin), run));
    }
  }
  return OkStatus();
}

StatusOr<std::vector<TokenId>> Tokenizer::encode(std::string_view text, SpecialTokens mode,
                                                 std::span<const ByteRange> literal) const {
  if (text.size() > options_.max_input_bytes) {
    return invalid_argument("the text has " + std::to_string(text.size()) + " bytes; max_input_bytes is " +
                            std::to_string(options_.max_input_bytes));
  }
  uint32_t last = 0;
  for (const ByteRange range : literal) {
    if (range.begin < last || range.end < range.begin || range.end > text.size()) {
      return invalid_argument("the literal ranges of the text are out of order or out of bounds");
    }
    last = range.end;
  }
  std::string repaired;
  if (!is_valid_utf8(text)) {
    if (!literal.empty()) return invalid_argument("literal ranges need well-formed UTF-8");
    repaired = replace_invalid_utf8(text);
    text = repaired;
  }
  Run run;
  run.ids.reserve(text.size() / 3 + 8);
  if (mode == SpecialTokens::kAsText) {
    RETURN_IF_ERROR(encode_text(text, /*find_normalized=*/false, run));
    return std::move(run.ids);
  }
  engine_->raw_tokens.split(text, literal, run.sections);
  size_t next_literal = 0;
  for (const Section& section : run.sections) {
    if (section.is_token) {
      run.ids.push_back(section.token);
      continue;
    }
    // Normalizing moves bytes, so a section that holds literal text is searched for no normalized token at
    // all.
    while (next_literal < literal.size() && literal[next_literal].end <= section.range.begin) ++next_literal;
    const bool has_literal = next_literal < literal.size() && literal[next_literal].begin < section.range.end;
    RETURN_IF_ERROR(encode_text(text.substr(section.range.begin, section.range.end - section.range.begin),
                                !has_literal, run));
  }
  return std::move(run.ids);
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special) const {
  std::string out;
  Utf8Stream stream;
  for (const TokenId id : ids) {
    if (skip_special && is_special(id)) continue;
    stream.push(token_bytes(id), out);
  }
  stream.flush(out);
  return out;
}

std::string_view Tokenizer::token_bytes(TokenId id) const {
  if (!has_token(id)) return {};
  const TokenizerSpec::Token& token = spec_.tokens[id];
  return std::string_view(spec_.bytes).substr(token.offset, token.length);
}

std::optional<TokenId> Tokenizer::special_id(std::string_view name) const {
  const auto it = std::find_if(spec_.added.begin(), spec_.added.end(),
                               [&](const AddedToken& token) { return token.content == name; });
  if (it == spec_.added.end()) return std::nullopt;
  return it->id;
}

}  // namespace conclave::text
