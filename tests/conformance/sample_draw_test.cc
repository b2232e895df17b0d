// Draws from whole rows against the contract written out in straight loops: the same token, always.
#include <cstring>
#include <numeric>
#include <string>

#include "libs/kernels/parallel.h"
#include "libs/kernels/weight_index.h"
#include "tests/conformance/support.h"

namespace conclave::kernels::testing {
namespace {

// A row sorted whole, and its weights at one temperature in that order.
struct Sorted {
  std::vector<uint32_t> order;
  std::vector<float> weights;
  float max = 0;
  float inverse = 0;
  float total = 0;
  size_t row_size = 0;
};

std::vector<uint32_t> order_of(const std::vector<float>& logits) {
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < logits.size(); ++i)
    if (logits[i] > -INFINITY) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return logits[a] > logits[b]; });
  return order;
}

Sorted sorted(const std::vector<float>& logits, const std::vector<uint32_t>& order, float temperature) {
  const FlushScope flush;
  Sorted s;
  s.order = order;
  s.row_size = logits.size();
  s.max = logits[order[0]];
  s.inverse = 1.0f / temperature;
  std::vector<float> in_order;
  for (const uint32_t id : order) in_order.push_back(logits[id]);
  s.weights.resize(in_order.size());
  scalar_table().exp_of(in_order.data(), in_order.size(), s.max, s.inverse, s.weights.data());
  s.total = scalar_table().exp_sum(logits.data(), logits.size(), s.max, s.inverse);
  return s;
}

uint32_t drawn(const Sorted& s, const SamplingParams& p, float u) {
  const FlushScope flush;
  const bool all = p.top_k == 0 || p.top_k >= s.row_size;
  size_t kept = all ? s.order.size() : std::min<size_t>(p.top_k, s.order.size());
  double sum = s.total;
  if (!all) {
    sum = 0;
    for (size_t i = 0; i < kept; ++i) sum += s.weights[i];
  }
  if (p.top_p < 1.0f) {
    const double enough = static_cast<double>(p.top_p) * sum;
    sum = s.weights[0];
    size_t i = 1;
    for (; i < kept && sum < enough; ++i) sum += s.weights[i];
    kept = i;
  }
  if (p.min_p > 0.0f) {
    sum = 0;
    size_t i = 0;
    for (; i < kept && s.weights[i] >= p.min_p; ++i) sum += s.weights[i];
    kept = i;
  }
  const double target = static_cast<double>(u) * sum;
  sum = 0;
  size_t last = 0;
  for (size_t i = 0; i < kept && s.weights[i] > 0.0f; ++i) {
    sum += s.weights[i];
    last = i;
    if (sum > target) break;
  }
  return s.order[last];
}

struct Row {
  std::string name;
  std::vector<float> logits;
};

// What models give and what they don't.
std::vector<Row> rows_of(uint32_t n, uint64_t seed) {
  Draw draw(seed);
  std::vector<Row> rows;
  for (const float deviation : {0.1f, 1.0f, 3.2f, 12.0f})
    rows.push_back({"deviation " + std::to_string(deviation), draw.normals(n, deviation)});
  rows.push_back({"ties", draw.normals(n, 2.0f)});
  for (float& x : rows.back().logits) x = std::round(x * 2) / 2;
  rows.push_back({"all equal", std::vector<float>(n, 1.25f)});
  rows.push_back({"one huge", draw.normals(n, 0.2f)});
  rows.back().logits[n / 3] = 40.0f;
  rows.push_back({"one large", draw.normals(n, 1.0f)});
  rows.back().logits[n / 2] = std::log(static_cast<float>(n)) + 1;
  rows.push_back({"most forbidden", draw.normals(n, 2.0f)});
  for (uint32_t i = 1; i < n; ++i)
    if (i % 8 != 0) rows.back().logits[i] = -INFINITY;
  rows.push_back({"around zero", draw.normals(n, 1e-3f)});
  for (uint32_t i = 0; i < n; i += 5) rows.back().logits[i] = i % 2 == 0 ? 0.0f : -0.0f;
  rows.push_back({"far below", draw.normals(n, 0.01f)});
  for (float& x : rows.back().logits) x -= 1000.0f;
  return rows;
}

