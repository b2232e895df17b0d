// What the parsers of a model's output say, piece by piece.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::text {

struct OutputEvent {
  enum class Kind : uint8_t {
    kReasoning,  // text: the next piece of the reasoning
    kContent,    // text: the next piece of the answer
    kCallBegin,  // call, text: the tool's name, call_id
    kArguments,  // call, text: the next piece of the arguments' JSON text
    kCallEnd,    // call, complete
  };
  Kind kind = Kind::kContent;
  uint32_t call = 0;  // calls are numbered from 0 in the order of their beginning
  std::string text;
  std::string call_id;
  // False: the output ended inside the call. Its arguments are then the beginning of a JSON text, never
  // closed by us: half a command must not look like a whole one.
  bool complete = true;
  bool operator==(const OutputEvent&) const = default;
};

// Adds a piece of text, joined to the last event where that is its continuation.
inline void append_text(std::vector<OutputEvent>& out, OutputEvent::Kind kind, std::string_view text,
                        uint32_t call = 0) {
  if (text.empty()) return;
  if (!out.empty() && out.back().kind == kind && out.back().call == call) {
    out.back().text += text;
    return;
  }
  OutputEvent event;
  event.kind = kind;
  event.call = call;
  event.text = text;
  out.push_back(std::move(event));
}

// All events of one choice, put together: what an answer that is not streamed holds.
struct AssistantMessage {
  struct Call {
    std::string id;
    std::string name;
    std::string arguments;
    bool complete = false;
    bool operator==(const Call&) const = default;
  };
  std::string reasoning;
  std::string content;
  std::vector<Call> calls;
  bool operator==(const AssistantMessage&) const = default;

  void add(const OutputEvent& event) {
    switch (event.kind) {
      case OutputEvent::Kind::kReasoning:
        reasoning += event.text;
        break;
      case OutputEvent::Kind::kContent:
        content += event.text;
        break;
      case OutputEvent::Kind::kCallBegin:
        calls.push_back({event.call_id, event.text, {}, false});
        break;
      case OutputEvent::Kind::kArguments:
        calls[event.call].arguments += event.text;
        break;
      case OutputEvent::Kind::kCallEnd:
        calls[event.call].complete = event.complete;
        break;
    }
  }
  void add(const std::vector<OutputEvent>& events) {
    for (const OutputEvent& event : events) add(event);
  }
};

}  // namespace conclave::text
