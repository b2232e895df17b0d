// Tool calls as MiniMax-M2 writes them.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "libs/text/conversation/call_reporter.h"
#include "libs/text/conversation/parameter_schema.h"
#include "libs/text/conversation/tags.h"

namespace conclave::text {

class M2ToolParser final : public ToolCallParser {
 public:
  explicit M2ToolParser(ToolCallOptions options) : calls_(std::move(options)) {}
  void push(std::string_view text, std::vector<OutputEvent>& out) override;
  void flush(OutputEnd end, std::vector<OutputEvent>& out) override;
  uint32_t complete_calls() const override { return calls_.complete_calls(); }
  uint32_t dropped_calls() const override { return calls_.dropped_calls(); }

  // Longest head of an invoke or parameter tag, from its '<' to its '>'.
  static constexpr size_t kMaxHeadBytes = 2048;

 private:
  enum class State {
    kContent,
    kBlock,          // inside <minimax:tool_call>, outside any call
    kInvokeHead,     // behind "<invoke"
    kInvoke,         // inside a call, outside any parameter
    kParameterHead,  // behind "<parameter"
    kValue,
    kBadInvoke,     // a call without a readable name, up to where it ends
    kBadParameter,  // the same of a parameter
  };
  // Each takes what it can from the text not yet taken; false: more is needed.
  bool step(bool ended, std::vector<OutputEvent>& out);
  bool content(std::vector<OutputEvent>& out);
  bool block(std::vector<OutputEvent>& out);
  bool head(bool ended, std::vector<OutputEvent>& out);
  bool invoke(std::vector<OutputEvent>& out);
  bool value(std::vector<OutputEvent>& out);
  bool skip();

  void invoke_named(std::string_view name, bool closed, std::vector<OutputEvent>& out);
  void parameter_named(std::string_view name, std::vector<OutputEvent>& out);
  void value_text(std::string_view text, std::vector<OutputEvent>& out);
  void begin_string(std::vector<OutputEvent>& out);
  void end_value(std::vector<OutputEvent>& out);
  void begin_key(std::vector<OutputEvent>& out);
  void end_call(bool complete, std::vector<OutputEvent>& out);
  void begin_block();
  void end_block(bool keep, std::vector<OutputEvent>& out);
  TagMatch match_declared_invoke(std::string_view text) const;
  TagHit find(std::span<const std::string_view> tags, bool newline_too) const;
  std::string_view rest() const { return std::string_view(text_).substr(at_); }
  void take(size_t n) { at_ += n; }

  CallReporter calls_;
  State state_ = State::kContent;
  std::string text_;  // not yet taken from at_ on
  size_t at_ = 0;
  bool drop_newline_ = false;  // the one behind a block
  bool lone_call_ = false;     // the call being read stands outside of any block

  // What lies in the block outside of its tags, as long as it holds no call; see failed_block.
  bool recording_ = false;
  std::string recorded_;

  // The call being read.
  std::string tool_;
  bool in_call_ = false;
  bool has_arguments_ = false;
  std::set<std::string, std::less<>> keys_;
  // The parameter being read.
  std::string key_;
  ParameterSchema schema_;
  ParameterSchema::TextForm form_ = ParameterSchema::TextForm::kString;
  std::string value_;       // held: all of a kWhole value, the first bytes of a kStringOrNull one
  bool in_string_ = false;  // its opening quote was reported
};

}  // namespace conclave::text
