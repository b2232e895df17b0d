#include "cli/prom_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

namespace conclave::cli {
namespace {

constexpr size_t kMaxBuckets = 512;

bool number(std::string_view text, double& out) {
  if (text == "+Inf" || text == "Inf") {
    out = std::numeric_limits<double>::infinity();
    return true;
  }
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

// The value of le in {a="x",le="0.1"}.
bool bound_of(std::string_view labels, double& out) {
  for (size_t at = labels.find("le=\""); at != std::string_view::npos; at = labels.find("le=\"", at + 1)) {
    if (at > 0 && labels[at - 1] != ',' && labels[at - 1] != '{') continue;
    const size_t begin = at + 4;
    const size_t end = labels.find('"', begin);
    return end != std::string_view::npos && number(labels.substr(begin, end - begin), out) &&
           !std::isnan(out);
  }
  return false;
}

}  // namespace

Buckets read_histogram(std::string_view page, std::string_view name) {
  Buckets out;
  const std::string prefix = std::string(name) + "_bucket{";
  for (size_t at = 0; at < page.size();) {
    const size_t end = std::min(page.find('\n', at), page.size());
    const std::string_view line = page.substr(at, end - at);
    at = end + 1;
    if (!line.starts_with(prefix)) continue;
    const size_t close = line.rfind('}');
    if (close == std::string_view::npos || close + 2 > line.size()) continue;
    std::string_view text = line.substr(close + 2);
    text = text.substr(0, text.find(' '));  // a time may follow
    double bound = 0, count = 0;
    if (!bound_of(line.substr(prefix.size() - 1, close - prefix.size() + 1), bound) || !number(text, count) ||
        !std::isfinite(count) || count < 0)
      continue;
    out[bound] += count;
    if (out.size() > kMaxBuckets) return {};
  }
  if (out.empty() || !std::isinf(out.rbegin()->first)) return {};
  double before = 0;
  for (const auto& [bound, count] : out) {
    if (count < before) return {};
    before = count;
  }
  return out;
}

Buckets observed_between(const Buckets& before, const Buckets& now) {
  if (before.empty()) return now;
  if (before.size() != now.size()) return {};
  Buckets out;
  for (auto a = before.begin(), b = now.begin(); b != now.end(); ++a, ++b) {
    if (a->first != b->first) return {};
    if (b->second < a->second) return now;
    out[b->first] = b->second - a->second;
  }
  // Read while it was written to: differences of cumulative counts must not fall.
  double most = 0;
  for (auto& [bound, count] : out) count = most = std::max(most, count);
  return out;
}

void add_to(Buckets& sum, const Buckets& more) {
  for (const auto& [bound, count] : more) sum[bound] += count;
}

Percentiles percentiles_of(const Buckets& buckets) {
  Percentiles out;
  if (buckets.empty()) return out;
  out.count = buckets.rbegin()->second;
  if (out.count <= 0) return out;
  const auto at = [&buckets, &out](double quantile) {
    const double rank = quantile * out.count;
    double low = 0, below = 0;
    for (const auto& [bound, count] : buckets) {
      if (count >= rank) {
        if (std::isinf(bound)) return low;
        const double in_bucket = count - below;
        return in_bucket > 0 ? low + (bound - low) * (rank - below) / in_bucket : bound;
      }
      low = bound;
      below = count;
    }
    return low;
  };
  out.p50 = at(0.5);
  out.p90 = at(0.9);
  out.p99 = at(0.99);
  return out;
}

void LatencyWindow::look(const std::string& key, Buckets buckets, TimePoint now) {
  for (auto it = looks_.begin(); it != looks_.end();) {
    std::deque<Look>& looks = it->second;
    while (looks.size() >= 2 && looks[1].at <= now - length_) looks.pop_front();
    const bool gone = it->first != key && looks.back().at <= now - length_;
    it = gone ? looks_.erase(it) : std::next(it);
  }
  if (buckets.empty()) return;  // else all that was ever observed would look new the next time
  if (!looks_.contains(key) && looks_.size() >= kMaxProcesses) return;
  looks_[key].push_back({now, std::move(buckets)});
}

Buckets LatencyWindow::observed() const {
  Buckets sum;
  for (const auto& [key, looks] : looks_) {
    // Step by step, since a process may have started anew in between.
    for (size_t i = 1; i < looks.size(); ++i)
      add_to(sum, observed_between(looks[i - 1].buckets, looks[i].buckets));
  }
  return sum;
}

Nanos LatencyWindow::reaches(TimePoint now) const {
  TimePoint first = now;
  for (const auto& [key, looks] : looks_) first = std::min(first, looks.front().at);
  return now - first;
}

}  // namespace conclave::cli
