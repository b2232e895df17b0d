// Finds tool calls in a model's answer as the text arrives.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libs/text/conversation/output_event.h"
#include "libs/text/conversation/tool_set.h"

namespace conclave::text {

enum class ToolFormat : uint8_t {
  kNone,       // the model has none: everything is content
  kMiniMaxM2,  // <minimax:tool_call>, with <invoke name="..."> and <parameter name="...">
  kMiniMaxM1,  // <tool_calls>, with one JSON object {"name": ..., "arguments": {...}} per line
};

struct ToolCallOptions {
  std::shared_ptr<const ToolSet> tools;  // not null
  // False (parallel_tool_calls): only the first call is reported. Later ones are read and dropped, as vLLM
  // does, and what is no call stays content.
  bool parallel = true;
  // Makes the id of a call; "call_" and 24 random hex digits by default.
  std::function<std::string(uint32_t index)> make_id;
};

// How an output ended.
enum class OutputEnd : uint8_t {
  kModel,  // the model said so itself: an end-of-turn token
  kCut,    // the token limit, a stop string or a fault cut it off
};

// For one stream; not thread-safe. The concatenation of what push() and flush() report (content; the calls,
// their order, names and arguments) depends only on the whole text, not on its cuts. Text is reported as soon
// as it cannot be part of a tag.
//
// What is promised for bad output, whichever the format:
//  - Tags are never content, whole or in part. (At the end of the output one to three bytes that might have
//  begun
//    a tag, such as a lone "<", are content.)
//  - A call whose name could be read is a call, with the arguments that could be read; closing tags that are
//    missing are supplied where the next tag shows it. A call without a readable name is dropped (and
//    counted), the calls around it are not. Text in a block that holds no call at all becomes content.
//  - In M2's format the call of a declared tool is a call without its block's tags, too.
//  - A call inside which the output ends is reported with complete = false and its arguments unfinished;
//  between
//    two parameters, when the model itself ended, it is complete.
//  - Unknown tools are reported, their arguments as strings. Of parameters with one name the first counts.
class ToolCallParser {
 public:
  virtual ~ToolCallParser() = default;
  virtual void push(std::string_view text, std::vector<OutputEvent>& out) = 0;
  // The parser then takes no more.
  virtual void flush(OutputEnd end, std::vector<OutputEvent>& out) = 0;
  // Calls reported with complete = true so far.
  virtual uint32_t complete_calls() const = 0;
  // Calls that could not be read.
  virtual uint32_t dropped_calls() const = 0;
};

std::unique_ptr<ToolCallParser> make_tool_call_parser(ToolFormat format, ToolCallOptions options);

}  // namespace conclave::text
