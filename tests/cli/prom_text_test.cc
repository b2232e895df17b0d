// Percentiles out of two looks at a /metrics page.
#include "cli/prom_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cli/cluster_watch.h"
#include "libs/base/random.h"
#include "libs/telemetry/metrics.h"

namespace conclave::cli {
namespace {

constexpr char kName[] = "conclave_test_wait_seconds";

Buckets buckets_of(MetricsRegistry& registry) { return read_histogram(registry.expose(), kName); }

TEST(PromText, PercentilesAreWithinTheBucketOfTheTrueOnes) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SplitMix64 r(seed);
    MetricsRegistry registry;
    Histogram& histogram = registry.histogram(kName, "Wait");
    for (int i = 0; i < 100; ++i) histogram.observe(50);  // before the window
    const Buckets before = buckets_of(registry);
    std::vector<double> seen;
    for (uint64_t n = 1 + r.below(300); n > 0; --n) {
      seen.push_back(0.001 * std::pow(10, 4 * r.uniform()));
      histogram.observe(seen.back());
    }
    std::sort(seen.begin(), seen.end());
    const Percentiles p = percentiles_of(observed_between(before, buckets_of(registry)));
    EXPECT_EQ(p.count, static_cast<double>(seen.size()));
    const auto truth = [&seen](double q) {
      return seen[std::min(seen.size() - 1,
                           static_cast<size_t>(std::ceil(q * static_cast<double>(seen.size()))) - 1)];
    };
    // Buckets are less than a factor 2 apart.
    for (const auto& [estimate, exact] :
         {std::pair{p.p50, truth(0.5)}, std::pair{p.p90, truth(0.9)}, std::pair{p.p99, truth(0.99)}}) {
      EXPECT_LE(estimate, exact * 2.01);
      EXPECT_GE(estimate, exact / 2.01);
    }
  }
}

TEST(PromText, SeriesOfSeveralLabelsAreOneHistogram) {
  MetricsRegistry registry;
  registry.histogram(kName, "Wait", {{"le_not", "x"}}).observe(0.01);
  registry.histogram(kName, "Wait", {{"route", "a,le=\"9\""}}).observe(0.02);
  registry.histogram("conclave_test_wait_seconds_too_seconds", "Other").observe(1);
  EXPECT_EQ(percentiles_of(buckets_of(registry)).count, 2);
}

TEST(PromText, AProcessThatStartedAnewIsCountedFromZero) {
  MetricsRegistry old, fresh;
  for (int i = 0; i < 9; ++i) old.histogram(kName, "Wait").observe(1);
  fresh.histogram(kName, "Wait").observe(0.01);
  EXPECT_EQ(percentiles_of(observed_between(buckets_of(old), buckets_of(fresh))).count, 1);
}

TEST(PromText, WhatIsNotUnderstoodIsNothing) {
  const std::string name(kName);
  for (const std::string& page :
       {std::string(), std::string("# HELP"), name, name + "_bucket{", name + "_bucket{}",
        name + "_bucket{} 1", name + "_bucket{le=\"1\"} x", name + "_bucket{le=\"1\"} 3",  // no +Inf
        name + "_bucket{le=\"x\"} 3\n" + name + "_bucket{le=\"+Inf\"} nan",
        name + "_bucket{le=\"1\"} 3\n" + name + "_bucket{le=\"+Inf\"} 2",  // falls
        name + "_bucket{le=\"1\"} -1\n" + name + "_bucket{le=\"\n"}) {
    EXPECT_TRUE(read_histogram(page, name).empty()) << page;
  }
  EXPECT_EQ(percentiles_of({}).count, 0);
  EXPECT_TRUE(std::isnan(percentiles_of({}).p50));
  // A page of random bytes around a good line.
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SplitMix64 r(seed);
    std::string page = name + "_bucket{le=\"1\"} 1\n" + name + "_bucket{le=\"+Inf\"} 2\n";
    for (int i = 0; i < 20; ++i) page[r.below(page.size())] = static_cast<char>(r.below(256));
    percentiles_of(read_histogram(page, name));
  }
}

