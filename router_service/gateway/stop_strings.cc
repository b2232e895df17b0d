#include "router_service/gateway/stop_strings.h"

#include <algorithm>

namespace conclave::gateway {

bool StopStrings::push(std::string_view piece, std::string& out) {
  if (stops_.empty()) {
    out += piece;
    return false;
  }
  const size_t old = held_.size();
  held_ += piece;
  size_t best_begin = std::string::npos;
  size_t best_end = std::string::npos;
  for (const std::string& stop : stops_) {
    // What was held before holds no whole stop string, so a match ends in the new piece.
    const size_t from = old >= stop.size() ? old - stop.size() + 1 : 0;
    const size_t at = held_.find(stop, from);
    if (at == std::string::npos) continue;
    const size_t end = at + stop.size();
    if (end < best_end || (end == best_end && at < best_begin)) {
      best_begin = at;
      best_end = end;
    }
  }
  if (best_begin != std::string::npos) {
    out.append(held_, 0, best_begin);
    held_.clear();
    stops_.clear();
    return true;
  }
  size_t keep = 0;  // the longest end of held_ that begins a stop string
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n)
      if (std::string_view(held_).substr(held_.size() - n) == std::string_view(stop).substr(0, n)) keep = n;
  }
  out.append(held_, 0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return false;
}

void StopStrings::flush(std::string& out) {
  out += held_;
  held_.clear();
}

}  // namespace conclave::gateway
