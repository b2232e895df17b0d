#include "libs/text/conversation/m1_tool_parser.h"

#include <optional>
#include <utility>

#include "libs/text/conversation/json_text.h"
#include "libs/text/conversation/parameter_schema.h"
#include "libs/text/conversation/tags.h"

namespace conclave::text {
namespace {

constexpr std::string_view kOpen = "<tool_calls>";
constexpr std::string_view kClose = "</tool_calls>";
constexpr std::string_view kContentTags[] = {"\n<tool_calls>", kOpen, kClose};
constexpr std::string_view kBlockTags[] = {kClose, kOpen, "\n"};

}  // namespace

void M1ToolParser::push(std::string_view text, std::vector<OutputEvent>& out) {
  text_.erase(0, at_);
  at_ = 0;
  text_ += text;
  while (step(out)) {
  }
}

void M1ToolParser::flush(OutputEnd end, std::vector<OutputEvent>& out) {
  if (!in_block_) {
    calls_.content(release_held(rest()), out);
  } else {
    line_ += release_held(rest());
    end_line(out);
    end_block(end == OutputEnd::kModel, out);
  }
  text_.clear();
  at_ = 0;
}

bool M1ToolParser::step(std::vector<OutputEvent>& out) {
  if (!in_block_) {
    if (drop_newline_ && !rest().empty()) {
      if (rest()[0] == '\n') ++at_;
      drop_newline_ = false;
    }
    const TagHit hit = find_tag(rest(), kContentTags);
    calls_.content(rest().substr(0, hit.at), out);
    at_ += hit.at;
    if (hit.match != TagMatch::kFull) return false;
    at_ += kContentTags[hit.tag].size();
    if (hit.tag < 2) {
      in_block_ = true;
      found_call_ = false;
    }
    return true;
  }
  const TagHit hit = find_tag(rest(), kBlockTags);
  line_ += rest().substr(0, hit.at);
  at_ += hit.at;
  if (hit.match != TagMatch::kFull) return false;
  at_ += kBlockTags[hit.tag].size();
  end_line(out);
  if (hit.tag == 0) end_block(true, out);
  return true;
}

void M1ToolParser::end_line(std::vector<OutputEvent>& out) {
  if (!found_call_) recorded_.append(line_).append("\n");
  take_line(line_, out);
  line_.clear();
}

void M1ToolParser::end_block(bool keep, std::vector<OutputEvent>& out) {
  while (!object_.empty()) drop_first_line(out);
  if (keep && !found_call_) calls_.failed_block(trim_json_space(recorded_), out);
  recorded_.clear();
  in_block_ = false;
  drop_newline_ = true;
}

void M1ToolParser::take_line(const std::string& line, std::vector<OutputEvent>& out) {
  const std::string_view bare = trim_json_space(line);
  if (object_.empty()) {
    if (bare.empty() || report(line, false, out)) return;
    if (bare.starts_with('{')) object_.push_back(line);
    return;
  }
  // A line that is a call by itself, while an object is open: that object is malformed.
  if (line.starts_with('{') && report(line, true, out)) {
    object_.clear();
    calls_.drop();
    return;
  }
  object_.push_back(line);
  std::string whole;
  for (const std::string& part : object_) whole.append(part).append("\n");
  if (report(whole, false, out)) {
    object_.clear();
  } else if (object_.size() >= kMaxObjectLines) {
    drop_first_line(out);
  }
}

// What looked like the beginning of an object was none; what followed it is read anew.
void M1ToolParser::drop_first_line(std::vector<OutputEvent>& out) {
  const std::vector<std::string> lines = std::exchange(object_, {});
  calls_.drop();
  for (size_t i = 1; i < lines.size(); ++i) take_line(lines[i], out);
}

// Reports the call that the text is, if it is one.
bool M1ToolParser::report(std::string_view object, bool need_arguments, std::vector<OutputEvent>& out) {
  const auto call = read_json(object);
  if (!call.has_value() || call->kind != JsonKind::kObject) return false;
  std::string name;
  std::string unpacked;  // arguments that were themselves written as a string
  std::optional<JsonSlice> arguments;
  for (const JsonMember& member : json_members(*call)) {
    if (member.key == "name" && member.value.kind == JsonKind::kString) name = json_string(member.value);
    if (member.key == "arguments" || (member.key == "parameters" && !arguments.has_value()))
      arguments = member.value;
  }
  if (need_arguments && !arguments.has_value()) return false;
  if (arguments.has_value() && arguments->kind == JsonKind::kString) {
    unpacked = json_string(*arguments);
    arguments = read_json(unpacked);
    if (!arguments.has_value()) return false;
  }
  if (arguments.has_value() && arguments->kind == JsonKind::kNull) arguments.reset();
  if (arguments.has_value() && arguments->kind != JsonKind::kObject) return false;
  if (trim_json_space(name).empty() || name.size() > ToolSet::kMaxNameBytes) return false;
  found_call_ = true;
  recorded_.clear();
  calls_.begin(name, out);
  calls_.arguments(arguments.has_value() ? calls_.tools().schema(name).coerce_json(*arguments) : "{}", out);
  calls_.end(true, out);
  return true;
}

}  // namespace conclave::text
