#include "libs/text/conversation/chat_prompt.h"

#include <utility>

#include "libs/text/conversation/json_text.h"
#include "libs/text/conversation/tool_set.h"

namespace conclave::text {

StatusOr<std::unique_ptr<ChatPromptBuilder>> ChatPromptBuilder::create(ChatTemplate& chat,
                                                                       const Tokenizer& tokenizer,
                                                                       ConversationFormat format,
                                                                       TimePoint deadline) {
  ASSIGN_OR_RETURN(const TemplateTraits traits, probe_template(chat, deadline));
  return std::unique_ptr<ChatPromptBuilder>(
      new ChatPromptBuilder(chat, tokenizer, std::move(format), traits));
}

StatusOr<RenderedPrompt> ChatPromptBuilder::render(const ChatRequest& request, TimePoint deadline,
                                                   std::vector<std::string>& warnings) const {
  ASSIGN_OR_RETURN(NormalizedHistory history, normalize_history(request.messages_json, traits_, format_));
  warnings = std::move(history.warnings);
  std::string document = "{";
  if (!request.template_kwargs_json.empty()) {
    const std::string name = "chat_template_kwargs";
    const auto kwargs = read_json(request.template_kwargs_json);
    if (!kwargs.has_value() || kwargs->kind != JsonKind::kObject) {
      return invalid_field(name, name + " is not a JSON object");
    }
    for (const JsonMember& m : json_members(*kwargs)) {
      if (m.key == "messages" || m.key == "tools" || m.key == "add_generation_prompt") {
        return invalid_field(name + "." + m.key, name + " may not hold " + m.key);
      }
      document.append(m.name).append(": ").append(m.value.text).append(", ");
    }
  }
  if (!request.tools_json.empty()) {
    RETURN_IF_ERROR(ToolSet::parse(request.tools_json).status());
    document += "\"tools\": " + normalize_tools(request.tools_json, format_.tools) + ", ";
  }
  document += request.add_generation_prompt ? "\"add_generation_prompt\": true, " : "";
  document += "\"messages\": " + history.messages_json + "}";
  return chat_.render(document, deadline,
                      request.allow_special_tokens ? ControlTokens::kAllowed : ControlTokens::kAsText);
}

StatusOr<ChatPromptTokens> ChatPromptBuilder::build(const ChatRequest& request, TimePoint deadline) const {
  ChatPromptTokens out;
  ASSIGN_OR_RETURN(RenderedPrompt prompt, render(request, deadline, out.warnings));
  ASSIGN_OR_RETURN(out.ids, tokenizer_.encode(prompt.text, SpecialTokens::kParse, prompt.literal));
  out.starts_in_reasoning = opens_reasoning(prompt, format_);
  out.text = std::move(prompt.text);
  return out;
}

bool opens_reasoning(const RenderedPrompt& prompt, const ConversationFormat& format) {
  if (!format.reasons) return false;
  std::string_view text = prompt.text;
  while (!text.empty() && is_json_space(text.back())) text.remove_suffix(1);
  if (!text.ends_with(format.think_open)) return false;
  return prompt.literal.empty() || prompt.literal.back().end <= text.size() - format.think_open.size();
}

}  // namespace conclave::text
