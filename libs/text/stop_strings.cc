#include "libs/text/stop_strings.h"

#include <algorithm>

namespace conclave::text {

StatusOr<StopStringMatcher> StopStringMatcher::create(std::vector<std::string> stops, bool keep_stop) {
  if (stops.size() > kMaxStops) {
    return invalid_field("stop", "stop has " + std::to_string(stops.size()) + " strings; at most " +
                                     std::to_string(kMaxStops) + " are taken");
  }
  StopStringMatcher out;
  out.keep_stop_ = keep_stop;
  for (size_t k = 0; k < stops.size(); ++k) {
    const std::string field = "stop[" + std::to_string(k) + "]";
    if (stops[k].empty()) return invalid_field(field, field + " is empty");
    if (stops[k].size() > kMaxStopBytes) {
      return invalid_field(field, field + " is longer than " + std::to_string(kMaxStopBytes) + " bytes");
    }
    Stop stop;
    stop.text = std::move(stops[k]);
    stop.border.assign(stop.text.size(), 0);
    for (size_t i = 1; i < stop.text.size(); ++i) {
      uint32_t b = stop.border[i - 1];
      while (b > 0 && stop.text[b] != stop.text[i]) b = stop.border[b - 1];
      stop.border[i] = stop.text[b] == stop.text[i] ? b + 1 : 0;
    }
    out.stops_.push_back(std::move(stop));
  }
  return out;
}

std::string StopStringMatcher::push(std::string_view piece, uint64_t token_index) {
  if (match_.has_value()) return {};
  for (const char c : piece) {
    pending_.push_back(c);
    ++consumed_;
    size_t best = stops_.size();
    for (size_t k = 0; k < stops_.size(); ++k) {
      Stop& stop = stops_[k];
      while (stop.matched > 0 && stop.text[stop.matched] != c) stop.matched = stop.border[stop.matched - 1];
      if (stop.text[stop.matched] == c) ++stop.matched;
      if (stop.matched < stop.text.size()) continue;
      if (best == stops_.size() || stop.text.size() > stops_[best].text.size()) best = k;
      // Unreachable again: a match ends the stream.
      stop.matched = 0;
    }
    if (best < stops_.size()) {
      const size_t length = stops_[best].text.size();
      match_ = Match{best, consumed_ - length, consumed_, token_index};
      // All of the stop string is still pending: its every prefix was held back.
      std::string out = pending_.substr(0, pending_.size() - (keep_stop_ ? 0 : length));
      pending_.clear();
      return out;
    }
  }
  size_t held = 0;
  for (const Stop& stop : stops_) held = std::max<size_t>(held, stop.matched);
  std::string out = pending_.substr(0, pending_.size() - held);
  pending_.erase(0, pending_.size() - held);
  return out;
}

std::string StopStringMatcher::flush() {
  std::string out = std::move(pending_);
  pending_.clear();
  for (Stop& stop : stops_) stop.matched = 0;
  return out;
}

}  // namespace conclave::text
