// From the tokens of one choice to what its client sees: text, stop strings, reasoning, tool calls.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/model/request.h"
#include "libs/text/conversation/format.h"
#include "libs/text/conversation/output_event.h"
#include "libs/text/conversation/reasoning_parser.h"
#include "libs/text/conversation/tool_call_parser.h"
#include "libs/text/stop_strings.h"
#include "libs/text/token_decoder.h"

namespace conclave::text {

struct ConversationOptions {
  // A default-made format reads nothing into the text: for completions, where everything is content.
  ConversationFormat format;
  bool starts_in_reasoning =
      false;  // the prompt ended in the opening tag: ChatPromptTokens::starts_in_reasoning
  ReasoningFormat reasoning = ReasoningFormat::kSeparate;
  std::shared_ptr<const ToolSet> tools;  // null (no tools, or tool_choice "none"): tool calls are content
  bool parallel_tool_calls = true;
  std::vector<std::string> stop;
  bool include_stop = false;  // the stop string is part of the text
  uint32_t min_tokens = 0;    // stop strings are not looked for in the text of so many first tokens
  std::function<std::string(uint32_t index)> make_call_id;  // random ids by default
};

// finish_reason of OpenAI's chat API.
enum class ChatFinish : uint8_t { kStop, kLength, kToolCalls };
// "stop", "length", "tool_calls".
std::string_view chat_finish_name(ChatFinish finish);
// The one place that decides it, streamed or not. The token limit wins, whatever calls came before it; then a
// call that is whole; an output that only began a call just stopped. `engine` is kStop or kLength.
ChatFinish chat_finish(FinishReason engine, uint32_t complete_calls);

// For one choice; not thread-safe. Events, concatenated, depend only on the tokens, not on how many push()
// calls the adapter makes between two looks. Each push costs the work of its own text.
class ConversationParser {
 public:
  // INVALID_ARGUMENT for bad stop strings (field "stop").
  static StatusOr<std::unique_ptr<ConversationParser>> create(std::unique_ptr<TokenDecoder> decoder,
                                                              ConversationOptions options);

  // One token that is part of the text (not the end-of-turn token). False: a stop string is complete; the
  // sequence ends with this token and nothing more may be pushed.
  bool push(TokenId token, std::vector<OutputEvent>& out);
  // The end, exactly once, on a stop string too. `engine`: what the scheduler said (kStop, kLength); any
  // other reason counts as cut off and gives kStop.
  ChatFinish finish(FinishReason engine, std::vector<OutputEvent>& out);

  // Set once a stop string matched.
  const std::optional<StopStringMatcher::Match>& stop_match() const { return stops_.match(); }
  // Tokens pushed so far that belong to the reasoning: from the first one to the one that completes the
  // closing tag, both included (all of them while the reasoning is open). While a stop string or tag is held
  // back the figure lags; after finish() it is exact.
  uint32_t reasoning_tokens() const { return reasoning_tokens_; }
  uint32_t tokens() const { return tokens_; }
  uint32_t complete_calls() const { return tools_->complete_calls(); }
  uint32_t dropped_calls() const { return tools_->dropped_calls(); }

 private:
  ConversationParser(std::unique_ptr<TokenDecoder> decoder, ConversationOptions options,
                     StopStringMatcher stops);
  void text(std::string_view piece, std::vector<OutputEvent>& out);
  void route(const ReasoningParser::Pieces& pieces, std::vector<OutputEvent>& out);
  void count_reasoning(bool ended);

  std::unique_ptr<TokenDecoder> decoder_;
  StopStringMatcher stops_;
  std::optional<ReasoningParser> reasoning_;  // unset: the model does not reason
  OutputEvent::Kind reasoning_kind_ = OutputEvent::Kind::kReasoning;
  std::unique_ptr<ToolCallParser> tools_;
  uint32_t min_tokens_ = 0;
  uint32_t tokens_ = 0;
  uint32_t reasoning_tokens_ = 0;
  uint64_t decoded_bytes_ = 0;
  // Where the text of each token begins, for those not yet known to be reasoning or not. Emptied when it is
  // known, so no longer than what is held back.
  std::deque<uint64_t> begins_;
};

}  // namespace conclave::text
