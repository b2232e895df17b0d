#include "router_service/http/openai_writer.h"

#include <boost/json.hpp>
#include <utility>

#include "libs/base/clock.h"
#include "libs/base/json_escape.h"
#include "router_service/http/logprobs_json.h"
#include "router_service/http/openai_response.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

using Kind = text::OutputEvent::Kind;

// Tokens whose text is held back (it may be part of a tag) are reported with the next text, but no more of
// them than this are kept waiting for it.
constexpr size_t kMaxHeldTokens = 64;

json::string text_json(std::string_view text) { return json::string(text.data(), text.size()); }

json::object usage_json(const gateway::Usage& usage) {
  json::object out;
  out["prompt_tokens"] = usage.prompt_tokens;
  out["completion_tokens"] = usage.completion_tokens;
  out["total_tokens"] = static_cast<uint64_t>(usage.prompt_tokens) + usage.completion_tokens;
  if (usage.cached_tokens)
    out["prompt_tokens_details"] = json::object{{"cached_tokens", *usage.cached_tokens}};
  return out;
}

json::array tokens_json(const std::vector<TokenId>& tokens) {
  json::array out;
  out.reserve(tokens.size());
  for (const TokenId token : tokens) out.push_back(static_cast<uint64_t>(token));
  return out;
}

json::array token_ids_json(const std::vector<gateway::TokenOutput>& tokens) {
  json::array out;
  out.reserve(tokens.size());
  for (const gateway::TokenOutput& token : tokens) out.push_back(static_cast<uint64_t>(token.token));
  return out;
}

std::string event(const json::object& document) { return "data: " + json::serialize(document) + "\n\n"; }

std::string_view completion_finish(FinishReason finish) {
  return finish == FinishReason::kLength ? "length" : "stop";
}

}  // namespace

struct OpenAiWriter::Choice {
  uint32_t index = 0;   // through all prompts
  uint32_t prompt = 0;  // which one
  // Not yet written.
  std::vector<text::OutputEvent> events;
  std::vector<gateway::TokenOutput> tokens;
  LegacyLogprobs legacy{LogprobStyle{}};
  bool ended = false;
  bool begun = false;
  bool finished = false;  // its last chunk is written
  FinishReason finish = FinishReason::kNone;
  text::ChatFinish chat_finish = text::ChatFinish::kStop;
  json::value stop_reason;
};

struct OpenAiWriter::Prompt {
  std::vector<TokenId> tokens;
  std::string text;
  std::vector<PromptLogprob> logprobs;
  bool generating = false;  // a token has come, so all the logprobs have
  gateway::Usage usage;
};

struct OpenAiWriter::Document {
  json::object fields;
};

namespace {

// What every document of one answer begins with.
json::object document_of(const OpenAiWriter::Head& head, const AnswerStyle& style, int64_t created) {
  json::object out;
  out["id"] = (style.chat ? "chatcmpl-" : "cmpl-") + head.id;
  out["object"] = !style.chat    ? "text_completion"
                  : style.stream ? "chat.completion.chunk"
                                 : "chat.completion";
  out["created"] = created;
  out["model"] = head.model;
  if (!head.fingerprint.empty()) out["system_fingerprint"] = head.fingerprint;
  return out;
}

}  // namespace

OpenAiWriter::OpenAiWriter(AnswerStyle style, Head head, const gateway::TextCodec& text)
    : style_(style),
      head_(std::move(head)),
      text_(text),
      created_(head_.created != 0 ? head_.created : wall_now_ms() / 1000),
      prompts_(head_.prompts) {
  for (uint32_t i = 0; i < head_.prompts * head_.choices; ++i) {
    choices_.push_back(std::make_unique<Choice>());
    choices_.back()->index = i;
    choices_.back()->prompt = i / head_.choices;
    choices_.back()->legacy = LegacyLogprobs({&text_, head_.top_logprobs, style_.tokens_as_ids});
  }
  const std::string document = json::serialize(document_of(head_, style_, created_));
  chunk_head_ = "data: " + document.substr(0, document.size() - 1) + ",\"choices\":[";
}

