#include "libs/text/conversation/conversation_parser.h"

#include <utility>

namespace conclave::text {

std::string_view chat_finish_name(ChatFinish finish) {
  switch (finish) {
    case ChatFinish::kStop:
      return "stop";
    case ChatFinish::kLength:
      return "length";
    case ChatFinish::kToolCalls:
      return "tool_calls";
  }
  return "stop";
}

ChatFinish chat_finish(FinishReason engine, uint32_t complete_calls) {
  if (engine == FinishReason::kLength) return ChatFinish::kLength;
  return complete_calls > 0 ? ChatFinish::kToolCalls : ChatFinish::kStop;
}

StatusOr<std::unique_ptr<ConversationParser>> ConversationParser::create(
    std::unique_ptr<TokenDecoder> decoder, ConversationOptions options) {
  ASSIGN_OR_RETURN(StopStringMatcher stops, StopStringMatcher::create(options.stop, options.include_stop));
  return std::unique_ptr<ConversationParser>(
      new ConversationParser(std::move(decoder), std::move(options), std::move(stops)));
}

ConversationParser::ConversationParser(std::unique_ptr<TokenDecoder> decoder, ConversationOptions options,
                                       StopStringMatcher stops)
    : decoder_(std::move(decoder)), stops_(std::move(stops)), min_tokens_(options.min_tokens) {
  const bool calls = options.tools != nullptr && options.tools->size() > 0;
  const ToolFormat tools = calls ? options.format.tools : ToolFormat::kNone;
  if (options.format.reasons) {
    ReasoningOptions reasoning;
    reasoning.open = options.format.think_open;
    reasoning.close = options.format.think_close;
    reasoning.starts_inside = options.starts_in_reasoning;
    reasoning.format = options.reasoning;
    if (tools == ToolFormat::kMiniMaxM2) {
      reasoning.implicit_ends = {"<minimax:tool_call>\n<invoke ", "<minimax:tool_call><invoke "};
    } else if (tools == ToolFormat::kMiniMaxM1) {
      reasoning.implicit_ends = {"<tool_calls>\n{\""};
    }
    reasoning_.emplace(std::move(reasoning));
    if (options.reasoning != ReasoningFormat::kSeparate) reasoning_kind_ = OutputEvent::Kind::kContent;
  }
  tools_ = make_tool_call_parser(
      tools, {std::move(options.tools), options.parallel_tool_calls, std::move(options.make_call_id)});
}

bool ConversationParser::push(TokenId token, std::vector<OutputEvent>& out) {
  begins_.push_back(decoded_bytes_);
  ++tokens_;
  std::string piece;
  decoder_->push(token, piece);
  decoded_bytes_ += piece.size();
  if (tokens_ <= min_tokens_) {
    text(piece, out);
    return true;
  }
  text(stops_.push(piece, tokens_ - 1), out);
  return !stops_.match().has_value();
}

ChatFinish ConversationParser::finish(FinishReason engine, std::vector<OutputEvent>& out) {
  if (!stops_.match()) {
    std::string rest;
    decoder_->flush(rest);
    decoded_bytes_ += rest.size();
    std::string shown = stops_.push(rest, tokens_);
    if (!stops_.match()) shown += stops_.flush();
    text(shown, out);
  }
  if (stops_.match()) engine = FinishReason::kStop;
  const bool natural = engine == FinishReason::kStop && !stops_.match();
  if (reasoning_) route(reasoning_->flush(), out);
  tools_->flush(natural ? OutputEnd::kModel : OutputEnd::kCut, out);
  count_reasoning(true);
  return chat_finish(engine, tools_->complete_calls());
}

void ConversationParser::text(std::string_view piece, std::vector<OutputEvent>& out) {
  if (reasoning_) {
    route(reasoning_->push(piece), out);
  } else {
    tools_->push(piece, out);
  }
  count_reasoning(false);
}

void ConversationParser::route(const ReasoningParser::Pieces& pieces, std::vector<OutputEvent>& out) {
  append_text(out, reasoning_kind_, pieces.reasoning);
  if (!pieces.answer.empty()) tools_->push(pieces.answer, out);
}

// A token is reasoning when its text begins before the reasoning's end. The text reaches the reasoning parser
// late (stop strings hold it back) but unchanged, so places in it are compared, not arrivals.
void ConversationParser::count_reasoning(bool ended) {
  if (!reasoning_) {
    begins_.clear();
    return;
  }
  const bool open = ended && reasoning_->inside();
  const uint64_t limit = reasoning_->end().value_or(reasoning_->settled());
  while (!begins_.empty() && (open || begins_.front() < limit)) {
    ++reasoning_tokens_;
    begins_.pop_front();
  }
  if (reasoning_->end().has_value()) begins_.clear();
}

}  // namespace conclave::text
