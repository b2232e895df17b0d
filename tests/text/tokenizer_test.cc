#include "libs/text/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <thread>

#include "libs/base/random.h"
#include "libs/text/detokenizer.h"
#include "libs/text/utf8.h"
#include "tests/text/golden_file.h"

namespace conclave::text {
namespace {

std::unique_ptr<Tokenizer> small() {
  auto out = Tokenizer::load(data_dir() + "/small_tokenizer.json");
  EXPECT_TRUE(out.ok()) << out.status();
  return std::move(out).value();
}

class Golden : public ::testing::TestWithParam<const char*> {};

TEST_P(Golden, EqualsTheReference) {
  const GoldenFile golden = read_golden(data_dir() + "/golden_" + GetParam() + ".jsonl");
  ASSERT_EQ(static_cast<int64_t>(golden.encode.size()), golden.head.at("encode").to_number<int64_t>());
  ASSERT_EQ(static_cast<int64_t>(golden.decode.size()), golden.head.at("decode").to_number<int64_t>());
  auto tokenizer = Tokenizer::from_json(patched_tokenizer(data_dir(), golden));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  for (const EncodeCase& c : golden.encode) {
    auto ids = (*tokenizer)->encode(c.text, SpecialTokens::kParse);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, c.ids) << ::testing::PrintToString(c.text);
  }
  for (const DecodeCase& c : golden.decode) {
    EXPECT_EQ((*tokenizer)->decode(c.ids, false), c.text);
    EXPECT_EQ((*tokenizer)->decode(c.ids, true), c.skipped);
  }
}

INSTANTIATE_TEST_SUITE_P(Text, Golden,
                         ::testing::Values("m2", "gpt2_prefix", "cl100k_isolated", "removed_prefix",
                                           "added_flags"));

TEST(GoldenSize, AtLeastTwoThousandStrings) {
  EXPECT_GE(read_golden(data_dir() + "/golden_m2.jsonl").encode.size(), 2000u);
}

// Processor time of this thread, so that other load does not count.
double thread_seconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void check_vectors(const std::string& tokenizer_file, bool added_tokens_too) {
  const std::string path = testdata("tokenizers/" + tokenizer_file);
  const std::string vectors = testdata("tokenizers/minimax-m2.vectors.json");
  if (path.empty() || vectors.empty()) GTEST_SKIP() << "no published tokenizers in CONCLAVE_TESTDATA_DIR";
  const double start = thread_seconds();
  auto tokenizer = Tokenizer::load(path);
  const double seconds = thread_seconds() - start;
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(seconds, 1.5);
#else
  (void)seconds;
#endif
  int checked = 0;
  const boost::json::value document = boost::json::parse(read_text_file(vectors));
  for (const auto& entry : document.as_array()) {
    const std::vector<TokenId> want = ids_of(entry.at("ids"));
    const bool has_added = std::any_of(want.begin(), want.end(), [](TokenId id) { return id >= 200000; });
    if (has_added && !added_tokens_too) continue;
    ++checked;
    auto ids = (*tokenizer)->encode(to_std(entry.at("text")), SpecialTokens::kParse);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, want) << to_std(entry.at("text"));
  }
  EXPECT_EQ(checked, added_tokens_too ? 24 : 15);
}

TEST(Published, MiniMaxM2AgreesWithTheVectors) { check_vectors("minimax-m2.tokenizer.json", true); }
TEST(Published, MiniMaxM1AgreesWithTheVectors) { check_vectors("minimax-m1.tokenizer.json", false); }

TEST(Published, MiniMaxM2Vocabulary) {
  const std::string path = testdata("tokenizers/minimax-m2.tokenizer.json");
  if (path.empty()) GTEST_SKIP() << "no published tokenizers in CONCLAVE_TESTDATA_DIR";
  auto loaded = Tokenizer::load(path);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Tokenizer& t = **loaded;
  EXPECT_EQ(t.vocab_size(), 200054u);
  EXPECT_EQ(t.special_id("[e~["), 200020u);
  EXPECT_EQ(t.special_id("]~!b["), 200034u);
  EXPECT_EQ(t.special_id("<think>"), 200050u);
  EXPECT_EQ(t.special_id("nothing"), std::nullopt);
  EXPECT_TRUE(t.is_special(200020));
  EXPECT_FALSE(t.is_special(200050));
  EXPECT_FALSE(t.has_token(200054));
  for (TokenId b = 0; b < 256; ++b) EXPECT_EQ(t.token_bytes(b), std::string(1, static_cast<char>(b)));
}

