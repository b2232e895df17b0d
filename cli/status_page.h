// The live page of `conclave status --watch`, as lines of text: a pure function of what is shown and of the
// terminal's size. Only printable ASCII comes out: what is none in a name or an event becomes '?'.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/status_view.h"

namespace conclave::cli {

enum class Tone : uint8_t { kPlain, kBold, kDim, kGood, kWarning, kBad };

struct PageSpan {
  std::string text;
  Tone tone = Tone::kPlain;
};
using PageLine = std::vector<PageSpan>;

struct PageSize {
  size_t width = 80;   // columns, at least kMinWidth; less is taken for it
  size_t height = 24;  // lines; 0: as many as it takes
};
inline constexpr size_t kMinWidth = 40;
inline constexpr size_t kMinHeight = 8;
inline constexpr size_t kRoomyHeight = 24;   // from here on all latencies are shown, not the two main ones
inline constexpr double kEventMinutes = 10;  // older ones are not shown

// At most `height` lines (kMinHeight where it is less) of at most `width` columns each. Where members do not
// fit, those that need attention come first, then the busiest, and a line says how many are left out.
std::vector<PageLine> render_status(const StatusView& view, PageSize size);

// A line with (ECMA-48 sequences) or without its tones.
std::string line_text(const PageLine& line, bool colour);

// "1.2k", "340", "0.5"; "-" for what is not known.
std::string short_number(double value);
// "340 ms", "1.2 s", "-".
std::string short_time(double seconds);
// "45 s", "12 m", "3h 5m", "4d 2h", "300 d": seven columns at most.
std::string short_age(double seconds);

}  // namespace conclave::cli
