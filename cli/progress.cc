#include "cli/progress.h"

#include <unistd.h>

#include <cstdio>

namespace conclave::cli {

bool stderr_is_terminal() { return isatty(STDERR_FILENO) == 1; }

void show_line(std::string_view text) {
  if (!stderr_is_terminal()) return;
  std::fprintf(stderr, "\r\033[K%.*s", static_cast<int>(text.size()), text.data());
  std::fflush(stderr);
}

void clear_line() {
  if (stderr_is_terminal()) std::fprintf(stderr, "\r\033[K");
}

RateLine::RateLine(std::string label) : label_(std::move(label)), start_(steady_now()) {}

void RateLine::tick(bool text_on_terminal) {
  ++count_;
  const TimePoint now = steady_now();
  if (text_on_terminal || now - shown_ < 100 * kMillisecond) return;
  shown_ = now;
  visible_ = true;
  const double seconds = static_cast<double>(now - start_) / kSecond;
  char line[160];
  std::snprintf(line, sizeof line, "%s: %ld pieces, %.1f s, %.1f/s", label_.c_str(), count_, seconds,
                seconds > 0 ? static_cast<double>(count_) / seconds : 0.0);
  show_line(line);
}

void RateLine::clear() {
  if (visible_) clear_line();
}

void print_summary(const StreamResult& result) {
  if (!stderr_is_terminal()) return;
  const double seconds = static_cast<double>(result.total) / kSecond;
  std::fprintf(stderr,
               "%ld prompt tokens, %ld tokens in %.2f s (%.1f tokens/s), first after %.0f ms, finish: %s\n",
               static_cast<long>(result.prompt_tokens), static_cast<long>(result.completion_tokens), seconds,
               seconds > 0 ? static_cast<double>(result.completion_tokens) / seconds : 0.0,
               static_cast<double>(result.first_token) / kMillisecond, result.finish_reason.c_str());
}

}  // namespace conclave::cli
