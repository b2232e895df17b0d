#include "libs/telemetry/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "libs/base/check.h"

namespace conclave {
namespace {

prometheus::Labels to_labels(const MetricLabels& labels) {
  prometheus::Labels out;
  for (const auto& [key, value] : labels) {
    CONCLAVE_CHECK(!key.empty() && key != "le" && std::all_of(key.begin(), key.end(), [](char c) {
      return (c >= 'a' && c <= 'z') || c == '_';
    }));
    CONCLAVE_CHECK(out.emplace(key, value).second);
  }
  return out;
}

class CounterImpl : public Counter {
 public:
  explicit CounterImpl(prometheus::Counter& counter) : counter_(counter) {}
  void add(double amount) override {
    if (amount > 0) counter_.Increment(amount);
  }

 private:
  prometheus::Counter& counter_;
};

class GaugeImpl : public Gauge {
 public:
  explicit GaugeImpl(prometheus::Gauge& gauge) : gauge_(gauge) {}
  void set(double value) override { gauge_.Set(value); }
  void add(double amount) override { gauge_.Increment(amount); }

 private:
  prometheus::Gauge& gauge_;
};

class HistogramImpl : public Histogram {
 public:
  explicit HistogramImpl(prometheus::Histogram& histogram) : histogram_(histogram) {}
  void observe(double value) override {
    if (!std::isnan(value)) histogram_.Observe(value);
  }

 private:
  prometheus::Histogram& histogram_;
};

using Collect = std::function<void(MetricSink&)>;

// Groups what collectors write into families, in order of first appearance.
class Sink : public MetricSink {
 public:
  explicit Sink(std::vector<prometheus::MetricFamily>& out) : out_(out) {
    for (size_t i = 0; i < out_.size(); ++i) index_.emplace(out_[i].name, i);
  }
  void counter(std::string_view name, std::string_view help, double value,
               const MetricLabels& labels) override {
    prometheus::ClientMetric metric;
    metric.counter.value = value;
    add(name, help, prometheus::MetricType::Counter, std::move(metric), labels);
  }
  void gauge(std::string_view name, std::string_view help, double value,
             const MetricLabels& labels) override {
    prometheus::ClientMetric metric;
    metric.gauge.value = value;
    add(name, help, prometheus::MetricType::Gauge, std::move(metric), labels);
  }
  void times(std::string_view name, std::string_view help, std::span<const Nanos> bounds,
             std::span<const uint64_t> counts, Nanos sum, const MetricLabels& labels) override {
    CONCLAVE_CHECK(counts.size() == bounds.size() + 1);
    prometheus::ClientMetric metric;
    metric.histogram.bucket.reserve(counts.size());
    uint64_t below = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      below += counts[i];
      const double bound = i < bounds.size() ? static_cast<double>(bounds[i]) / static_cast<double>(kSecond)
                                             : std::numeric_limits<double>::infinity();
      metric.histogram.bucket.push_back({below, bound});
    }
    metric.histogram.sample_count = below;
    metric.histogram.sample_sum = static_cast<double>(sum) / static_cast<double>(kSecond);
    add(name, help, prometheus::MetricType::Histogram, std::move(metric), labels);
  }

 private:
  void add(std::string_view name, std::string_view help, prometheus::MetricType type,
           prometheus::ClientMetric metric, const MetricLabels& labels) {
    CONCLAVE_CHECK(valid_metric_name(name, type == prometheus::MetricType::Counter));
    const auto [at, fresh] = index_.emplace(std::string(name), out_.size());
    if (fresh) {
      out_.emplace_back();
      out_.back().name = std::string(name);
      out_.back().help = std::string(help);
      out_.back().type = type;
    }
    CONCLAVE_CHECK(out_[at->second].type == type);
    for (const auto& [key, label_value] : to_labels(labels)) metric.label.push_back({key, label_value});
    out_[at->second].metric.push_back(std::move(metric));
  }

  std::vector<prometheus::MetricFamily>& out_;
  std::map<std::string, size_t> index_;
};

}  // namespace

struct MetricsRegistry::Impl {
  prometheus::Registry registry;
  std::mutex mutex;  // guards the maps
  std::map<std::string, prometheus::Family<prometheus::Counter>*> counter_families;
  std::map<std::string, prometheus::Family<prometheus::Gauge>*> gauge_families;
  std::map<std::string, prometheus::Family<prometheus::Histogram>*> histogram_families;
  std::map<prometheus::Counter*, std::unique_ptr<CounterImpl>> counters;
  std::map<prometheus::Gauge*, std::unique_ptr<GaugeImpl>> gauges;
  std::map<prometheus::Histogram*, std::unique_ptr<HistogramImpl>> histograms;
  std::mutex collect_mutex;  // held while collectors run, so that a removed one is not running
  std::list<Collect> collectors;
};

