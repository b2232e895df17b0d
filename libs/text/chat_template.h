// Chat templates, rendered by Jinja2 with transformers' settings in small supervised child processes: any
// checkpoint's template renders as its authors saw it, and none of it runs in our address space.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/text/split_pattern.h"
#include "libs/text/tokenizer.h"

namespace conclave::text {

// What a checkpoint says about its chat format.
struct TemplateSource {
  // Jinja texts by name; "default" is always there. "tool_use", if there, renders requests with tools.
  std::map<std::string, std::string> templates;
  // bos_token, eos_token, unk_token, pad_token, ... as the template sees them.
  std::map<std::string, std::string> variables;
  // Spellings of added tokens: what a request's strings must not smuggle in. The other ones, such as <think>,
  // are those that an assistant's turn is made of, where they keep their meaning.
  std::vector<std::string> special_tokens;
  std::vector<std::string> other_tokens;
};

// Reads chat_template.jinja and tokenizer_config.json of a checkpoint; the former's text wins. NOT_FOUND when
// there is no template, INVALID_ARGUMENT for malformed files. The token lists come from `tokenizer`, which
// may be null.
StatusOr<TemplateSource> read_template_source(const std::string& model_dir, const Tokenizer* tokenizer);

struct ChatTemplateOptions {
  int processes = 2;                             // children kept ready
  int max_waiting = 1024;                        // renders that may wait for a child at once
  Nanos start_timeout = 20 * kSecond;            // from exec to ready
  Nanos call_timeout = 10 * kSecond;             // waiting for a child and rendering
  int cpu_seconds = 10;                          // processor time of one render, enforced by the kernel
  size_t memory_bytes = size_t{512} << 20;       // address space of a child
  size_t max_document_bytes = size_t{32} << 20;  // of a request
  size_t max_output_bytes = size_t{32} << 20;    // of a rendered prompt
  std::string python = "/usr/bin/python3";
};

struct RenderedPrompt {
  std::string text;  // well-formed UTF-8
  // Bytes of `text` in which no control token is to be seen, since they came from the request's strings: pass
  // them to Tokenizer::encode as `literal`, so that a user's text cannot end a turn. A range is one or more
  // characters with which a control token might begin or end, and what lies between them.
  std::vector<ByteRange> literal;
};

// What becomes of control tokens that a request's strings spell out.
enum class ControlTokens {
  kAsText,   // they are text, wherever they stand and whatever the template does with the strings
  kAllowed,  // they are tokens: for trusted callers (allow_special_tokens)
};

// Thread-safe. Destroy it only when no render is in flight; that ends the children.
class ChatTemplate {
 public:
  // Starts the children and waits for the first. FAILED_PRECONDITION with the package to install when python3
  // or jinja2 is missing; INVALID_ARGUMENT when a template does not compile.
  static StatusOr<std::unique_ptr<ChatTemplate>> start(TemplateSource source,
                                                       ChatTemplateOptions options = {});
  virtual ~ChatTemplate() = default;

  // Renders a JSON object {"messages": [...], "tools": [...], "add_generation_prompt": bool, ...}; every
  // other member is a variable of the template. Null members of messages are dropped and the names of
  // reasoning text aliased, as transformers does. INVALID_ARGUMENT: the document is wrong, or the template
  // raised (its own message); RESOURCE_EXHAUSTED: it needed too much memory, or too many renders wait;
  // DEADLINE_EXCEEDED: the earlier of `deadline` and call_timeout passed; UNAVAILABLE: the child died or
  // broke the protocol. In the last three a child was replaced as needed.
  virtual StatusOr<RenderedPrompt> render(std::string_view document, TimePoint deadline = kNever,
                                          ControlTokens control = ControlTokens::kAsText) = 0;

  // Process ids of the children that are idle now (for tests and diagnosis).
  virtual std::vector<int> idle_processes() const = 0;

 protected:
  ChatTemplate() = default;
};

}  // namespace conclave::text
