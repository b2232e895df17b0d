// Histograms out of a /metrics page, and percentiles out of their differences. Input is whatever a port
// answered: what is not understood is left out.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <string_view>

#include "cli/status_view.h"
#include "libs/base/clock.h"

namespace conclave::cli {

// Cumulative counts by upper bound, as Prometheus has them; the last bound is +Inf.
using Buckets = std::map<double, double>;

// Of the histogram of that name, its series added up. Empty: there is none, or it makes no sense.
Buckets read_histogram(std::string_view page, std::string_view name);

// What was observed between two looks at one process. A count that went down means that it started anew: all
// of `now` is new then. Empty when the bounds differ.
Buckets observed_between(const Buckets& before, const Buckets& now);

// Adds the counts of equal bounds; bounds that only one of them has are taken as they are, so both should be
// of one build.
void add_to(Buckets& sum, const Buckets& more);

// By linear interpolation within a bucket, as histogram_quantile() of Prometheus does; beyond the last finite
// bound, that bound.
Percentiles percentiles_of(const Buckets& buckets);

// Histograms of several processes over a moving window.
class LatencyWindow {
 public:
  explicit LatencyWindow(Nanos length) : length_(length) {}

  // A look at `now` at the process of that key (its address). Times only go forward. Empty ones are ignored.
  void look(const std::string& key, Buckets buckets, TimePoint now);
  // What was observed within the window, of all processes that were looked at in it.
  Buckets observed() const;
  // How far back that goes.
  Nanos reaches(TimePoint now) const;

 private:
  struct Look {
    TimePoint at = 0;
    Buckets buckets;
  };
  const Nanos length_;
  // By process: the last look before the window, and those in it. Processes that are gone are forgotten with
  // their window; at most kMaxProcesses.
  static constexpr size_t kMaxProcesses = 256;
  std::map<std::string, std::deque<Look>> looks_;
};

}  // namespace conclave::cli
