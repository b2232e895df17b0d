// The concatenation of a stream equals the one-shot result, however the text is cut into pieces.
#include <gtest/gtest.h>

#include "libs/base/random.h"
#include "tests/conversation/support.h"

namespace conclave::text {
namespace {

// Every three-way cut costs the square of the length: all outputs of the corpora are shorter than this. The
// release build does it all; under a sanitizer, which is to see the code and not the cuts, less.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kLongestThreeWay = 60;
constexpr int kRandomCuts = 1000;
#else
constexpr size_t kLongestThreeWay = 400;
constexpr int kRandomCuts = 10000;
#endif

// A run over pieces, joined events out.
using Parse = std::function<std::vector<OutputEvent>(const std::vector<std::string_view>&)>;

void expect_same(const Parse& run, const std::string& text, const std::vector<OutputEvent>& want,
                 const std::vector<std::string_view>& pieces) {
  const auto got = run(pieces);
  if (got == want) return;
  AssistantMessage a, b;
  a.add(want);
  b.add(got);
  std::string cut;
  for (const auto piece : pieces) cut.append("[").append(piece).append("]");
  FAIL() << text << "\ncut as " << cut << "\ncontent " << a.content << " | " << b.content << "\nreasoning "
         << a.reasoning << " | " << b.reasoning << "\ncalls " << a.calls.size() << " | " << b.calls.size()
         << (a.calls.empty() || b.calls.empty() ? "" : a.calls[0].arguments + " | " + b.calls[0].arguments);
}

void check_every_cut(const Parse& run, const std::string& text) {
  const std::string_view whole = text;
  const auto want = run({whole});
  for (size_t i = 0; i <= whole.size(); ++i) {
    ASSERT_NO_FATAL_FAILURE(expect_same(run, text, want, {whole.substr(0, i), whole.substr(i)}));
    if (whole.size() > kLongestThreeWay) continue;
    for (size_t j = i; j <= whole.size(); ++j) {
      ASSERT_NO_FATAL_FAILURE(
          expect_same(run, text, want, {whole.substr(0, i), whole.substr(i, j - i), whole.substr(j)}));
    }
  }
  std::vector<std::string_view> bytes;
  for (size_t i = 0; i < whole.size(); ++i) bytes.push_back(whole.substr(i, 1));
  ASSERT_NO_FATAL_FAILURE(expect_same(run, text, want, bytes));
}

void check_random_cuts(const Parse& run, const std::vector<std::string>& corpus, uint64_t seed) {
  SplitMix64 random(seed);
  for (int round = 0; round < kRandomCuts; ++round) {
    // One output, or several behind each other.
    std::string text = corpus[random.below(corpus.size())];
    while (random.chance(0.3)) text += corpus[random.below(corpus.size())];
    // Sometimes damaged.
    if (random.chance(0.3) && !text.empty()) {
      const size_t at = random.below(text.size());
      switch (random.below(3)) {
        case 0:
          text.erase(at, 1 + random.below(10));
          break;
        case 1:
          text[at] = "<>\"\n/= a"[random.below(8)];
          break;
        default:
          text.insert(at, text.substr(random.below(text.size()), random.below(30)));
      }
    }
    const std::string_view whole = text;
    std::vector<std::string_view> pieces;
    const uint64_t longest = 1 + random.below(24);
    for (size_t at = 0; at < whole.size(); at += pieces.back().size()) {
      pieces.push_back(whole.substr(at, 1 + random.below(longest)));
      if (random.chance(0.1)) pieces.insert(pieces.end() - 1, std::string_view());
    }
    ASSERT_NO_FATAL_FAILURE(expect_same(run, text, run({whole}), pieces)) << "round " << round;
  }
}

Parse tools_run(ToolFormat format, OutputEnd end, bool parallel = true) {
  return [=](const std::vector<std::string_view>& pieces) {
    return parse_pieces(format, pieces, end, parallel);
  };
}

// Reasoning in front of the tool parser, as the conversation parser puts them together.
Parse chain_run(ToolFormat format, bool starts_inside, ReasoningFormat shown) {
  return [=](const std::vector<std::string_view>& pieces) {
    ReasoningOptions options;
    options.starts_inside = starts_inside;
    options.format = shown;
    options.implicit_ends = {"<minimax:tool_call>\n<invoke ", "<minimax:tool_call><invoke "};
    ReasoningParser reasoning(options);
    auto tools = test_parser(format);
    std::vector<OutputEvent> out;
    const auto pass = [&](const ReasoningParser::Pieces& p) {
      append_text(out, OutputEvent::Kind::kReasoning, p.reasoning);
      tools->push(p.answer, out);
    };
    for (const std::string_view piece : pieces) pass(reasoning.push(piece));
    pass(reasoning.flush());
    tools->flush(OutputEnd::kModel, out);
    return joined(out);
  };
}

std::vector<std::string> with_reasoning(const std::vector<std::string>& corpus) {
  std::vector<std::string> out = {"",
                                  "<think>",
                                  "<thi",
                                  "</think>",
                                  "<think></think>",
                                  "\n<think>\n\n</think>\n\n\n",
                                  "never closed </thin",
                                  "a</think>\n\nb</think>c",
                                  " <think>x\n</think>y<think>z"};
  for (size_t i = 0; i < corpus.size(); ++i) {
    out.push_back((i % 3 == 0 ? "<think>\n" : "") + std::string("hm < \n") +
                  (i % 4 != 1 ? "\n</think>\n\n" : "") + corpus[i]);
  }
  return out;
}

TEST(Cuts, M2EveryTwoAndThreeWay) {
  for (const std::string& text : m2_corpus()) {
    ASSERT_TRUE(kRandomCuts < 10000 || text.size() <= kLongestThreeWay);
    for (const OutputEnd end : {OutputEnd::kModel, OutputEnd::kCut}) {
      ASSERT_NO_FATAL_FAILURE(check_every_cut(tools_run(ToolFormat::kMiniMaxM2, end), text));
    }
  }
}

TEST(Cuts, M1EveryTwoAndThreeWay) {
  for (const std::string& text : m1_corpus()) {
    ASSERT_TRUE(kRandomCuts < 10000 || text.size() <= kLongestThreeWay);
    for (const OutputEnd end : {OutputEnd::kModel, OutputEnd::kCut}) {
      ASSERT_NO_FATAL_FAILURE(check_every_cut(tools_run(ToolFormat::kMiniMaxM1, end), text));
    }
  }
}

TEST(Cuts, TenThousandRandom) {
  check_random_cuts(tools_run(ToolFormat::kMiniMaxM2, OutputEnd::kModel), m2_corpus(), 41);
  check_random_cuts(tools_run(ToolFormat::kMiniMaxM2, OutputEnd::kCut), m2_corpus(), 42);
  check_random_cuts(tools_run(ToolFormat::kMiniMaxM2, OutputEnd::kModel, false), m2_corpus(), 43);
  check_random_cuts(tools_run(ToolFormat::kMiniMaxM1, OutputEnd::kModel), m1_corpus(), 44);
  check_random_cuts(tools_run(ToolFormat::kMiniMaxM1, OutputEnd::kCut), m1_corpus(), 45);
}

TEST(Cuts, WithReasoning) {
  const auto corpus = with_reasoning(m2_corpus());
  uint64_t seed = 51;
  for (const bool inside : {true, false}) {
    for (const auto shown : {ReasoningFormat::kSeparate, ReasoningFormat::kAppend, ReasoningFormat::kNone}) {
      const Parse run = chain_run(ToolFormat::kMiniMaxM2, inside, shown);
      for (const std::string& text : corpus) {
        if (text.size() > 80) continue;
        ASSERT_NO_FATAL_FAILURE(check_every_cut(run, text));
      }
      ASSERT_NO_FATAL_FAILURE(check_random_cuts(run, corpus, seed++));
    }
  }
}

}  // namespace
}  // namespace conclave::text
