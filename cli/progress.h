// What a person at a terminal sees besides the answer itself; all of it goes to stderr, and none when that is
// no terminal.
#pragma once

#include <string>
#include <string_view>

#include "cli/sampling_flags.h"
#include "libs/base/clock.h"

namespace conclave::cli {

// A line that shows how many pieces came and how fast, rewritten in place at most ten times a second.
class RateLine {
 public:
  explicit RateLine(std::string label);
  // Counts a piece. Shows nothing when the text itself goes to the same terminal.
  void tick(bool text_on_terminal);
  void clear();

 private:
  std::string label_;
  TimePoint start_;
  TimePoint shown_ = 0;
  long count_ = 0;
  bool visible_ = false;
};

// Rewrites the current line of stderr.
void show_line(std::string_view text);
void clear_line();
bool stderr_is_terminal();

// "12 tokens in 0.8 s (15.2 tokens/s), first after 95 ms, finish: stop".
void print_summary(const StreamResult& result);

}  // namespace conclave::cli
