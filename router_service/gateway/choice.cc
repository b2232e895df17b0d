#include "router_service/gateway/choice.h"

#include <algorithm>
#include <utility>

namespace conclave::gateway {
namespace {

bool contains(const std::vector<TokenId>& ids, TokenId id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

Status Choice::take(const TokenEvent& event) {
  if (ended_) return OkStatus();
  if (rules_->discard) {
    if (event.finish == FinishReason::kStop || event.finish == FinishReason::kLength)
      end(FinishReason::kLength);
    return OkStatus();
  }
  if (event.index > received_)
    return internal_error("tokens " + std::to_string(received_) + " to " + std::to_string(event.index - 1) +
                          " never came from the scheduler");
  // A restarted scheduler may repeat what was delivered; the index says so.
  for (size_t i = received_ - event.index; i < event.tokens.size(); ++i)
    if (!take_token(event, i)) return OkStatus();
  if (event.finish == FinishReason::kStop || event.finish == FinishReason::kLength) end(event.finish);
  return OkStatus();
}

bool Choice::take_token(const TokenEvent& event, size_t i) {
  TokenOutput output;
  output.token = event.tokens[i];
  if (i < event.logprobs.size()) output.logprob = event.logprobs[i];
  if (i < event.top_logprobs.size()) output.top = event.top_logprobs[i];
  const TokenId token = output.token;
  ++received_;
  pending_.tokens.push_back(std::move(output));
  const bool last = event.finish == FinishReason::kStop && i + 1 == event.tokens.size();
  if (last && contains(rules_->stop_token_ids, token)) {  // it ends the text and is not part of it
    if (contains(rules_->client_stop_ids, token)) pending_.stop_token = token;
    return true;
  }
  if (parser_->push(token, pending_.events)) return true;
  if (const auto& match = parser_->stop_match(); match && match->stop < rules_->stop.size())
    pending_.stop_string = rules_->stop[match->stop];
  end(FinishReason::kStop);
  return false;
}

void Choice::end(FinishReason finish) {
  ended_ = true;
  pending_.chat_finish = parser_->finish(finish, pending_.events);
  pending_.ended = true;
  pending_.finish = finish;
}

ChoiceUpdate Choice::take_update() {
  ChoiceUpdate update = std::exchange(pending_, ChoiceUpdate{});
  update.index = index_;
  update.completion_tokens = received_;
  update.reasoning_tokens = parser_->reasoning_tokens();
  return update;
}

}  // namespace conclave::gateway
