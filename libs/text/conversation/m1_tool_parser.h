// Tool calls as MiniMax-M1 writes them: one JSON object per line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "libs/text/conversation/call_reporter.h"

namespace conclave::text {

// A call is reported when its line is whole: only then is it known to be JSON. An object may span lines.
class M1ToolParser final : public ToolCallParser {
 public:
  explicit M1ToolParser(ToolCallOptions options) : calls_(std::move(options)) {}
  void push(std::string_view text, std::vector<OutputEvent>& out) override;
  void flush(OutputEnd end, std::vector<OutputEvent>& out) override;
  uint32_t complete_calls() const override { return calls_.complete_calls(); }
  uint32_t dropped_calls() const override { return calls_.dropped_calls(); }

  // Lines that one object may span: each costs a reading of all before it.
  static constexpr size_t kMaxObjectLines = 64;

 private:
  bool step(std::vector<OutputEvent>& out);
  void end_line(std::vector<OutputEvent>& out);
  void take_line(const std::string& line, std::vector<OutputEvent>& out);
  void drop_first_line(std::vector<OutputEvent>& out);
  bool report(std::string_view object, bool need_arguments, std::vector<OutputEvent>& out);
  void end_block(bool keep, std::vector<OutputEvent>& out);
  std::string_view rest() const { return std::string_view(text_).substr(at_); }

  CallReporter calls_;
  std::string text_;  // not yet taken from at_ on
  size_t at_ = 0;
  bool in_block_ = false;
  bool drop_newline_ = false;        // the one behind a block
  bool found_call_ = false;          // in this block
  std::string recorded_;             // the block's text as long as it holds no call
  std::string line_;                 // being read
  std::vector<std::string> object_;  // earlier lines of an object that is not yet whole
};

}  // namespace conclave::text