SamplingParams cuts(float temperature, float top_p, float min_p, uint32_t top_k = 0) {
  SamplingParams p;
  p.temperature = temperature;
  p.top_p = top_p;
  p.min_p = min_p;
  p.top_k = top_k;
  p.top_logprobs = top_k == 0 ? 0 : 7;  // looks at the order too, before the draw
  return p;
}

void expect_drawn(const Row& row, const std::vector<uint32_t>& order, float temperature,
                  const std::vector<SamplingParams>& all, const std::vector<float>& us) {
  const Sorted s = sorted(row.logits, order, temperature);
  std::vector<float> logits = row.logits;
  for (const SamplingParams& p : all) {
    for (const float u : us) {
      const uint32_t want = drawn(s, p, u);
      for (const Isa isa : available_isas()) {
        const auto got = sample({isa, nullptr}, logits, p, u);
        ASSERT_TRUE(got.ok()) << got.status();
        ASSERT_EQ(got->token, want) << row.name << " n=" << row.logits.size() << " T=" << temperature
                                    << " k=" << p.top_k << " p=" << p.top_p << " min_p=" << p.min_p
                                    << " u=" << u << " " << isa_name(isa);
      }
    }
  }
}

TEST(SampleDraw, IsTheContractsInRowsOfEveryKind) {
  uint64_t seed = 5000;
  SplitMix64 rng(1);
  for (const uint32_t n : {1u, 2u, 15u, 17u, 100u, 257u, kSmallShapes ? 700u : 4000u}) {
    for (const Row& row : rows_of(n, ++seed)) {
      const std::vector<uint32_t> order = order_of(row.logits);
      for (const float t : {1e-37f, 0.1f, 1.0f, 1.7f, 1e6f}) {
        std::vector<SamplingParams> all;
        for (const float top_p : {1.0f, 0.0f, 1e-6f, 0.5f, 0.95f, 0.999999f})
          for (const float min_p : {0.0f, 1e-30f, 0.02f, 1.0f}) all.push_back(cuts(t, top_p, min_p));
        all.push_back(cuts(t, 1, 0, 40));
        all.push_back(cuts(t, 0.9f, 0.01f, n / 2 + 1));
        all.push_back(cuts(t, 0.9f, 0.01f, n));
        std::vector<float> us = {0.0f, 0.5f, 0x1.fffffep-1f};
        for (int i = 0; i < 2; ++i) us.push_back(static_cast<float>(rng.below(1 << 24)) * 0x1p-24f);
        expect_drawn(row, order, t, all, us);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(SampleDraw, IsTheContractsOverAWholeVocabulary) {
  const uint32_t n = kSmallShapes ? 20'064 : 200'064;
  SplitMix64 rng(2);
  for (const Row& row : rows_of(n, 6000)) {
    const std::vector<uint32_t> order = order_of(row.logits);
    for (const float t : {0.3f, 1.0f, 1e4f}) {
      const std::vector<SamplingParams> all = {
          cuts(t, 1, 0),     cuts(t, 0.95f, 0),           cuts(t, 0.3f, 0),
          cuts(t, 1, 0.05f), cuts(t, 0.99f, 0.001f, 700), cuts(t, 1, 0, 6000),
          cuts(t, 1, 0, 60)};
      std::vector<float> us;
      for (int i = 0; i < 2; ++i) us.push_back(static_cast<float>(rng.below(1 << 24)) * 0x1p-24f);
      expect_drawn(row, order, t, all, us);
      if (HasFatalFailure()) return;
    }
  }
}

// Draws from the seeds' own uniforms follow the exact probabilities.
TEST(SampleDraw, FollowsExactProbabilities) {
  for (const SamplingParams& p :
       {cuts(1, 1, 0), cuts(0.7f, 0.9f, 0), cuts(1, 1, 0.02f), cuts(1.3f, 0.97f, 0.01f), cuts(1, 1, 0, 20)}) {
    for (const float deviation : {0.3f, 2.0f}) {
      constexpr uint32_t kTokens = 80, kDraws = 20'000;
      Draw draw(7000);
      std::vector<float> logits = draw.normals(kTokens, deviation);
      const ref::Vector want = ref::distribution(logits, p);
      std::vector<uint32_t> counts(kTokens);
      for (uint32_t i = 0; i < kDraws; ++i) {
        const float u = uniform_draw(77, 0, i, DrawPurpose::kSample);
        ++counts[sample({available_isas().back(), nullptr}, logits, p, u)->token];
      }
      // Chi-square over tokens, the rare ones together.
      double chi = 0, rare_want = 0, rare_got = 0;
      uint32_t classes = 0;
      const auto add = [&](double expected, double got) {
        chi += (got - expected) * (got - expected) / expected;
        ++classes;
      };
      for (uint32_t id = 0; id < kTokens; ++id) {
        const double expected = want[id] * kDraws;
        if (expected == 0) {
          EXPECT_EQ(counts[id], 0u);
        } else if (expected < 10) {
          rare_want += expected;
          rare_got += counts[id];
        } else {
          add(expected, counts[id]);
        }
      }
      if (rare_want > 5) add(rare_want, rare_got);
      ASSERT_GT(classes, 4u);
      const double degrees = classes - 1;
      EXPECT_LT(chi, degrees + 4 * std::sqrt(2 * degrees)) << p.top_p << " " << deviation;
      EXPECT_GT(chi, degrees - 4 * std::sqrt(2 * degrees)) << p.top_p << " " << deviation;
    }
  }
}

TEST(SampleDraw, FollowsExactProbabilitiesOfAWholeVocabulary) {
  const uint32_t n = kSmallShapes ? 20'064 : 200'064, draws = kSmallShapes ? 400 : 2000;
  Draw draw(7001);
  std::vector<float> logits = draw.normals(n, 1.0f);
  const std::vector<uint32_t> order = order_of(logits);
  for (const SamplingParams& p : {cuts(1, 1, 0), cuts(1, 0.95f, 0)}) {
    const ref::Vector want = ref::distribution(logits, p);
    // Twenty groups of equal probability, by rank.
    constexpr uint32_t kGroups = 20;
    std::vector<uint32_t> group(n);
    double sum = 0;
    for (const uint32_t id : order) {
      group[id] = std::min(static_cast<uint32_t>(sum * kGroups), kGroups - 1);
      sum += want[id];
    }
    std::vector<double> counts(kGroups);
    for (uint32_t i = 0; i < draws; ++i) {
      const float u = uniform_draw(78, 1, i, DrawPurpose::kSample);
      const auto got = sample({available_isas().back(), nullptr}, logits, p, u);
      ASSERT_GT(want[got->token], 0);
      ++counts[group[got->token]];
    }
    double chi = 0;
    const double expected = static_cast<double>(draws) / kGroups;
    for (const double c : counts) chi += (c - expected) * (c - expected) / expected;
    EXPECT_LT(chi, (kGroups - 1) + 4 * std::sqrt(2.0 * (kGroups - 1)));
  }
}

// --- the index that spares the sorting

TEST(WeightIndex, AnswersNearlyAlwaysAndRight) {
  const uint32_t n = kSmallShapes ? 4000 : 40'000;
  SplitMix64 rng(3);
  for (const Row& row : rows_of(n, 8000)) {
    const std::vector<uint32_t> order = order_of(row.logits);
    for (const float t : {0.7f, 20.0f}) {
      const Sorted s = sorted(row.logits, order, t);
      const FlushScope flush;
      for (const Isa isa : available_isas()) {
        const Table& table = table_of(isa);
        WeightIndex index(table, row.logits, s.max, s.inverse);
        const float total = index.total();
        EXPECT_EQ(std::memcmp(&total, &s.total, sizeof total), 0) << row.name << " " << isa_name(isa);
        int answers = 0;
        constexpr int kQuestions = 50;
        for (int q = 0; q < kQuestions; ++q) {
          const double value = rng.uniform() * 0.999 * total;
          const auto got = index.find(value);
          if (!got) continue;
          ++answers;
          double sum = 0;
          size_t i = 0;
          while ((sum += s.weights[i]) <= value) ++i;
          ASSERT_EQ(got->id, s.order[i]) << row.name << " " << isa_name(isa);
          ASSERT_NEAR(got->sum, sum, 1e-10 * sum);
        }
        // "one huge" at 0.7 holds everything else far below what is certain.
        EXPECT_GE(answers, kQuestions - 1) << row.name << " T=" << t << " " << isa_name(isa);
      }
    }
  }
}

TEST(WeightIndex, DoesNotAnswerOnABorder) {
  const std::vector<float> logits(1000, 2.0f);
  const FlushScope flush;
  for (const Isa isa : available_isas()) {
    WeightIndex index(table_of(isa), logits, 2.0f, 1.0f);
    EXPECT_EQ(index.total(), 1000.0f);
    EXPECT_FALSE(index.find(500));
    EXPECT_FALSE(index.find(500 + 1e-11));
    EXPECT_FALSE(index.find(500 - 1e-11));
    EXPECT_FALSE(index.find(1000));
    EXPECT_FALSE(index.find(1e9));
    ASSERT_TRUE(index.find(500.5));
    EXPECT_EQ(index.find(500.5)->id, 500u);
    EXPECT_EQ(index.find(500.5)->sum, 501);
    EXPECT_EQ(index.find(0)->id, 0u);  // nothing comes before: certain
    EXPECT_EQ(index.find(999.5)->id, 999u);
    EXPECT_EQ(index.sum_from(0.5f), 1000);
  }
}

TEST(WeightIndex, PartsAreTheSameOnEveryInstructionSet) {
  for (const uint32_t n : {1u, 7u, 16u, 31u, 255u, 256u, 257u, 1000u, 4099u}) {
    for (const Row& row : rows_of(n, 9000 + n)) {
      const FlushScope flush;
      const float max = *std::max_element(row.logits.begin(), row.logits.end());
      const float inverse = n % 2 == 0 ? 1.0f : 1.7f;
      const float want_total = scalar_table().exp_sum(row.logits.data(), n, max, inverse);
      std::vector<uint32_t> bits(n);
      for (uint32_t i = 0; i < n; ++i)
        bits[i] = std::bit_cast<uint32_t>((row.logits[i] - max) * inverse) & 0x7fffffffu;
      std::vector<double> want_bins;
      for (const Isa isa : available_isas()) {
        const Table& table = table_of(isa);
        std::vector<double> even(kWeightSlots), odd(kWeightSlots);
        const float total = table.exp_bins(row.logits.data(), n, max, inverse, even.data(), odd.data());
        EXPECT_EQ(std::memcmp(&total, &want_total, sizeof total), 0) << row.name << " " << isa_name(isa);
        EXPECT_EQ(std::accumulate(even.begin() + kWeightBins, even.end(), 0.0), 0);
        EXPECT_EQ(std::accumulate(odd.begin() + kWeightBins, odd.end(), 0.0), 0);
        even.insert(even.end(), odd.begin(), odd.end());
        if (want_bins.empty()) want_bins = even;
        expect_same_bits(want_bins, even, row.name);
        const std::pair<uint32_t, uint32_t> ranges[] = {
            {0, 0},
            {0, 1},
            {0, 0x7f800000u},
            {bits[n / 2], std::min(bits[n / 2] + 1, 0x7f800000u)},
            {bits[n / 3], 0x7f800000u},
            {std::bit_cast<uint32_t>(0.5f), std::bit_cast<uint32_t>(3.0f)}};
        for (const auto& [begin, end] : ranges) {
          std::vector<uint32_t> want, got(n + 16);
          for (uint32_t i = 0; i < n; ++i)
            if (bits[i] >= begin && bits[i] < end) want.push_back(i);
          got.resize(table.collect(row.logits.data(), n, max, inverse, begin, end, got.data()));
          EXPECT_EQ(got, want) << row.name << " " << isa_name(isa) << " " << begin << " " << end;
        }
      }
    }
  }
}

}  // namespace
}  // namespace conclave::kernels::testing
