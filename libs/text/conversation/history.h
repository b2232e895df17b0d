// Conversations as clients send them, brought to what a checkpoint's template wants.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/text/chat_template.h"
#include "libs/text/conversation/format.h"

namespace conclave::text {

// What a template makes of the members of messages, found out by rendering small conversations.
struct TemplateTraits {
  bool takes_text = true;          // content as a string
  bool takes_parts = false;        // content as a list of {"type": "text", "text": ...}
  bool takes_reasoning = false;    // reasoning_content of an assistant's message is rendered
  bool takes_tool_calls = false;   // tool_calls are rendered
  bool takes_late_system = false;  // a system message that is not the first is rendered
  bool takes_all_parts = true;     // of several parts of a user's or system's message, not only the first
};

// Some renders; fails only when the template takes neither form of content, or has no process.
StatusOr<TemplateTraits> probe_template(ChatTemplate& chat, TimePoint deadline = kNever);

struct NormalizedHistory {
  std::string messages_json;
  std::vector<std::string> warnings;  // what the template leaves out
};

// Checks and rewrites the "messages" array of a request. INVALID_ARGUMENT names the member at fault, as
// "messages[2].tool_calls[0].function.arguments". What is done:
//  - "developer" is "system"; content that is missing beside tool calls or reasoning is empty; content takes
//  the
//    form that the template knows. Parts other than text are refused.
//  - An assistant's reasoning may come as reasoning_content, as reasoning, or inline between think tags. It
//  becomes
//    reasoning_content where the template renders that, else inline text.
//  - The arguments of tool calls, a JSON text in OpenAI's protocol, become the object itself, its numbers and
//    order as written. Where the template does not render tool_calls they become text as the model writes
//    them.
//  - Everything else is left as it is, byte for byte.
StatusOr<NormalizedHistory> normalize_history(std::string_view messages_json, const TemplateTraits& traits,
                                              const ConversationFormat& format);

// The "tools" array in the form that the format's template wants: M1's prints bare functions, others see them
// wrapped as {"type": "function", "function": ...}. `tools_json` was accepted by ToolSet::parse.
std::string normalize_tools(std::string_view tools_json, ToolFormat format);

// An assistant's text cut at its think tags, as the templates of MiniMax-M2 cut it.
struct SplitThinking {
  std::string reasoning;
  std::string content;
};
SplitThinking split_thinking(std::string_view text, const ConversationFormat& format);

}  // namespace conclave::text
