// One choice of a request: from the scheduler's token events to what its client has not taken yet.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libs/base/status.h"
#include "libs/model/request.h"
#include "libs/text/conversation/conversation_parser.h"

namespace conclave::gateway {

struct TokenOutput {
  TokenId token = 0;
  float logprob = 0;              // where asked for
  std::vector<TokenLogprob> top;  // where asked for
};

// Everything of one choice since the last take.
struct ChoiceUpdate {
  uint32_t index = 0;
  std::vector<text::OutputEvent> events;  // text, reasoning, tool calls
  std::vector<TokenOutput> tokens;        // all that count, those whose text is held back too
  bool ended = false;
  // When ended: kStop or kLength, and what a chat calls it.
  FinishReason finish = FinishReason::kNone;
  text::ChatFinish chat_finish = text::ChatFinish::kStop;
  // What the client wrote that ended it: one of its stop strings or stop token ids.
  std::optional<std::string> stop_string;
  std::optional<TokenId> stop_token;
  // So far, of this choice.
  uint32_t completion_tokens = 0;
  uint32_t reasoning_tokens = 0;

  bool empty() const { return events.empty() && tokens.empty() && !ended; }
};

// What a choice must know of its request.
struct ChoiceRules {
  std::vector<TokenId> stop_token_ids;   // all that end the sequence
  std::vector<TokenId> client_stop_ids;  // those of them that the client named
  std::vector<std::string> stop;         // as the parser got them
  bool discard = false;                  // nothing of what is generated is part of the answer
};

// Not thread-safe.
class Choice {
 public:
  Choice(uint32_t index, std::unique_ptr<text::ConversationParser> parser,
         std::shared_ptr<const ChoiceRules> rules)
      : index_(index), parser_(std::move(parser)), rules_(std::move(rules)) {}

  // Tokens in order; those that were delivered before are skipped. INTERNAL for a gap. Nothing is taken once
  // it ended. A finish of kStop or kLength ends it; what the others mean is the request's business.
  Status take(const TokenEvent& event);
  bool ended() const { return ended_; }
  uint32_t completion_tokens() const { return received_; }
  uint32_t reasoning_tokens() const { return parser_->reasoning_tokens(); }
  // Tokens not yet taken by the client.
  size_t pending_tokens() const { return pending_.tokens.size(); }
  ChoiceUpdate take_update();

 private:
  // False: it ended.
  bool take_token(const TokenEvent& event, size_t i);
  void end(FinishReason finish);

  uint32_t index_;
  std::unique_ptr<text::ConversationParser> parser_;
  std::shared_ptr<const ChoiceRules> rules_;
  uint32_t received_ = 0;  // tokens, the last one included that counts
  bool ended_ = false;
  ChoiceUpdate pending_;
};

}  // namespace conclave::gateway
