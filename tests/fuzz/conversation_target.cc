#include "tests/fuzz/conversation_target.h"

#include <string>
#include <vector>

#include "libs/base/check.h"
#include "libs/base/random.h"
#include "libs/text/conversation/conversation_parser.h"
#include "libs/text/conversation/history.h"
#include "libs/text/conversation/json_text.h"
#include "libs/text/conversation/parameter_schema.h"
#include "libs/text/utf8.h"

namespace conclave::fuzz {
namespace {

using text::OutputEvent;

constexpr char kTools[] =
    R"([{"name":"f","parameters":{"properties":{"s":{"type":"string"},"i":{"type":"integer"},
  "n":{"type":["string","null"]},"o":{"type":"object","properties":{"s":{"type":"string"}}},
  "u":{"anyOf":[{"type":"boolean"},{"type":"array","items":{"type":"number"}}]}}}},{"name":"g"}])";

// Each byte of the output as it comes; the text is what counts here.
class PieceDecoder final : public text::TokenDecoder {
 public:
  explicit PieceDecoder(const std::vector<std::string_view>& pieces) : pieces_(pieces) {}
  void push(TokenId token, std::string& out) override { stream_.push(pieces_[token], out); }
  void flush(std::string& out) override { stream_.flush(out); }

 private:
  const std::vector<std::string_view>& pieces_;
  text::Utf8Stream stream_;
};

struct Outcome {
  text::AssistantMessage message;
  text::ChatFinish finish = text::ChatFinish::kStop;
};

Outcome parse(const std::vector<std::string_view>& pieces, uint8_t bits) {
  static const std::shared_ptr<const text::ToolSet> tools = *text::ToolSet::parse(kTools);
  text::ConversationOptions options;
  options.format.tools = (bits & 1) != 0 ? text::ToolFormat::kMiniMaxM1 : text::ToolFormat::kMiniMaxM2;
  options.format.reasons = (bits & 2) != 0;
  options.starts_in_reasoning = (bits & 4) != 0;
  options.parallel_tool_calls = (bits & 8) == 0;
  options.reasoning = static_cast<text::ReasoningFormat>((bits >> 4) % 3);
  if ((bits & 64) != 0) options.stop = {"</parameter>\n", "STOP", "\n\n<"};
  options.tools = tools;
  options.make_call_id = [](uint32_t i) { return std::to_string(i); };
  auto parser = text::ConversationParser::create(std::make_unique<PieceDecoder>(pieces), options);
  CONCLAVE_CHECK(parser.ok());
  Outcome out;
  std::vector<OutputEvent> events;
  TokenId used = 0;
  while (used < pieces.size() && (*parser)->push(used, events)) ++used;
  out.finish = (*parser)->finish((bits & 128) != 0 ? FinishReason::kLength : FinishReason::kStop, events);
  CONCLAVE_CHECK((*parser)->reasoning_tokens() <= (*parser)->tokens());
  uint32_t begun = 0;
  bool open = false;
  uint32_t complete = 0;
  for (const OutputEvent& event : events) {
    switch (event.kind) {
      case OutputEvent::Kind::kCallBegin:
        CONCLAVE_CHECK(!open && event.call == begun && !event.text.empty());
        open = true;
        ++begun;
        break;
      case OutputEvent::Kind::kArguments:
        CONCLAVE_CHECK(open && event.call + 1 == begun);
        break;
      case OutputEvent::Kind::kCallEnd:
        CONCLAVE_CHECK(open && event.call + 1 == begun);
        open = false;
        complete += event.complete ? 1 : 0;
        break;
      default:
        CONCLAVE_CHECK(text::is_valid_utf8(event.text));
    }
  }
  CONCLAVE_CHECK(!open && complete == (*parser)->complete_calls());
  CONCLAVE_CHECK(options.parallel_tool_calls || begun <= 1);
  out.message.add(events);
  for (const auto& call : out.message.calls) {
    const auto arguments = text::read_json(call.arguments, 2 * text::kMaxJsonDepth);
    CONCLAVE_CHECK(!call.complete || (arguments.has_value() && arguments->kind == text::JsonKind::kObject));
  }
  return out;
}

}  // namespace

void try_output(std::string_view output, uint8_t options, uint64_t cuts) {
  const Outcome whole = parse({output}, options);
  SplitMix64 random(cuts);
  const uint64_t longest = 1 + random.below(20);
  std::vector<std::string_view> pieces;
  for (size_t at = 0; at < output.size(); at += pieces.back().size()) {
    pieces.push_back(output.substr(at, random.below(longest + 1)));
  }
  const Outcome cut = parse(pieces, options);
  CONCLAVE_CHECK(cut.message == whole.message);
  CONCLAVE_CHECK(cut.finish == whole.finish);
}

bool try_coercion(std::string_view schema, std::string_view value) {
  const auto tools = text::ToolSet::parse("[{\"name\":\"f\",\"parameters\":" + std::string(schema) + "}]");
  if (!tools.ok()) {
    CONCLAVE_CHECK(!field_of(tools.status()).empty());
    return false;
  }
  const text::ParameterSchema whole = (*tools)->schema("f");
  for (const text::ParameterSchema& part : {whole, whole.member("p"), whole.member("undeclared")}) {
    const std::string from_text = part.coerce_text(value);
    const auto slice = text::read_json(from_text, 2 * text::kMaxJsonDepth);
    CONCLAVE_CHECK(slice.has_value());
    switch (part.text_form()) {
      case text::ParameterSchema::TextForm::kStringOrNull:
        if (from_text == "null") break;
        [[fallthrough]];
      case text::ParameterSchema::TextForm::kString:
        CONCLAVE_CHECK(from_text == json_quoted(value));
        break;
      case text::ParameterSchema::TextForm::kWhole:
        break;
    }
    if (const auto json = text::read_json(value)) {
      CONCLAVE_CHECK(text::read_json(part.coerce_json(*json), 2 * text::kMaxJsonDepth).has_value());
    }
  }
  return true;
}

bool try_history(std::string_view messages, uint8_t options) {
  text::TemplateTraits traits;
  traits.takes_text = (options & 1) != 0;
  traits.takes_parts = (options & 2) != 0 || !traits.takes_text;
  traits.takes_reasoning = (options & 4) != 0;
  traits.takes_tool_calls = (options & 8) != 0;
  text::ConversationFormat format;
  format.tools = static_cast<text::ToolFormat>((options >> 4) % 3);
  format.reasons = (options & 64) != 0;
  const auto out = text::normalize_history(messages, traits, format);
  if (!out.ok()) {
    CONCLAVE_CHECK(out.status().code() == StatusCode::kInvalidArgument && !field_of(out.status()).empty());
    return false;
  }
  CONCLAVE_CHECK(text::read_json(out->messages_json, 2 * text::kMaxJsonDepth).has_value());
  return true;
}

}  // namespace conclave::fuzz
