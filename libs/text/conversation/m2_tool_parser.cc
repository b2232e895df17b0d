#include "libs/text/conversation/m2_tool_parser.h"

#include <algorithm>
#include <optional>

namespace conclave::text {
namespace {

constexpr std::string_view kBlockOpen = "<minimax:tool_call>";
constexpr std::string_view kBlockClose = "</minimax:tool_call>";
constexpr std::string_view kInvokeOpen = "<invoke";
constexpr std::string_view kInvokeClose = "</invoke>";
constexpr std::string_view kParameterOpen = "<parameter";
constexpr std::string_view kParameterClose = "</parameter>";
constexpr std::string_view kNamedInvoke = "<invoke name=\"";
constexpr size_t kNoTag = 100;  // in place of an index: the invoke of a declared tool

// The name in ` name="..."`, what stands between "<invoke" or "<parameter" and '>'. Either quote may be
// missing.
std::optional<std::string_view> name_of_head(std::string_view head) {
  head = trim_json_space(head);
  if (!head.starts_with("name")) return std::nullopt;
  head = trim_json_space(head.substr(4));
  if (!head.starts_with('=')) return std::nullopt;
  head = trim_json_space(head.substr(1));
  if (!head.empty() && (head.front() == '"' || head.front() == '\'')) {
    const char quote = head.front();
    head.remove_prefix(1);
    head = head.substr(0, head.find(quote));  // other attributes may follow
  } else if (head.ends_with('"') || head.ends_with('\'')) {
    head.remove_suffix(1);
  }
  if (trim_json_space(head).empty() || head.size() > ToolSet::kMaxNameBytes) return std::nullopt;
  const bool bad =
      std::any_of(head.begin(), head.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; });
  return bad ? std::nullopt : std::optional(head);
}

bool is_null_beginning(std::string_view text) {
  constexpr std::string_view null = "null";
  return text.size() <= null.size() && std::equal(text.begin(), text.end(), null.begin(), [](char a, char b) {
           return a == b || a == b - 'a' + 'A';
         });
}

}  // namespace

void M2ToolParser::push(std::string_view text, std::vector<OutputEvent>& out) {
  text_.erase(0, at_);
  at_ = 0;
  text_ += text;
  while (step(false, out)) {
  }
}

void M2ToolParser::flush(OutputEnd end, std::vector<OutputEvent>& out) {
  while (step(true, out)) {
  }
  const bool natural = end == OutputEnd::kModel;
  switch (state_) {
    case State::kContent:
      calls_.content(release_held(rest()), out);
      break;
    case State::kBlock:
      if (recording_) recorded_ += release_held(rest());
      end_block(natural, out);
      break;
    case State::kInvokeHead:
    case State::kBadInvoke:
      calls_.drop();
      end_block(natural, out);
      break;
    case State::kInvoke:
      end_call(natural, out);
      break;
    case State::kParameterHead:
    case State::kValue:
    case State::kBadParameter:
      if (in_call_) end_call(false, out);
      end_block(natural, out);
      break;
  }
  text_.clear();
  at_ = 0;
}

bool M2ToolParser::step(bool ended, std::vector<OutputEvent>& out) {
  switch (state_) {
    case State::kContent:
      return content(out);
    case State::kBlock:
      return block(out);
    case State::kInvokeHead:
    case State::kParameterHead:
      return head(ended, out);
    case State::kInvoke:
      return invoke(out);
    case State::kValue:
      return value(out);
    case State::kBadInvoke:
    case State::kBadParameter:
      return skip();
  }
  return false;
}

// Whether `text` begins with `<invoke name="T">` of a declared tool T, or may.
TagMatch M2ToolParser::match_declared_invoke(std::string_view text) const {
  if (const TagMatch match = match_tag(text, kNamedInvoke); match != TagMatch::kFull) return match;
  const std::string_view name = text.substr(kNamedInvoke.size());
  const size_t quote = name.find('"');
  if (quote == std::string_view::npos) {
    return calls_.tools().has_prefix(name) ? TagMatch::kPartial : TagMatch::kNone;
  }
  if (!calls_.tools().has(name.substr(0, quote))) return TagMatch::kNone;
  return match_tag(name.substr(quote), "\">");
}

