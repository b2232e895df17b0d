#include "libs/text/conversation/conversation_parser.h"

#include <gtest/gtest.h>

#include <boost/json.hpp>

#include "libs/base/random.h"
#include "libs/text/utf8.h"
#include "tests/conversation/support.h"
#include "tests/text/golden_file.h"

namespace conclave::text {
namespace {

// Tokens whose texts are given.
class ListDecoder final : public TokenDecoder {
 public:
  explicit ListDecoder(std::vector<std::string> texts) : texts_(std::move(texts)) {}
  void push(TokenId token, std::string& out) override { stream_.push(texts_[token], out); }
  void flush(std::string& out) override { stream_.flush(out); }

 private:
  std::vector<std::string> texts_;
  Utf8Stream stream_;
};

struct Result {
  AssistantMessage message;
  ChatFinish finish = ChatFinish::kStop;
  uint32_t reasoning_tokens = 0;
  uint32_t used = 0;
};

Result run(const std::vector<std::string>& tokens, ConversationOptions options,
           FinishReason engine = FinishReason::kStop) {
  options.make_call_id = [](uint32_t i) { return "id" + std::to_string(i); };
  auto parser = ConversationParser::create(std::make_unique<ListDecoder>(tokens), std::move(options));
  EXPECT_TRUE(parser.ok()) << parser.status();
  Result out;
  std::vector<OutputEvent> events;
  for (TokenId id = 0; id < tokens.size(); ++id) {
    ++out.used;
    if (!(*parser)->push(id, events)) break;
  }
  out.finish = (*parser)->finish(engine, events);
  out.message.add(events);
  out.reasoning_tokens = (*parser)->reasoning_tokens();
  return out;
}

ConversationOptions m2_options() {
  ConversationOptions options;
  options.format.tools = ToolFormat::kMiniMaxM2;
  options.format.reasons = true;
  options.starts_in_reasoning = true;
  options.tools = test_tools();
  return options;
}

TEST(Conversation, ReasoningTokensEndWithTheTagsToken) {
  EXPECT_EQ(run({"a", " b", "\n", "</think>", "\n\n", "c"}, m2_options()).reasoning_tokens, 4u);
  EXPECT_EQ(run({"a", "</thi", "nk>\n\nyes", "c"}, m2_options()).reasoning_tokens, 3u);
  EXPECT_EQ(run({"a\xc3", "\xa9", "</think>", "c"}, m2_options()).reasoning_tokens, 3u);
  EXPECT_EQ(run({"never", " closed"}, m2_options(), FinishReason::kLength).reasoning_tokens, 2u);
  EXPECT_EQ(run({"</think>", "x"}, m2_options()).reasoning_tokens, 1u);
  EXPECT_EQ(run({"hm\n", "<minimax:tool_call>", "\n<invoke name=\"now\">", "</invoke>"}, m2_options())
                .reasoning_tokens,
            1u);
  // However the reasoning is shown, and although a stop string holds all of it back.
  for (const auto format : {ReasoningFormat::kAppend, ReasoningFormat::kNone}) {
    ConversationOptions options = m2_options();
    options.reasoning = format;
    EXPECT_EQ(run({"a", "</think>", "c"}, options).reasoning_tokens, 2u);
  }
  ConversationOptions held = m2_options();
  held.stop = {"ab</think>\n\nc!"};
  EXPECT_EQ(run({"a", "b", "</think>", "\n\n", "c"}, held).reasoning_tokens, 3u);
  ConversationOptions outside = m2_options();
  outside.starts_in_reasoning = false;
  EXPECT_EQ(run({"a", "</think>", "c"}, outside).reasoning_tokens, 0u);
  EXPECT_EQ(run({"<think>", "b", "</think>", "c"}, outside).reasoning_tokens, 3u);
  ConversationOptions plain;
  EXPECT_EQ(run({"a", "</think>", "c"}, plain).reasoning_tokens, 0u);
}

TEST(Conversation, FinishReasonInOnePlace) {
  const std::vector<std::string> call = {"</think>", "<minimax:tool_call>", "<invoke name=\"now\">",
                                         "</invoke>", "</minimax:tool_call>"};
  EXPECT_EQ(run(call, m2_options()).finish, ChatFinish::kToolCalls);
  EXPECT_EQ(run(call, m2_options(), FinishReason::kLength).finish, ChatFinish::kLength);
  EXPECT_EQ(run({"</think>", "hi"}, m2_options()).finish, ChatFinish::kStop);
  EXPECT_EQ(run({"</think>", "hi"}, m2_options(), FinishReason::kLength).finish, ChatFinish::kLength);
  // A call that only began.
  const auto half =
      run({"</think>", "<minimax:tool_call>", "<invoke name=\"search\"><parameter name=\"query\">a"},
          m2_options());
  EXPECT_EQ(half.finish, ChatFinish::kStop);
  EXPECT_EQ(half.message.calls.size(), 1u);
  ConversationOptions stop = m2_options();
  stop.stop = {"</minimax"};
  EXPECT_EQ(run(call, stop).finish, ChatFinish::kToolCalls);
  stop.stop = {"</inv"};
  EXPECT_EQ(run(call, stop, FinishReason::kLength).finish, ChatFinish::kStop);
  EXPECT_FALSE(run(call, stop).message.calls.at(0).complete);
  // Without tools in the request a call is text.
  ConversationOptions none = m2_options();
  none.tools = nullptr;
  const auto text = run(call, none);
  EXPECT_EQ(text.finish, ChatFinish::kStop);
  EXPECT_EQ(text.message.content, "<minimax:tool_call><invoke name=\"now\"></invoke></minimax:tool_call>");
  EXPECT_EQ(chat_finish_name(ChatFinish::kToolCalls), "tool_calls");
}

TEST(Conversation, StopStringsComeFirst) {
  ConversationOptions options = m2_options();
  options.stop = {"STOP"};
  auto got = run({"think", "</think>", "\n\n", "abc S", "TO", "P and", " more"}, options);
  EXPECT_EQ(got.message.content, "abc ");
  EXPECT_EQ(got.used, 6u);
  got = run({"th ST", "OP", "</think>"}, options);
  EXPECT_EQ(got.message.reasoning, "th ");
  EXPECT_EQ(got.used, 2u);
  got = run({"</think>", "x ST"}, options, FinishReason::kLength);
  EXPECT_EQ(got.message.content, "x ST");
  options.include_stop = true;
  EXPECT_EQ(run({"</think>", "a STOP b"}, options).message.content, "a STOP");
  options.include_stop = false;
  options.min_tokens = 3;
  got = run({"</think>", "STOP", "x", "STOP", "y"}, options);
  EXPECT_EQ(got.message.content, "STOPx");
  EXPECT_EQ(got.used, 4u);
  // An unfinished character at the end.
  EXPECT_EQ(run({"</think>", "a\xe2\x82"}, options).message.content, "a\xef\xbf\xbd");
  options.stop = {""};
  EXPECT_EQ(
      field_of(ConversationParser::create(std::make_unique<ListDecoder>(std::vector<std::string>()), options)
                   .status()),
      "stop[0]");
}

// Tokens in any sizes, with stop strings that hold text back: the same message, the same reasoning.
TEST(Conversation, TokensOfAnySizeGiveOneMessage) {
  SplitMix64 random(61);
  for (int round = 0; round < 3000; ++round) {
    std::string text = "thought\n";
    if (random.chance(0.8)) text += "</think>\n\n";
    text += m2_corpus()[random.below(m2_corpus().size())];
    ConversationOptions options = m2_options();
    if (random.chance(0.5))
      options.stop = {"</parameter>\n<parameter name=\"top\">4", "\n\nnewlines", "tags<"};
    const auto engine = random.chance(0.5) ? FinishReason::kStop : FinishReason::kLength;
    const Result whole = run({text}, options, engine);
    std::vector<std::string> tokens;
    for (size_t at = 0; at < text.size(); at += tokens.back().size())
      tokens.push_back(text.substr(at, 1 + random.below(9)));
    const Result cut = run(tokens, options, engine);
    ASSERT_EQ(cut.message, whole.message) << text;
    ASSERT_EQ(cut.finish, whole.finish) << text;
    // The tokens that reach into the reasoning.
    const size_t close = text.find("</think>");
    const size_t end = close == std::string::npos ? std::string::npos : close + 8;
    if (whole.finish == ChatFinish::kStop && !options.stop.empty()) continue;
    uint32_t want = 0;
    for (size_t at = 0, k = 0; k < tokens.size() && at < end; at += tokens[k++].size()) ++want;
    if (close == std::string::npos) continue;
    ASSERT_EQ(cut.reasoning_tokens, want) << text;
  }
}

// A release of the tokenizer that flags the tags as special, and one that does not: the same answers.
TEST(Conversation, TagsAreSeenThoughSpecialTokensAreSkipped) {
  for (const bool special : {false, true}) {
    boost::json::value document = boost::json::parse(read_text_file(data_dir() + "/small_tokenizer.json"));
    auto& added = document.as_object().at("added_tokens").as_array();
    int64_t id = added.back().at("id").to_number<int64_t>();
    for (const char* tag : {"<minimax:tool_call>", "</minimax:tool_call>"}) {
      boost::json::object entry = added.back().as_object();
      entry["id"] = ++id;
      entry["content"] = tag;
      added.push_back(entry);
    }
    for (auto& entry : added) {
      const std::string content = to_std(entry.at("content"));
      if (content.find("think") != std::string::npos || content.find("minimax") != std::string::npos) {
        entry.as_object()["special"] = special;
      }
    }
    auto tokenizer = Tokenizer::from_json(boost::json::serialize(document));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    TemplateSource source;
    source.templates["default"] = "x";
    const ConversationFormat format = detect_format(source, tokenizer->get());
    EXPECT_EQ(format.tools, ToolFormat::kMiniMaxM2);
    EXPECT_TRUE(format.reasons);
    ConversationOptions options = m2_options();
    options.format = format;
    auto parser = ConversationParser::create(make_token_decoder(**tokenizer, format), options);
    ASSERT_TRUE(parser.ok());
    const auto ids = (*tokenizer)
                         ->encode(
                             "hm\n</think>\n\nHi]~b]\n<minimax:tool_call>\n<invoke "
                             "name=\"now\">\n</invoke>\n</minimax:tool_call>",
                             SpecialTokens::kParse);
    std::vector<OutputEvent> events;
    for (const TokenId token : *ids) ASSERT_TRUE((*parser)->push(token, events));
    EXPECT_EQ((*parser)->finish(FinishReason::kStop, events), ChatFinish::kToolCalls);
    AssistantMessage message;
    message.add(events);
    EXPECT_EQ(message.reasoning, "hm");
    EXPECT_EQ(message.content, "Hi");  // the turn marker is still left out
    ASSERT_EQ(message.calls.size(), 1u);
    EXPECT_EQ(message.calls[0].name, "now");
  }
}

}  // namespace
}  // namespace conclave::text
