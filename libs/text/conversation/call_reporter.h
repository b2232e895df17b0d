// What the tool-call parsers share: numbering calls, their ids, and the limit to one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "libs/text/conversation/tool_call_parser.h"

namespace conclave::text {

// Makes "call_" and 24 hex digits from the operating system's generator.
std::string random_call_id();

class CallReporter {
 public:
  explicit CallReporter(ToolCallOptions options) : options_(std::move(options)) {}
  const ToolSet& tools() const { return *options_.tools; }

  void content(std::string_view text, std::vector<OutputEvent>& out) {
    has_content_ = has_content_ || !text.empty();
    append_text(out, OutputEvent::Kind::kContent, text);
  }
  // A block without a call, as content of its own.
  void failed_block(std::string_view text, std::vector<OutputEvent>& out) {
    if (text.empty()) return;
    if (has_content_) content("\n", out);
    content(text, out);
  }

  void begin(std::string_view name, std::vector<OutputEvent>& out) {
    muted_ = !options_.parallel && begun_ > 0;
    if (muted_) return;
    OutputEvent event;
    event.kind = OutputEvent::Kind::kCallBegin;
    event.call = begun_++;
    event.text = name;
    event.call_id = options_.make_id ? options_.make_id(event.call) : random_call_id();
    out.push_back(std::move(event));
  }
  void arguments(std::string_view json, std::vector<OutputEvent>& out) {
    if (!muted_) append_text(out, OutputEvent::Kind::kArguments, json, begun_ - 1);
  }
  void end(bool complete, std::vector<OutputEvent>& out) {
    if (muted_) return;
    OutputEvent event;
    event.kind = OutputEvent::Kind::kCallEnd;
    event.call = begun_ - 1;
    event.complete = complete;
    if (complete) ++complete_;
    out.push_back(std::move(event));
  }
  // A call that could not be read.
  void drop() { ++dropped_; }
  uint32_t complete_calls() const { return complete_; }
  uint32_t dropped_calls() const { return dropped_; }

 private:
  ToolCallOptions options_;
  uint32_t begun_ = 0;
  uint32_t complete_ = 0;
  uint32_t dropped_ = 0;
  bool muted_ = false;
  bool has_content_ = false;
};

}  // namespace conclave::text