namespace {

class Handle : public MetricsRegistry::CollectorHandle {
 public:
  Handle(std::shared_ptr<MetricsRegistry::Impl> impl, std::list<Collect>::iterator at)
      : impl_(std::move(impl)), at_(at) {}
  ~Handle() override {
    std::lock_guard lock(impl_->collect_mutex);
    impl_->collectors.erase(at_);
  }

 private:
  std::shared_ptr<MetricsRegistry::Impl> impl_;
  std::list<Collect>::iterator at_;
};

bool ends_with_word(std::string_view name, std::string_view word) {
  return name.size() > word.size() + 1 && name.ends_with(word) && name[name.size() - word.size() - 1] == '_';
}

}  // namespace

bool valid_metric_name(std::string_view name, bool is_counter) {
  if (!name.starts_with("conclave_") && !name.starts_with("process_")) return false;
  if (name.find("__") != std::string_view::npos) return false;
  if (!std::all_of(name.begin(), name.end(),
                   [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; }))
    return false;
  if (name.ends_with("_total") != is_counter) return false;
  if (is_counter) name.remove_suffix(6);
  for (std::string_view reserved : {"count", "sum", "bucket", "total"})
    if (ends_with_word(name, reserved)) return false;
  for (std::string_view wrong : {"milliseconds", "microseconds", "nanoseconds", "minutes", "hours",
                                 "kilobytes", "megabytes", "mebibytes", "percents"})
    if (ends_with_word(name, wrong)) return false;
  const size_t last = name.rfind('_');
  const std::string_view unit = name.substr(last + 1);
  if (last == std::string_view::npos) return false;
  return unit == "ratio" || unit == "info" || (unit.size() > 1 && unit.ends_with('s'));
}

MetricsRegistry::MetricsRegistry() : impl_(std::make_shared<Impl>()) {}
MetricsRegistry::~MetricsRegistry() = default;

Counter& MetricsRegistry::counter(std::string_view name, std::string_view help, const MetricLabels& labels) {
  CONCLAVE_CHECK(valid_metric_name(name, true));
  std::lock_guard lock(impl_->mutex);
  auto& family = impl_->counter_families[std::string(name)];
  if (family == nullptr)
    family =
        &prometheus::BuildCounter().Name(std::string(name)).Help(std::string(help)).Register(impl_->registry);
  prometheus::Counter& inner = family->Add(to_labels(labels));
  auto& wrapper = impl_->counters[&inner];
  if (wrapper == nullptr) wrapper = std::make_unique<CounterImpl>(inner);
  return *wrapper;
}

Gauge& MetricsRegistry::gauge(std::string_view name, std::string_view help, const MetricLabels& labels) {
  CONCLAVE_CHECK(valid_metric_name(name, false));
  std::lock_guard lock(impl_->mutex);
  auto& family = impl_->gauge_families[std::string(name)];
  if (family == nullptr)
    family =
        &prometheus::BuildGauge().Name(std::string(name)).Help(std::string(help)).Register(impl_->registry);
  prometheus::Gauge& inner = family->Add(to_labels(labels));
  auto& wrapper = impl_->gauges[&inner];
  if (wrapper == nullptr) wrapper = std::make_unique<GaugeImpl>(inner);
  return *wrapper;
}

Histogram& MetricsRegistry::histogram(std::string_view name, std::string_view help,
                                      const MetricLabels& labels, std::vector<double> buckets) {
  CONCLAVE_CHECK(valid_metric_name(name, false));
  if (buckets.empty()) buckets = latency_buckets();
  CONCLAVE_CHECK(std::is_sorted(buckets.begin(), buckets.end()));
  std::lock_guard lock(impl_->mutex);
  auto& family = impl_->histogram_families[std::string(name)];
  if (family == nullptr)
    family = &prometheus::BuildHistogram()
                  .Name(std::string(name))
                  .Help(std::string(help))
                  .Register(impl_->registry);
  prometheus::Histogram& inner = family->Add(to_labels(labels), buckets);
  auto& wrapper = impl_->histograms[&inner];
  if (wrapper == nullptr) wrapper = std::make_unique<HistogramImpl>(inner);
  return *wrapper;
}

std::unique_ptr<MetricsRegistry::CollectorHandle> MetricsRegistry::add_collector(Collect collect) {
  std::lock_guard lock(impl_->collect_mutex);
  impl_->collectors.push_back(std::move(collect));
  return std::make_unique<Handle>(impl_, std::prev(impl_->collectors.end()));
}

std::string MetricsRegistry::expose() const {
  std::vector<prometheus::MetricFamily> families = impl_->registry.Collect();
  {
    std::lock_guard lock(impl_->collect_mutex);
    Sink sink(families);
    for (const Collect& collect : impl_->collectors) collect(sink);
  }
  return prometheus::TextSerializer().Serialize(families);
}

std::vector<double> MetricsRegistry::latency_buckets() {
  return {0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.3,
          0.5,   0.7,   1,     2,     3,     5,    7,    10,   20,   30,   50,  70,  100};
}

}  // namespace conclave