TEST(LatencyWindow, ForgetsWhatIsOlderThanItself) {
  LatencyWindow window(60 * kSecond);
  MetricsRegistry registry;
  Histogram& histogram = registry.histogram(kName, "Wait");
  histogram.observe(7);
  TimePoint now = 100 * kSecond;
  window.look("a", buckets_of(registry), now);
  EXPECT_EQ(percentiles_of(window.observed()).count, 0);  // from before
  histogram.observe(0.01);
  window.look("a", buckets_of(registry), now += 10 * kSecond);
  EXPECT_EQ(percentiles_of(window.observed()).count, 1);
  EXPECT_EQ(window.reaches(now), 10 * kSecond);
  for (int i = 0; i < 7; ++i) window.look("a", buckets_of(registry), now += 10 * kSecond);
  EXPECT_EQ(percentiles_of(window.observed()).count, 0);
  EXPECT_LE(window.reaches(now), 70 * kSecond);
  // A look that found nothing there is none.
  window.look("a", {}, now += kSecond);
  histogram.observe(0.01);
  window.look("a", buckets_of(registry), now += kSecond);
  EXPECT_EQ(percentiles_of(window.observed()).count, 1);
}

TEST(LatencyWindow, ProcessesAreAddedUpAndThoseThatAreGoneForgotten) {
  LatencyWindow window(60 * kSecond);
  MetricsRegistry a, b;
  a.histogram(kName, "Wait");
  b.histogram(kName, "Wait");
  window.look("a", buckets_of(a), kSecond);
  window.look("b", buckets_of(b), kSecond);
  a.histogram(kName, "Wait").observe(1);
  b.histogram(kName, "Wait").observe(1);
  window.look("a", buckets_of(a), 2 * kSecond);
  window.look("b", buckets_of(b), 2 * kSecond);
  EXPECT_EQ(percentiles_of(window.observed()).count, 2);
  window.look("b", buckets_of(b), 100 * kSecond);
  window.look("b", buckets_of(b), 101 * kSecond);
  EXPECT_EQ(percentiles_of(window.observed()).count, 0);
  EXPECT_LE(window.reaches(101 * kSecond), 100 * kSecond);
}

TEST(Rates, AreOfOneSchedulerAndItsOwnClock) {
  v1::StatusReply before, now;
  before.set_scheduler_incarnation(1);
  now.set_scheduler_incarnation(1);
  before.set_age_ns(10 * kSecond);
  now.set_age_ns(12 * kSecond);
  before.mutable_totals()->set_tokens_generated(100);
  now.mutable_totals()->set_tokens_generated(700);
  EXPECT_EQ(rates_between(before, now).generated, 300);
  EXPECT_EQ(rates_between(before, now).failed, 0);
  EXPECT_TRUE(std::isnan(rates_between(now, now).generated));
  EXPECT_TRUE(std::isnan(rates_between(now, before).generated));
  now.set_scheduler_incarnation(2);
  EXPECT_TRUE(std::isnan(rates_between(before, now).generated));
}

TEST(OpsAddress, AnUnspecifiedHostIsTheOneThatWasAsked) {
  EXPECT_EQ(ops_address_at("0.0.0.0:7071", "10.0.0.7:7070"), "10.0.0.7:7071");
  EXPECT_EQ(ops_address_at("[::]:7071", "scheduler.conclave:7070"), "scheduler.conclave:7071");
  EXPECT_EQ(ops_address_at("127.0.0.1:7071", "10.0.0.7:7070"), "127.0.0.1:7071");
  EXPECT_EQ(ops_address_at("", "10.0.0.7:7070"), "");
  EXPECT_EQ(ops_address_at("0.0.0.0:7071", "nonsense"), "");
}

}  // namespace
}  // namespace conclave::cli