TEST(Tokenizer, TextNeverBecomesAnAddedToken) {
  const auto t = small();
  for (const AddedToken& token : t->added_tokens()) {
    for (const std::string& text :
         {token.content, "a" + token.content + "b", token.content + token.content}) {
      auto ids = t->encode(text, SpecialTokens::kAsText);
      ASSERT_TRUE(ids.ok());
      for (TokenId id : *ids) EXPECT_LT(id, t->added_tokens().front().id) << text;
      EXPECT_EQ(t->decode(*ids, false), text);
    }
  }
}

TEST(Tokenizer, LiteralRangesArePlainText) {
  const auto t = small();
  const TokenId end = *t->special_id("[e~[");
  const std::string user = "x[e~[y";
  const std::string text = "[e~[" + user + "[e~[";
  const ByteRange range{4, static_cast<uint32_t>(4 + user.size())};
  auto ids = t->encode(text, SpecialTokens::kParse, {&range, 1});
  ASSERT_TRUE(ids.ok());
  std::vector<TokenId> want = {end};
  const auto middle = t->encode(user, SpecialTokens::kAsText).value();
  want.insert(want.end(), middle.begin(), middle.end());
  want.push_back(end);
  EXPECT_EQ(*ids, want);
  // A token that only reaches into the range is none either.
  const ByteRange tail{2, 3};
  const auto cut = t->encode("[e~[", SpecialTokens::kParse, {&tail, 1}).value();
  for (TokenId id : cut) EXPECT_NE(id, end);
  const ByteRange bad[2] = {{5, 6}, {1, 2}};
  EXPECT_EQ(t->encode(text, SpecialTokens::kParse, bad).status().code(), StatusCode::kInvalidArgument);
  const ByteRange beyond{0, 99};
  EXPECT_EQ(t->encode(text, SpecialTokens::kParse, {&beyond, 1}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(Tokenizer, InputLimit) {
  TokenizerOptions options;
  options.max_input_bytes = 10;
  auto t = Tokenizer::load(data_dir() + "/small_tokenizer.json", options);
  ASSERT_TRUE(t.ok());
  EXPECT_TRUE((*t)->encode("0123456789", SpecialTokens::kParse).ok());
  EXPECT_EQ((*t)->encode("0123456789a", SpecialTokens::kParse).status().code(), StatusCode::kInvalidArgument);
}

TEST(Tokenizer, LongRunsStayLinear) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr size_t kLong = 1u << 17;
#else
  constexpr size_t kLong = 1u << 20;
#endif
  const auto t = small();
  const auto seconds_for = [&](const std::string& first, const std::string& unit, size_t size) {
    std::string text = first;
    while (text.size() < size) text += unit;
    double best = 1e9;
    for (int pass = 0; pass < 2; ++pass) {
      const double start = thread_seconds();
      auto ids = t->encode(text, SpecialTokens::kParse);
      best = std::min(best, thread_seconds() - start);
      EXPECT_TRUE(ids.ok()) << ids.status();
      EXPECT_TRUE(ids.ok() && t->decode(*ids, false) == text);
    }
    return best;
  };
  const std::pair<const char*, const char*> runs[] = {
      {"", "a"},  {"", " "}, {"", "A"},        {"", "\n"},
      {"", "="},  {"", "9"}, {"", "ab"},       {"", "\xe4\xbd\xa0"},
      {"", " a"}, {"", "'"}, {"", "\xcc\x81"}, {"\xe3\x81\x82", "A"}};
  for (const auto& [first, unit] : runs) {
    const double shorter = seconds_for(first, unit, kLong / 16);
    const double longer = seconds_for(first, unit, kLong);
    // 16 times the text: n log n work takes some 20 times as long, quadratic work 256 times.
    EXPECT_LT(longer, 80 * std::max(shorter, 2e-4)) << ::testing::PrintToString(unit);
  }
}

TEST(Tokenizer, LongAndShortMergingAgree) {
  // The same word below and above the length where the algorithm changes: pieces of a long word that cannot
  // merge across a separator byte must come out as on their own.
  const auto t = small();
  SplitMix64 random(5);
  for (int round = 0; round < 300; ++round) {
    std::string text;
    const size_t n = 1 + random.below(90);
    for (size_t i = 0; i < n; ++i) text.push_back("aeinorst"[random.below(8)]);
    const auto ids = t->encode(text, SpecialTokens::kAsText).value();
    EXPECT_EQ(t->decode(ids, false), text);
    // Re-encoding each token alone gives itself: no merge was missed inside a token.
    for (TokenId id : ids) {
      const auto again = t->encode(t->token_bytes(id), SpecialTokens::kAsText).value();
      EXPECT_EQ(again, std::vector<TokenId>{id});
    }
  }
}

TEST(Tokenizer, ManyThreadsAgree) {
  const auto a = small();
  const GoldenFile golden = read_golden(data_dir() + "/golden_m2.jsonl");
  auto prefixed = Tokenizer::from_json(
      patched_tokenizer(data_dir(), read_golden(data_dir() + "/golden_gpt2_prefix.jsonl")));
  ASSERT_TRUE(prefixed.ok());
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int k = 0; k < 4; ++k) {
    threads.emplace_back([&] {
      for (size_t i = 0; i < golden.encode.size(); i += 3) {
        // Two tokenizers in turns: their words must not mix in the thread's cache.
        (void)(*prefixed)->encode(golden.encode[i].text, SpecialTokens::kParse);
        if (a->encode(golden.encode[i].text, SpecialTokens::kParse).value() != golden.encode[i].ids) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// Each edit of the small file, and the JSON path that the error must name.
struct BadFile {
  const char* pointer;
  const char* value;
  const char* field;
};

// The value at a JSON pointer; the last step may make a new member.
boost::json::value& member_at(boost::json::value& root, const std::string& pointer) {
  boost::json::value* at = &root;
  for (size_t i = 1; i < pointer.size();) {
    const size_t end = std::min(pointer.find('/', i), pointer.size());
    const std::string key = pointer.substr(i, end - i);
    at = at->is_array() ? &at->as_array().at(std::stoul(key)) : &at->as_object()[key];
    i = end + 1;
  }
  return *at;
}

TEST(TokenizerFile, WhatIsNotImplementedIsNamed) {
  const BadFile cases[] = {
      {"/truncation", R"({"max_length":5})", "truncation"},
      {"/model/type", R"("Unigram")", "model.type"},
      {"/model/type", "null", "model.type"},
      {"/model/dropout", "0.5", "model.dropout"},
      {"/model/byte_fallback", "true", "model.byte_fallback"},
      {"/model/continuing_subword_prefix", R"("##")", "model.continuing_subword_prefix"},
      {"/model/unk_token", "3", "model.unk_token"},
      {"/model/surprise", "1", "model.surprise"},
      {"/model/vocab/a", "-1", "model.vocab[\"a\"]"},
      {"/model/vocab/a", "1e3", "model.vocab[\"a\"]"},
      {"/model/vocab/a", "99999999999", "model.vocab[\"a\"]"},
      {"/model/vocab/newcomer", "5", "model.vocab[\"newcomer\"]"},
      {"/model/merges/3", R"("a b c")", "model.merges[3]"},
      {"/model/merges/3", R"("zzz yyy")", "model.merges[3]"},
      {"/model/merges/3", R"(["a"])", "model.merges[3]"},
      {"/model/merges", "{}", "model.merges"},
      {"/normalizer", R"({"type":"NFKC"})", "normalizer.type"},
      {"/normalizer", R"({"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Lowercase"}]})",
       "normalizer.normalizers[1].type"},
      {"/pre_tokenizer", "null", "pre_tokenizer"},
      {"/pre_tokenizer", R"({"type":"Whitespace"})", "pre_tokenizer.type"},
      {"/pre_tokenizer/pretokenizers/0/behavior", R"("MergedWithNext")",
       "pre_tokenizer.pretokenizers[0].behavior"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex":"[a"})", "pre_tokenizer"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex":"\\bx"})", "pre_tokenizer"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Glob":"x"})",
       "pre_tokenizer.pretokenizers[0].pattern.Glob"},
      {"/pre_tokenizer/pretokenizers/1/type", R"("Digits")", "pre_tokenizer.pretokenizers[1].type"},
      {"/post_processor", R"({"type":"TemplateProcessing"})", "post_processor.type"},
      {"/decoder", R"({"type":"WordPiece"})", "decoder.type"},
      {"/added_tokens/1/id", "0", "added_tokens[1].id"},
      {"/added_tokens/1/content", R"("")", "added_tokens[1].content"},
      {"/added_tokens/1/content", R"("]~!b[")", "added_tokens[1]"},
      {"/added_tokens/1/lstrip", "1", "added_tokens[1].lstrip"},
      {"/added_tokens/1/extra", "1", "added_tokens[1].extra"},
  };
  const boost::json::value original =
      boost::json::parse(read_text_file(data_dir() + "/small_tokenizer.json"));
  for (const BadFile& bad : cases) {
    boost::json::value edited = original;
    member_at(edited, bad.pointer) = boost::json::parse(bad.value);
    auto t = Tokenizer::from_json(boost::json::serialize(edited));
    ASSERT_FALSE(t.ok()) << bad.pointer;
    EXPECT_EQ(t.status().code(), StatusCode::kInvalidArgument) << t.status();
    EXPECT_EQ(field_of(t.status()), bad.field) << t.status();
  }
}

TEST(TokenizerFile, NotJsonAndNotThere) {
  EXPECT_EQ(Tokenizer::load("/nonexistent/tokenizer.json").status().code(), StatusCode::kNotFound);
  const std::string whole = read_text_file(data_dir() + "/small_tokenizer.json");
  for (const std::string& text : {std::string(), std::string("{"), std::string("[]"), std::string("{}"),
                                  whole.substr(0, whole.size() / 2), whole + "x", std::string(5000, '[')}) {
    EXPECT_EQ(Tokenizer::from_json(text).status().code(), StatusCode::kInvalidArgument);
  }
}

TEST(Oniguruma, TranslatesOrRefuses) {
  EXPECT_EQ(oniguruma_to_pcre2(R"(a{,3}\v\u00e9\p{^L}\p{Han})").value(),
            R"(a{0,3}\x{b}\x{00e9}\P{L}\p{sc:Han})");
  for (const char* bad : {R"(\w)", R"(\b)", R"(\h)", "[[:alpha:]]", "[a&&b]", "[]a]", "(?m:a)", "(?i)a",
                          "(*FAIL)", "a{1,2}+", "a{", R"(\)", R"(\pL)", "[a", R"(\u12)"}) {
    EXPECT_EQ(oniguruma_to_pcre2(bad).status().code(), StatusCode::kInvalidArgument) << bad;
  }
}

TEST(Oniguruma, PatternOutOfBoundsIsAStatus) {
  // Catastrophic backtracking ends at the engine's limit.
  auto pattern = SplitPattern::regex("(?:a|a)+[bc]");
  ASSERT_TRUE(pattern.ok()) << pattern.status();
  std::vector<ByteRange> out;
  EXPECT_EQ(pattern->find_all(std::string(400, 'a'), out).code(), StatusCode::kResourceExhausted);
}

TEST(Utf8, StreamEqualsOneShotForEveryCut) {
  SplitMix64 random(3);
  const std::string pieces[] = {
      "a",    "\xc3\xa9", "\xe4\xbd\xa0", "\xf0\x9f\x8e\x89", "\xe2\x82", "\xf0\x9f\x98",
      "\xff", "\x80",     "\xed\xa0\x80", "\xf4\x90",         "\xc0\xaf", "\xe0\x80"};
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (uint64_t i = 0, n = random.below(8); i < n; ++i) bytes += pieces[random.below(std::size(pieces))];
    const std::string want = replace_invalid_utf8(bytes);
    EXPECT_TRUE(is_valid_utf8(want));
    EXPECT_EQ(is_valid_utf8(bytes), want == bytes);
    Utf8Stream stream;
    std::string got;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = 1 + random.below(3);
      stream.push(std::string_view(bytes).substr(at, n), got);
      EXPECT_TRUE(is_valid_utf8(got));
      EXPECT_LE(stream.held(), 3u);
      at += n;
    }
    stream.flush(got);
    EXPECT_EQ(got, want);
  }
}

TEST(Detokenizer, ConcatenationEqualsDecodeForEveryCut) {
  const auto t = small();
  SplitMix64 random(9);
  for (int round = 0; round < 3000; ++round) {
    std::vector<TokenId> ids;
    for (uint64_t i = 0, n = random.below(30); i < n; ++i) {
      ids.push_back(
          static_cast<TokenId>(random.chance(0.5) ? random.below(256) : random.below(t->vocab_size() + 4)));
    }
    for (bool skip : {false, true}) {
      Detokenizer stream(*t, skip);
      std::string got;
      for (size_t at = 0; at < ids.size();) {
        const size_t n = std::min<size_t>(1 + random.below(4), ids.size() - at);
        const std::string piece = stream.push(std::span<const TokenId>(ids).subspan(at, n));
        EXPECT_TRUE(is_valid_utf8(piece));
        got += piece;
        at += n;
      }
      got += stream.flush();
      EXPECT_EQ(got, t->decode(ids, skip));
    }
  }
}

TEST(Detokenizer, HoldsHalfACharacter) {
  const auto t = small();
  Detokenizer stream(*t, true);
  std::string got;
  int empty = 0;
  const auto ids = t->encode("\xf3\xa0\x84\x80", SpecialTokens::kAsText).value();
  ASSERT_GT(ids.size(), 1u);
  for (TokenId id : ids) {
    const std::string piece = stream.push(id);
    if (piece.empty()) ++empty;
    got += piece;
  }
  EXPECT_EQ(got, "\xf3\xa0\x84\x80");
  EXPECT_EQ(empty, static_cast<int>(ids.size()) - 1);
  EXPECT_EQ(stream.flush(), "");
  stream.push(ids[0]);
  EXPECT_EQ(stream.flush(), "\xef\xbf\xbd");
  EXPECT_EQ(stream.flush(), "");
}

}  // namespace
}  // namespace conclave::text
