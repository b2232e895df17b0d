#include "libs/text/conversation/reasoning_parser.h"

#include <utility>

#include "libs/text/conversation/json_text.h"
#include "libs/text/conversation/tags.h"

namespace conclave::text {
namespace {

// The format is "<think>\n" reasoning "\n</think>\n\n" answer.
constexpr int kNewlinesAfterOpen = 1;
constexpr int kNewlinesAfterClose = 2;

}  // namespace

ReasoningParser::ReasoningParser(ReasoningOptions options) : options_(std::move(options)) {
  tags_ = {"\n" + options_.close, options_.close};
  for (const std::string& text : options_.implicit_ends) {
    tags_.push_back("\n" + text);
    tags_.push_back(text);
  }
}

void ReasoningParser::consume(size_t n) {
  held_.erase(0, n);
  taken_ += n;
}

ReasoningParser::Pieces ReasoningParser::push(std::string_view text) {
  held_ += text;
  Pieces out;
  advance(false, out);
  return out;
}

ReasoningParser::Pieces ReasoningParser::flush() {
  Pieces out;
  advance(true, out);
  return out;
}

void ReasoningParser::advance(bool ended, Pieces& out) {
  if (state_ == State::kStart && !start(ended, out)) return;
  if (state_ == State::kInside && !inside_step(ended, out)) return;
  while (newlines_to_drop_ > 0 && !held_.empty()) {
    if (held_[0] != '\n') {
      newlines_to_drop_ = 0;
      break;
    }
    --newlines_to_drop_;
    consume(1);
  }
  out.answer += held_;
  consume(held_.size());
}

// Decides whether the output has reasoning. False: more text is needed.
bool ReasoningParser::start(bool ended, Pieces& out) {
  size_t blank = 0;
  while (blank < held_.size() && is_json_space(held_[blank])) ++blank;
  const TagMatch match = match_tag(std::string_view(held_).substr(blank), options_.open);
  if (match == TagMatch::kPartial && !ended) return false;
  if (match == TagMatch::kPartial && held_.size() - blank >= kTellingTagBytes && !inline_format()) {
    consume(held_.size());  // half a tag
  }
  if (match == TagMatch::kFull) {
    const size_t length = blank + options_.open.size();
    if (inline_format()) {
      out.reasoning += std::string_view(held_).substr(0, length);
    } else {
      newlines_to_drop_ = kNewlinesAfterOpen;
    }
    consume(length);
    settled_ = taken_;
    state_ = State::kInside;
    return true;
  }
  if (!options_.starts_inside) {
    end_ = 0;
    state_ = State::kOutside;
    return true;
  }
  if (options_.format == ReasoningFormat::kAppend) out.reasoning += options_.open;
  if (!inline_format()) newlines_to_drop_ = kNewlinesAfterOpen;
  state_ = State::kInside;
  return true;
}

// Passes reasoning on up to its end. False: the end has not come.
bool ReasoningParser::inside_step(bool ended, Pieces& out) {
  if (newlines_to_drop_ > 0 && !held_.empty()) {
    // A newline that the end tag may claim is the same newline: dropped either way.
    if (held_[0] == '\n') consume(1);
    newlines_to_drop_ = 0;
  }
  tag_views_.assign(tags_.begin(), tags_.end());
  const std::string_view held = held_;
  const TagHit hit = find_tag(held, tag_views_);
  if (hit.match != TagMatch::kFull) {
    std::string_view free = held.substr(0, hit.at);
    if (ended) {
      const std::string_view rest = held.substr(hit.at);
      free = held.substr(0, hit.at + (inline_format() ? rest.size() : release_held(rest).size()));
    }
    out.reasoning += free;
    consume(ended ? held_.size() : hit.at);
    settled_ = taken_;
    return false;
  }
  const std::string_view tag = tags_[hit.tag];
  const size_t newline = tag[0] == '\n' ? 1 : 0;
  const bool closed = hit.tag < 2;
  if (inline_format()) {
    const size_t shown = hit.at + (closed ? tag.size() : 0);
    out.reasoning += held.substr(0, shown);
    consume(shown);
  } else {
    out.reasoning += held.substr(0, hit.at);
    // The newline before the tag belongs to the format, whichever tag it is.
    consume(hit.at + (closed ? tag.size() : newline));
    newlines_to_drop_ = closed ? kNewlinesAfterClose : 0;
  }
  settled_ = taken_;
  end_ = taken_;
  state_ = State::kOutside;
  return true;
}

}  // namespace conclave::text