// As find_tag in the text not yet taken, with the invoke of a declared tool (index kNoTag) as one more tag:
// behind a newline, which is then part of it, where `newline_too`.
TagHit M2ToolParser::find(std::span<const std::string_view> tags, bool newline_too) const {
  const std::string_view text = rest();
  const TagHit hit = find_tag(text, tags);
  for (size_t at = 0; at < hit.at; ++at) {
    const bool newline = newline_too && text[at] == '\n';
    if (!newline && text[at] != '<') continue;
    const TagMatch match = match_declared_invoke(text.substr(at + (newline ? 1 : 0)));
    if (match != TagMatch::kNone) return {at, kNoTag, match};
  }
  return hit;
}

bool M2ToolParser::content(std::vector<OutputEvent>& out) {
  if (drop_newline_ && !rest().empty()) {
    if (rest()[0] == '\n') take(1);
    drop_newline_ = false;
  }
  constexpr std::string_view newline_open = "\n<minimax:tool_call>";
  constexpr std::string_view tags[] = {newline_open, kBlockOpen, kBlockClose};
  const TagHit hit = find(tags, true);
  calls_.content(rest().substr(0, hit.at), out);
  take(hit.at);
  if (hit.match != TagMatch::kFull) return false;
  if (hit.tag == kNoTag) {
    // A call without its block: the block is that call.
    if (rest()[0] == '\n') take(1);
    lone_call_ = true;
    state_ = State::kBlock;
    return true;
  }
  take(tags[hit.tag].size());
  if (hit.tag < 2) begin_block();
  return true;
}

void M2ToolParser::begin_block() {
  state_ = State::kBlock;
  lone_call_ = false;
  recording_ = true;
  recorded_.clear();
}

// `keep`: a block without a call becomes content.
void M2ToolParser::end_block(bool keep, std::vector<OutputEvent>& out) {
  if (keep && recording_) calls_.failed_block(trim_json_space(recorded_), out);
  recording_ = false;
  recorded_.clear();
  lone_call_ = false;
  state_ = State::kContent;
  drop_newline_ = true;
}

bool M2ToolParser::block(std::vector<OutputEvent>& out) {
  constexpr std::string_view tags[] = {kBlockClose, kBlockOpen, kInvokeOpen, kParameterOpen};
  const TagHit hit = find_tag(rest(), tags);
  if (recording_) recorded_ += rest().substr(0, hit.at);
  take(hit.at);
  if (hit.match != TagMatch::kFull) return false;
  switch (hit.tag) {
    case 0:
    case 1:
      take(tags[hit.tag].size());
      if (hit.tag == 0) end_block(true, out);
      break;
    case 2:
      take(kInvokeOpen.size());
      state_ = State::kInvokeHead;
      break;
    default:
      take(kParameterOpen.size());
      state_ = State::kBadParameter;  // of no call
  }
  return true;
}

// The rest of an opening tag, up to its '>', or to the '<' that shows it missing.
bool M2ToolParser::head(bool ended, std::vector<OutputEvent>& out) {
  const std::string_view text = rest();
  const size_t end = text.substr(0, kMaxHeadBytes).find_first_of("<>");
  const bool is_invoke = state_ == State::kInvokeHead;
  if (end == std::string_view::npos) {
    if (text.size() < kMaxHeadBytes || ended) return false;
    state_ = is_invoke ? State::kBadInvoke : State::kBadParameter;
    return true;
  }
  const bool closed = is_invoke && end > 0 && text[end] == '>' && text[end - 1] == '/';
  const auto found = name_of_head(text.substr(0, closed ? end - 1 : end));
  const std::string name(found.value_or(std::string_view()));
  take(end + (text[end] == '>' ? 1 : 0));
  if (name.empty()) {
    state_ = is_invoke ? State::kBadInvoke : State::kBadParameter;
  } else if (is_invoke) {
    invoke_named(name, closed, out);
  } else {
    parameter_named(name, out);
  }
  return true;
}

void M2ToolParser::invoke_named(std::string_view name, bool closed, std::vector<OutputEvent>& out) {
  recording_ = false;
  recorded_.clear();
  tool_ = name;
  keys_.clear();
  in_call_ = true;
  has_arguments_ = false;
  calls_.begin(name, out);
  state_ = State::kInvoke;
  if (closed) end_call(true, out);
}

