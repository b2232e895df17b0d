#include "libs/text/conversation/tool_call_parser.h"

#include "libs/base/random.h"
#include "libs/text/conversation/call_reporter.h"
#include "libs/text/conversation/m1_tool_parser.h"
#include "libs/text/conversation/m2_tool_parser.h"

namespace conclave::text {
namespace {

// For models without tool calls.
class PlainText final : public ToolCallParser {
 public:
  void push(std::string_view text, std::vector<OutputEvent>& out) override {
    append_text(out, OutputEvent::Kind::kContent, text);
  }
  void flush(OutputEnd, std::vector<OutputEvent>&) override {}
  uint32_t complete_calls() const override { return 0; }
  uint32_t dropped_calls() const override { return 0; }
};

}  // namespace

std::string random_call_id() {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "call_";
  uint64_t bits = 0;
  for (int digit = 0; digit < 24; ++digit) {
    if (digit % 16 == 0) bits = system_random_u64();
    out.push_back(kHex[bits & 15]);
    bits >>= 4;
  }
  return out;
}

std::unique_ptr<ToolCallParser> make_tool_call_parser(ToolFormat format, ToolCallOptions options) {
  switch (format) {
    case ToolFormat::kMiniMaxM2:
      return std::make_unique<M2ToolParser>(std::move(options));
    case ToolFormat::kMiniMaxM1:
      return std::make_unique<M1ToolParser>(std::move(options));
    case ToolFormat::kNone:
      break;
  }
  return std::make_unique<PlainText>();
}

}  // namespace conclave::text
