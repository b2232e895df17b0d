#include "libs/text/conversation/history.h"
#include "libs/text/conversation/json_text.h"

namespace conclave::text {

StatusOr<TemplateTraits> probe_template(ChatTemplate& chat, TimePoint deadline) {
  Status failure;
  // Whether a conversation renders and `want` is to be seen in it.
  const auto shows = [&](const std::string& messages, std::string_view want) {
    const auto out = chat.render("{\"messages\": [" + messages + "]}", deadline, ControlTokens::kAllowed);
    if (!out.ok() && out.status().code() != StatusCode::kInvalidArgument) failure = out.status();
    // A list that was printed as Python's text of it is not understood.
    return out.ok() && out->text.find(want) != std::string::npos &&
           out->text.find("'type'") == std::string::npos;
  };
  const auto content = [](bool parts, std::string_view text) {
    return "\"content\": " +
           (parts ? "[{\"type\": \"text\", \"text\": " + json_quoted(text) + "}]" : json_quoted(text));
  };
  const auto user = [&](bool parts) { return "{\"role\": \"user\", " + content(parts, "probeuser") + "}"; };
  TemplateTraits out;
  out.takes_text = shows(user(false), "probeuser");
  out.takes_parts = shows(user(true), "probeuser");
  if (!failure.ok()) return failure;
  if (!out.takes_text && !out.takes_parts) {
    return invalid_field("chat_template", "the chat template does not render the text of a user's message");
  }
  const bool parts = !out.takes_text;
  if (out.takes_parts)
    out.takes_all_parts = shows(R"({"role": "user", "content": [{"type": "text", "text": "probefirst"}, )"
                                R"({"type": "text", "text": "probesecond"}]})",
                                "probesecond");
  out.takes_reasoning =
      shows(user(parts) + ", {\"role\": \"assistant\", \"reasoning_content\": \"probethought\", " +
                content(parts, "probeanswer") + "}",
            "probethought");
  out.takes_tool_calls =
      shows(user(parts) + ", {\"role\": \"assistant\", " + content(parts, "") +
                ", \"tool_calls\": [{\"id\": \"call_1\", \"type\": \"function\", \"function\": {\"name\": "
                "\"probetool\", \"arguments\": {\"key\": \"value\"}}}]}",
            "probetool");
  out.takes_late_system =
      shows(user(parts) + ", {\"role\": \"system\", " + content(parts, "probesystem") + "}", "probesystem");
  if (!failure.ok()) return failure;
  return out;
}

}  // namespace conclave::text