bool M2ToolParser::invoke(std::vector<OutputEvent>& out) {
  constexpr std::string_view tags[] = {kParameterOpen, kInvokeClose, kInvokeOpen, kBlockClose, kBlockOpen};
  const TagHit hit = find_tag(rest(), tags);
  take(hit.at);
  if (hit.match != TagMatch::kFull) return false;
  if (hit.tag == 0) {
    take(kParameterOpen.size());
    state_ = State::kParameterHead;
    return true;
  }
  end_call(true, out);
  if (hit.tag == 1) take(kInvokeClose.size());
  return true;  // the other tags are the block's to read
}

void M2ToolParser::end_call(bool complete, std::vector<OutputEvent>& out) {
  if (complete) calls_.arguments(has_arguments_ ? "}" : "{}", out);
  calls_.end(complete, out);
  in_call_ = false;
  state_ = State::kBlock;
  if (lone_call_) end_block(false, out);
}

void M2ToolParser::parameter_named(std::string_view name, std::vector<OutputEvent>& out) {
  if (!keys_.emplace(name).second) {
    state_ = State::kBadParameter;
    return;
  }
  key_ = name;
  schema_ = calls_.tools().schema(tool_).member(name);
  form_ = schema_.text_form();
  value_.clear();
  in_string_ = false;
  state_ = State::kValue;
  if (form_ == ParameterSchema::TextForm::kString) begin_string(out);
}

void M2ToolParser::begin_key(std::vector<OutputEvent>& out) {
  calls_.arguments((has_arguments_ ? ", " : "{") + json_quoted(key_) + ": ", out);
  has_arguments_ = true;
}

void M2ToolParser::begin_string(std::vector<OutputEvent>& out) {
  begin_key(out);
  calls_.arguments("\"", out);
  in_string_ = true;
}

void M2ToolParser::value_text(std::string_view text, std::vector<OutputEvent>& out) {
  if (!in_string_) {
    value_ += text;
    if (form_ == ParameterSchema::TextForm::kWhole || is_null_beginning(value_)) return;
    begin_string(out);
    text = value_;
  }
  std::string escaped;
  append_json_escaped(escaped, text);
  calls_.arguments(escaped, out);
}

void M2ToolParser::end_value(std::vector<OutputEvent>& out) {
  if (in_string_) {
    calls_.arguments("\"", out);
  } else {
    begin_key(out);
    calls_.arguments(schema_.coerce_text(value_), out);
  }
  in_string_ = false;
  value_.clear();
  state_ = State::kInvoke;
}

bool M2ToolParser::value(std::vector<OutputEvent>& out) {
  // A string may hold anything but these, and the invoke of a declared tool: a call that begins inside this
  // one, whose closing tags are missing. Elsewhere the next parameter shows, too, that a closing tag is
  // missing.
  constexpr std::string_view tags[] = {kParameterClose, kInvokeClose, kBlockClose, "<parameter name="};
  const bool string = form_ != ParameterSchema::TextForm::kWhole;
  const TagHit hit = find(std::span(tags).first(string ? 3 : 4), false);
  value_text(rest().substr(0, hit.at), out);
  take(hit.at);
  if (hit.match != TagMatch::kFull) return false;
  end_value(out);
  if (hit.tag == 0) take(kParameterClose.size());
  return true;  // the other tags are the call's to read
}

// Passes over what cannot be read.
bool M2ToolParser::skip() {
  constexpr std::string_view tags[] = {kInvokeClose, kBlockClose, kInvokeOpen, kBlockOpen, kParameterClose};
  const bool parameter = state_ == State::kBadParameter;
  const TagHit hit = find_tag(rest(), std::span(tags).first(parameter ? 5 : 4));
  take(hit.at);
  if (hit.match != TagMatch::kFull) return false;
  if (!parameter) calls_.drop();
  state_ = in_call_ ? State::kInvoke : State::kBlock;
  if (hit.tag == 4 || (hit.tag == 0 && !in_call_)) take(tags[hit.tag].size());
  return true;
}

}  // namespace conclave::text
