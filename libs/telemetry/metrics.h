// Counters, gauges and histograms of one process, exposed in the Prometheus text format. Names are
// conclave_<what>_<unit>[_total] (counters end in _total), or process_... for what every process has; units
// are plural words or "ratio" and "info", and times are in seconds. A name, label or type that breaks the
// rules is our own bug and fails a CHECK.
//
// Metrics never fail a request: a counter that would go down ignores the change.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "libs/base/clock.h"

namespace conclave {

using MetricLabels = std::vector<std::pair<std::string, std::string>>;

// References stay valid as long as their registry. Any thread; lock-free.
class Counter {
 public:
  virtual ~Counter() = default;
  virtual void add(double amount = 1) = 0;  // negative and NaN amounts are ignored
};

class Gauge {
 public:
  virtual ~Gauge() = default;
  virtual void set(double value) = 0;
  virtual void add(double amount) = 0;
};

class Histogram {
 public:
  virtual ~Histogram() = default;
  virtual void observe(double value) = 0;
};

// What a collector writes at scrape time, for cores that keep plain-struct counters.
class MetricSink {
 public:
  virtual ~MetricSink() = default;
  virtual void counter(std::string_view name, std::string_view help, double value,
                       const MetricLabels& labels = {}) = 0;
  virtual void gauge(std::string_view name, std::string_view help, double value,
                     const MetricLabels& labels = {}) = 0;
  // Times, shown in seconds: `counts` by bucket and not added up, one more than `bounds`.
  virtual void times(std::string_view name, std::string_view help, std::span<const Nanos> bounds,
                     std::span<const uint64_t> counts, Nanos sum, const MetricLabels& labels) = 0;
  // The same of a TimeHistogram (libs/base/time_histogram.h).
  template <class Times>
  void histogram(std::string_view name, std::string_view help, const Times& seen,
                 const MetricLabels& labels = {}) {
    times(name, help, seen.bounds(), seen.counts(), seen.sum(), labels);
  }
};

// Whether a name follows the rule above; `is_counter` decides about _total.
bool valid_metric_name(std::string_view name, bool is_counter);

class MetricsRegistry {
 public:
  MetricsRegistry();
  ~MetricsRegistry();
  MetricsRegistry(const MetricsRegistry&) = delete;
  MetricsRegistry& operator=(const MetricsRegistry&) = delete;

  // The same name and labels give the same object. Any thread.
  Counter& counter(std::string_view name, std::string_view help, const MetricLabels& labels = {});
  Gauge& gauge(std::string_view name, std::string_view help, const MetricLabels& labels = {});
  // `buckets`: upper bounds, ascending. Empty: latency_buckets().
  Histogram& histogram(std::string_view name, std::string_view help, const MetricLabels& labels = {},
                       std::vector<double> buckets = {});

  // Called at each scrape, on the scraping thread; must be safe there and quick. Stays until the returned
  // handle is destroyed, which waits for a call in progress.
  class CollectorHandle {
   public:
    virtual ~CollectorHandle() = default;
  };
  [[nodiscard]] std::unique_ptr<CollectorHandle> add_collector(std::function<void(MetricSink&)> collect);

  // Everything, in the Prometheus text format 0.0.4.
  std::string expose() const;

  // 1 ms to 100 s, five a decade.
  static std::vector<double> latency_buckets();

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace conclave