OpenAiWriter::~OpenAiWriter() = default;

bool OpenAiWriter::wants_prompt() const {
  return style_.echo || style_.return_token_ids || style_.prompt_logprobs;
}

void OpenAiWriter::set_prompt(uint32_t prompt, std::vector<TokenId> tokens, std::string text) {
  prompts_[prompt].tokens = std::move(tokens);
  prompts_[prompt].text = std::move(text);
}

OpenAiWriter::Choice& OpenAiWriter::choice(uint32_t prompt, uint32_t index) {
  return *choices_[prompt * head_.choices + index];
}

void OpenAiWriter::add(uint32_t prompt, gateway::Update update) {
  Prompt& of = prompts_[prompt];
  of.usage = update.usage;
  of.generating = of.generating || !update.choices.empty() || update.ended;
  for (PromptLogprob& logprob : update.prompt_logprobs) of.logprobs.push_back(std::move(logprob));
  for (gateway::ChoiceUpdate& part : update.choices) {
    Choice& to = choice(prompt, part.index);
    for (text::OutputEvent& e : part.events) {
      if (e.kind == Kind::kReasoning && !style_.include_reasoning) continue;
      const bool joins = e.kind == Kind::kReasoning || e.kind == Kind::kContent || e.kind == Kind::kArguments;
      if (joins)
        text::append_text(to.events, e.kind, e.text, e.call);
      else
        to.events.push_back(std::move(e));
    }
    if (style_.logprobs || style_.return_token_ids)
      for (gateway::TokenOutput& token : part.tokens) to.tokens.push_back(std::move(token));
    if (!part.ended) continue;
    to.ended = true;
    to.finish = part.finish;
    to.chat_finish = part.chat_finish;
    if (part.stop_string)
      to.stop_reason = text_json(*part.stop_string);
    else if (part.stop_token)
      to.stop_reason = static_cast<uint64_t>(*part.stop_token);
  }
}

gateway::Usage OpenAiWriter::usage() const {
  gateway::Usage sum;
  for (const Prompt& prompt : prompts_) {
    sum.prompt_tokens += prompt.usage.prompt_tokens;
    sum.completion_tokens += prompt.usage.completion_tokens;
    sum.reasoning_tokens += prompt.usage.reasoning_tokens;
    if (prompt.usage.cached_tokens)
      sum.cached_tokens = sum.cached_tokens.value_or(0) + *prompt.usage.cached_tokens;
  }
  return sum;
}

namespace {

json::object usage_of(const AnswerStyle& style, const gateway::Usage& usage) {
  json::object out = usage_json(usage);
  if (style.chat)
    out["completion_tokens_details"] = json::object{{"reasoning_tokens", usage.reasoning_tokens}};
  return out;
}

std::string_view finish_of(bool chat, text::ChatFinish chat_finish, FinishReason finish) {
  return chat ? text::chat_finish_name(chat_finish) : completion_finish(finish);
}

json::object message_json(const text::AssistantMessage& message) {
  json::object out;
  out["role"] = "assistant";
  if (message.content.empty() && !message.calls.empty())
    out["content"] = nullptr;
  else
    out["content"] = message.content;
  out["refusal"] = nullptr;
  if (!message.reasoning.empty()) {
    out["reasoning_content"] = message.reasoning;
    out["reasoning"] = message.reasoning;
  }
  if (message.calls.empty()) return out;
  json::array calls;
  for (const text::AssistantMessage::Call& call : message.calls)
    calls.push_back(
        json::object{{"id", call.id},
                     {"type", "function"},
                     {"function", json::object{{"name", call.name}, {"arguments", call.arguments}}}});
  out["tool_calls"] = std::move(calls);
  return out;
}

}  // namespace

