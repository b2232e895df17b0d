// Writes one answer's documents: collects what its generations report, and says it as a whole or as events.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"
#include "router_service/gateway/generation.h"
#include "router_service/gateway/text_codec.h"
#include "router_service/http/openai_request.h"

namespace conclave::router {

// Not thread-safe. Choices are numbered through all prompts: prompt * n + choice.
class OpenAiWriter {
 public:
  struct Head {
    std::string id;           // hexadecimal, without "chatcmpl-"
    std::string model;        // as the answer names it
    std::string fingerprint;  // system_fingerprint; empty: none
    uint32_t prompts = 1;
    uint32_t choices = 1;  // of each prompt
    uint32_t top_logprobs = 0;
    uint32_t prompt_logprobs = 0;
    int64_t created = 0;  // seconds since 1970; 0: now
  };
  // `text` outlives the writer.
  OpenAiWriter(AnswerStyle style, Head head, const gateway::TextCodec& text);
  ~OpenAiWriter();

  // The prompt of one generation, once it is known.
  void set_prompt(uint32_t prompt, std::vector<TokenId> tokens, std::string text);
  // Whether the style shows prompts at all.
  bool wants_prompt() const;
  void add(uint32_t prompt, gateway::Update update);

  // A complete, unstreamed answer, once all generations have ended well.
  std::string whole();
  // Server-sent events of what was added since the last call, each with its "data: " and blank line.
  std::string events();
  // After the last events(): usage where asked for, and [DONE].
  std::string end_events() const;
  // The end of a stream that failed.
  static std::string error_events(const Status& status);

 private:
  struct Choice;
  struct Prompt;
  struct Document;  // hides Boost.JSON
  Choice& choice(uint32_t prompt, uint32_t index);
  bool may_begin(const Prompt& prompt) const;
  void choice_events(Choice& choice, std::string& out);
  void begin_events(Choice& choice, std::string& out);
  void chunk(const Choice& choice, Document fields, std::string& out) const;
  void text_chunk(const Choice& choice, std::string_view before, std::string_view text,
                  std::string_view after, std::string& out) const;
  void end_chunk(std::string& out) const;
  gateway::Usage usage() const;

  const AnswerStyle style_;
  const Head head_;
  const gateway::TextCodec& text_;
  const int64_t created_;
  std::string chunk_head_;  // what every chunk begins with, up to its choice
  std::vector<std::unique_ptr<Choice>> choices_;
  std::vector<Prompt> prompts_;
};

}  // namespace conclave::router
