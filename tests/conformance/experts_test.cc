#include "tests/conformance/support.h"

namespace conclave::kernels::testing {
namespace {

// --- gate
// ---------------------------------------------------------------------------------------------------------

struct Gate {
  std::vector<uint16_t> ids;
  std::vector<float> weights;
};

Gate run_gate(const Context& ctx, const std::vector<float>& logits, const std::vector<float>& bias,
              uint32_t m, uint32_t top_k) {
  Gate g{std::vector<uint16_t>(size_t{m} * top_k), std::vector<float>(size_t{m} * top_k)};
  route(ctx, logits.data(), bias.empty() ? nullptr : bias.data(), m, static_cast<uint32_t>(logits.size() / m),
        top_k, g.ids.data(), g.weights.data());
  return g;
}

TEST(Route, ManyShapes) {
  uint64_t seed = 500;
  uint32_t changed_by_bias = 0, compared = 0;
  for (const uint32_t experts : {1u, 2u, 3u, 8u, 17u, 64u, 128u, 256u, 300u}) {
    for (const uint32_t top_k : {1u, 2u, 3u, 4u, 8u, 16u}) {
      if (top_k > experts) continue;
      for (const bool biased : {false, true}) {
        Draw draw(++seed);
        const uint32_t m = 9;
        const auto logits = draw.normals(size_t{m} * experts);
        const auto bias = biased ? draw.normals(experts, 0.5f) : std::vector<float>();
        const Gate contract = run_gate({}, logits, bias, m, top_k);
        for (uint32_t row = 0; row < m; ++row) {
          const std::vector<float> one(logits.begin() + row * experts, logits.begin() + (row + 1) * experts);
          const ref::Routing want = ref::route(one, bias, top_k);
          if (want.margin < 1e-6) continue;  // a tie within rounding: the reference may choose otherwise
          ++compared;
          for (uint32_t s = 0; s < top_k; ++s) {
            ASSERT_EQ(contract.ids[row * top_k + s], want.ids[s]) << experts << " experts, top " << top_k;
            ASSERT_NEAR(contract.weights[row * top_k + s], want.weights[s], 2e-6);
          }
          if (biased && ref::route(one, {}, top_k).ids != want.ids) ++changed_by_bias;
        }
        for (const Way& way : all_ways()) {
          const Gate got = run_gate(way.ctx, logits, bias, m, top_k);
          expect_same_bits(contract.ids, got.ids, way.name);
          expect_same_bits(contract.weights, got.weights, way.name);
        }
      }
    }
  }
  EXPECT_GT(changed_by_bias, 100u);
  EXPECT_GT(compared, 700u);
}

TEST(Route, TiesGoToTheLowerId) {
  const std::vector<float> logits = {0.5f, 1.5f, 0.5f, 1.5f, -0.0f, 0.0f, 1.5f, 0.5f};
  for (const Way& way : all_ways()) {
    const Gate g = run_gate(way.ctx, logits, {}, 1, 7);
    EXPECT_EQ(g.ids, (std::vector<uint16_t>{1, 3, 6, 0, 2, 7, 4}));
  }
}

TEST(Route, ExtremeLogitsStayDistinctAndFinite) {
  const std::vector<float> logits = {-200.0f, 200.0f, 100.0f, -100.0f, 88.0f, -80.0f};
  for (const Way& way : all_ways()) {
    const Gate g = run_gate(way.ctx, logits, {}, 1, 4);
    EXPECT_EQ(g.ids, (std::vector<uint16_t>{1, 2, 4, 5}));
    for (const float w : g.weights) EXPECT_TRUE(std::isfinite(w));
  }
  const std::vector<float> bad = {NAN, 1.0f, NAN, NAN};
  EXPECT_EQ(run_gate({}, bad, {}, 1, 3).ids, (std::vector<uint16_t>{1, 0, 2}));
}

// --- experts
// ------------------------------------------------------------------------------------------------------

struct Expert {
  Matrix w1, w3, w2;
  ExpertWeights view;
  Expert(Draw& draw, WeightDtype dtype, uint32_t hidden, uint32_t inner)
      : w1(draw, dtype, inner, hidden, 1.0f / std::sqrt(static_cast<float>(hidden))),
        w3(draw, dtype, inner, hidden, 1.0f / std::sqrt(static_cast<float>(hidden))),
        w2(draw, dtype, hidden, inner, 1.0f / std::sqrt(static_cast<float>(inner))),
        view{w1.view(), w3.view(), w2.view()} {}
};

using Rows = std::vector<std::vector<std::byte>>;

Rows make_rows(Draw& draw, Precision precision, uint32_t m, uint32_t hidden) {
  Rows rows;
  for (uint32_t i = 0; i < m; ++i) {
    const auto x = draw.normals(hidden);
    const auto h = rounded(x);
    const auto* p = precision == Precision::kBf16 ? reinterpret_cast<const std::byte*>(h.data())
                                                  : reinterpret_cast<const std::byte*>(x.data());
    rows.emplace_back(p, p + hidden * (precision == Precision::kBf16 ? 2 : 4));
  }
  return rows;
}

struct Load {
  const ExpertWeights* weights;
  const Rows* rows;
};

std::vector<Rows> run(const Context& ctx, Precision precision, const std::vector<Load>& loads) {
  std::vector<Rows> out(loads.size());
  std::vector<std::vector<const std::byte*>> ins(loads.size());
  std::vector<std::vector<std::byte*>> outs(loads.size());
  std::vector<ExpertJob> jobs;
  for (size_t j = 0; j < loads.size(); ++j) {
    for (const auto& row : *loads[j].rows) {
      ins[j].push_back(row.data());
      out[j].emplace_back(row.size(), std::byte{0xee});
    }
    for (auto& row : out[j]) outs[j].push_back(row.data());
    jobs.push_back({loads[j].weights, ins[j].data(), outs[j].data(), static_cast<uint32_t>(ins[j].size())});
  }
  run_experts(ctx, precision, jobs);
  return out;
}

TEST(Experts, AgainstReferenceAndEveryGrouping) {
  struct Case {
    uint32_t hidden, inner;
  };
  for (const auto& [hidden, inner] :
       {Case{96, 40}, Case{64, 96}, Case{256, 128}, Case{136, 200}, Case{50, 3}}) {
    for (const WeightDtype dtype : {WeightDtype::kF32, WeightDtype::kBf16, WeightDtype::kFp8E4m3}) {
      for (const Precision precision : {Precision::kBf16, Precision::kF32}) {
        Draw draw(600 + hidden);
        Expert a(draw, dtype, hidden, inner), b(draw, dtype, hidden, inner);
        const Rows first = make_rows(draw, precision, 37, hidden),
                   second = make_rows(draw, precision, 3, hidden);
        Rows contract;
        for (const auto& row : first) {
          const Rows one = {row};
          contract.push_back(run({}, precision, {{&a.view, &one}})[0][0]);
        }
        for (size_t i = 0; i < 2; ++i) {
          ref::Vector x(hidden);
          const auto at = [&](const std::vector<std::byte>& row, uint32_t d) -> double {
            if (precision == Precision::kBf16) {
              Bf16 h;
              std::memcpy(&h, &row[d * 2], 2);
              return bf16_to_float(h);
            }
            float f;
            std::memcpy(&f, &row[d * 4], 4);
            return f;
          };
          for (uint32_t d = 0; d < hidden; ++d) x[d] = at(first[i], d);
          const ref::Vector want = ref::expert(a.view, x);
          double size = 0;
          for (const double w : want) size = std::max(size, std::abs(w));
          const double tolerance = (precision == Precision::kBf16 ? 2e-2 : 2e-5) * size + 1e-9;
          for (uint32_t d = 0; d < hidden; ++d)
            ASSERT_NEAR(at(contract[i], d), want[d], tolerance) << dtype_name(dtype) << " hidden " << hidden;
        }
        for (const Way& way : all_ways()) {
          const auto grouped =
              run(way.ctx, precision, {{&b.view, &second}, {&a.view, &first}, {&b.view, &second}});
          EXPECT_EQ(grouped[1], contract) << way.name << " " << dtype_name(dtype) << " hidden " << hidden;
          EXPECT_EQ(grouped[0], grouped[2]) << way.name;
          for (const uint32_t m : {1u, 2u, 4u, 5u, 7u}) {
            const Rows few(first.begin(), first.begin() + m);
            EXPECT_EQ(run(way.ctx, precision, {{&a.view, &few}})[0],
                      Rows(contract.begin(), contract.begin() + m))
                << way.name << " " << dtype_name(dtype) << " hidden " << hidden << " m=" << m;
          }
        }
      }
    }
  }
}

TEST(Experts, EmptyJobs) {
  run_experts({}, Precision::kBf16, {});
  Draw draw(7);
  Expert a(draw, WeightDtype::kBf16, 16, 8);
  const ExpertJob none{&a.view, nullptr, nullptr, 0};
  run_experts({}, Precision::kBf16, {&none, 1});
}

TEST(Combine, SlotOrder) {
  Draw draw(800);
  for (const uint32_t n : {1u, 15u, 16u, 96u, 3072u}) {
    for (const Precision precision : {Precision::kBf16, Precision::kF32}) {
      const Rows rows = make_rows(draw, precision, 8, n);
      std::vector<const std::byte*> pointers;
      for (const auto& row : rows) pointers.push_back(row.data());
      const auto weights = draw.normals(8), base = draw.normals(n);
      std::vector<float> got = base;
      combine_slots(precision, pointers.data(), weights.data(), 8, n, got.data());
      for (uint32_t i = 0; i < n; ++i) {
        float acc = 0;
        for (int s = 0; s < 8; ++s) {
          float v;
          if (precision == Precision::kBf16) {
            Bf16 h;
            std::memcpy(&h, &rows[s][i * 2], 2);
            v = bf16_to_float(h);
          } else {
            std::memcpy(&v, &rows[s][i * 4], 4);
          }
          acc = std::fma(weights[s], v, acc);
        }
        ASSERT_EQ(got[i], base[i] + acc) << n << " element " << i;
      }
    }
  }
}

}  // namespace
}  // namespace conclave::kernels::testing