std::string OpenAiWriter::whole() {
  const LogprobStyle tops{&text_, head_.top_logprobs, style_.tokens_as_ids};
  const LogprobStyle prompt_tops{&text_, head_.prompt_logprobs, style_.tokens_as_ids};
  json::array choices;
  for (const auto& each : choices_) {
    Choice& from = *each;
    const Prompt& prompt = prompts_[from.prompt];
    text::AssistantMessage message;
    message.add(from.events);
    json::object to;
    to["index"] = from.index;
    if (style_.chat)
      to["message"] = message_json(message);
    else
      to["text"] = style_.echo ? prompt.text + message.content : message.content;
    if (!style_.logprobs) {
      to["logprobs"] = nullptr;
    } else if (style_.chat) {
      to["logprobs"] = chat_logprobs(tops, from.tokens);
    } else {
      if (style_.echo) from.legacy.add_prompt(prompt.tokens, prompt.logprobs);
      from.legacy.add(from.tokens);
      to["logprobs"] = from.legacy.take();
    }
    to["finish_reason"] = text_json(finish_of(style_.chat, from.chat_finish, from.finish));
    to["stop_reason"] = from.stop_reason;
    if (style_.return_token_ids) {
      to["token_ids"] = token_ids_json(from.tokens);
      to["prompt_token_ids"] = tokens_json(prompt.tokens);
    }
    if (style_.prompt_logprobs && !style_.chat)
      to["prompt_logprobs"] = prompt_logprobs_json(prompt_tops, prompt.tokens, prompt.logprobs);
    choices.push_back(std::move(to));
  }
  json::object out = document_of(head_, style_, created_);
  out["choices"] = std::move(choices);
  out["usage"] = usage_of(style_, usage());
  if (style_.prompt_logprobs && style_.chat)
    out["prompt_logprobs"] = prompt_logprobs_json(prompt_tops, prompts_[0].tokens, prompts_[0].logprobs);
  return json::serialize(out);
}

std::string OpenAiWriter::events() {
  std::string out;
  for (const auto& each : choices_) {
    if (!each->begun) {
      if (!may_begin(prompts_[each->prompt])) continue;
      each->begun = true;
      begin_events(*each, out);
    }
    choice_events(*each, out);
  }
  return out;
}

// With echo the log-probabilities of the prompt come first, and they must all be there.
bool OpenAiWriter::may_begin(const Prompt& prompt) const {
  return !(style_.echo && style_.logprobs) || prompt.generating;
}

// One chunk: `fields` go into the choice.
void OpenAiWriter::chunk(const Choice& of, Document fields, std::string& out) const {
  json::object to;
  to["index"] = of.index;
  for (auto& member : fields.fields) to[member.key()] = std::move(member.value());
  if (!to.contains("logprobs")) to["logprobs"] = nullptr;
  if (!to.contains("finish_reason")) to["finish_reason"] = nullptr;
  out += chunk_head_;
  out += json::serialize(to);
  end_chunk(out);
}

// The same for a piece of text and nothing else, which nearly all chunks are: without a document tree.
void OpenAiWriter::text_chunk(const Choice& of, std::string_view before, std::string_view text,
                              std::string_view after, std::string& out) const {
  out += chunk_head_;
  out += "{\"index\":";
  out += std::to_string(of.index);
  out += before;
  append_json_escaped(out, text);
  out += after;
  out += ",\"logprobs\":null,\"finish_reason\":null}";
  end_chunk(out);
}

void OpenAiWriter::end_chunk(std::string& out) const {
  out += "]";
  if (style_.continuous_usage) {
    out += ",\"usage\":";
    out += json::serialize(usage_of(style_, usage()));
  } else if (style_.include_usage) {
    out += ",\"usage\":null";
  }
  out += "}\n\n";
}

