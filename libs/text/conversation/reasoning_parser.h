// Splits a model's output into its reasoning and what comes after, as the text arrives.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::text {

// How a client wants to see the reasoning.
enum class ReasoningFormat : uint8_t {
  kSeparate,  // in a field of its own, without its tags and the newlines that the format puts beside them
  kAppend,    // inline in the answer, tags and all; an opening tag that was in the prompt is put in front
  kNone,      // inline, exactly as generated: nothing is put in front
};

struct ReasoningOptions {
  std::string open = "<think>";
  std::string close = "</think>";
  // Texts that end the reasoning though it was not closed, and stay part of the answer: the beginning of a
  // tool call. Each starts with '<' or a newline.
  std::vector<std::string> implicit_ends;
  // The prompt ended in the opening tag: the output begins inside. (It may still begin with a tag of its
  // own.) Otherwise only an output whose first text is the opening tag has reasoning.
  bool starts_inside = false;
  ReasoningFormat format = ReasoningFormat::kSeparate;
};

// For one stream; not thread-safe. The concatenation of all pieces does not depend on how the text is cut.
// There is one stretch of reasoning, at the beginning; an output that never closes it is all reasoning. A tag
// later on is text.
class ReasoningParser {
 public:
  explicit ReasoningParser(ReasoningOptions options);

  // What a call decides; the reasoning comes first. With kAppend and kNone `reasoning` is to be shown as
  // part of the answer.
  struct Pieces {
    std::string reasoning;
    std::string answer;
  };
  Pieces push(std::string_view text);
  // The end of the output. The object then takes no more.
  Pieces flush();

  // Bytes of the input, from its start, that are reasoning: through the closing tag; to the beginning of an
  // implicit end; 0 when there is no reasoning. Unset while that is open (after flush: all of it is).
  const std::optional<uint64_t>& end() const { return end_; }
  // Bytes of the input that are known to be reasoning. Never more than end().
  uint64_t settled() const { return settled_; }
  bool inside() const { return state_ == State::kInside; }

 private:
  enum class State { kStart, kInside, kOutside };
  void advance(bool ended, Pieces& out);
  bool start(bool ended, Pieces& out);
  bool inside_step(bool ended, Pieces& out);
  void consume(size_t n);
  bool inline_format() const { return options_.format != ReasoningFormat::kSeparate; }

  ReasoningOptions options_;
  std::vector<std::string> tags_;
  std::vector<std::string_view> tag_views_;
  State state_ = State::kStart;
  std::string held_;
  uint64_t taken_ = 0;  // bytes of the input consumed from held_
  uint64_t settled_ = 0;
  std::optional<uint64_t> end_;
  int newlines_to_drop_ = 0;  // at the front of held_
};

}  // namespace conclave::text