void OpenAiWriter::begin_events(Choice& of, std::string& out) {
  const Prompt& prompt = prompts_[of.prompt];
  json::object fields;
  if (style_.chat)
    fields["delta"] = json::object{{"role", "assistant"}, {"content", ""}};
  else if (style_.echo || style_.return_token_ids)
    fields["text"] = style_.echo ? prompt.text : "";
  else
    return;
  if (style_.echo && style_.logprobs) {
    of.legacy.add_prompt(prompt.tokens, prompt.logprobs);
    fields["logprobs"] = of.legacy.take();
  }
  if (style_.return_token_ids) fields["prompt_token_ids"] = tokens_json(prompt.tokens);
  chunk(of, {std::move(fields)}, out);
}

void OpenAiWriter::choice_events(Choice& of, std::string& out) {
  if (of.finished) return;
  const LogprobStyle tops{&text_, head_.top_logprobs, style_.tokens_as_ids};
  // The tokens go with the first chunk of their text.
  const auto with_tokens = [&](json::object fields) {
    if (of.tokens.empty()) return fields;
    if (style_.logprobs && style_.chat) fields["logprobs"] = chat_logprobs(tops, of.tokens);
    if (style_.logprobs && !style_.chat) {
      of.legacy.add(of.tokens);
      fields["logprobs"] = of.legacy.take();
    }
    if (style_.return_token_ids) fields["token_ids"] = token_ids_json(of.tokens);
    of.tokens.clear();
    return fields;
  };
  const auto say = [&](json::object delta) { chunk(of, {with_tokens({{"delta", std::move(delta)}})}, out); };
  for (size_t i = 0; i < of.events.size(); ++i) {
    const text::OutputEvent& e = of.events[i];
    switch (e.kind) {
      case Kind::kReasoning:
        say({{"reasoning", text_json(e.text)}, {"reasoning_content", text_json(e.text)}});
        break;
      case Kind::kContent:
        if (of.tokens.empty() && style_.chat)
          text_chunk(of, ",\"delta\":{\"content\":\"", e.text, "\"}", out);
        else if (of.tokens.empty())
          text_chunk(of, ",\"text\":\"", e.text, "\"", out);
        else if (style_.chat)
          say({{"content", text_json(e.text)}});
        else
          chunk(of, {with_tokens({{"text", text_json(e.text)}})}, out);
        break;
      case Kind::kCallBegin: {
        json::object function{{"name", text_json(e.text)}, {"arguments", ""}};
        json::object call;
        call["index"] = e.call;
        call["id"] = text_json(e.call_id);
        call["type"] = "function";
        if (i + 1 < of.events.size() && of.events[i + 1].kind == Kind::kArguments)
          function["arguments"] = text_json(of.events[++i].text);
        call["function"] = std::move(function);
        say({{"tool_calls", json::array{std::move(call)}}});
        break;
      }
      case Kind::kArguments:
        say({{"tool_calls",
              json::array{json::object{{"index", e.call},
                                       {"function", json::object{{"arguments", text_json(e.text)}}}}}}});
        break;
      case Kind::kCallEnd:
        break;
    }
  }
  of.events.clear();
  const json::object nothing =
      style_.chat ? json::object{{"delta", json::object{}}} : json::object{{"text", ""}};
  const bool tokens_now = style_.return_token_ids ? !of.tokens.empty() : of.tokens.size() > kMaxHeldTokens;
  if (tokens_now) chunk(of, {with_tokens(nothing)}, out);
  if (!of.ended) return;
  of.finished = true;
  json::object last = with_tokens(nothing);
  last["finish_reason"] = text_json(finish_of(style_.chat, of.chat_finish, of.finish));
  last["stop_reason"] = of.stop_reason;
  chunk(of, {std::move(last)}, out);
}

std::string OpenAiWriter::end_events() const {
  std::string out;
  if (style_.include_usage) {
    json::object last = document_of(head_, style_, created_);
    last["choices"] = json::array{};
    last["usage"] = usage_of(style_, usage());
    out = event(last);
  }
  return out + "data: [DONE]\n\n";
}

std::string OpenAiWriter::error_events(const Status& status) {
  return "data: " + error_body(status) + "\n\ndata: [DONE]\n\n";
}

}  // namespace conclave::router
