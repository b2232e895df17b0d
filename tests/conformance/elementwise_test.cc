#include "libs/kernels/cpu/table.h"
#include "tests/conformance/support.h"

namespace conclave::kernels::testing {
namespace {

TEST(Exp, WithinTwoUnitsInTheLastPlace) {
  std::vector<float> x;
  for (float v = -86.9f; v < 88.6f; v += 0.00371f) x.push_back(v);
  std::vector<float> got(x.size());
  scalar_table().exp_of(x.data(), x.size(), 0.0f, 1.0f, got.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(static_cast<double>(x[i]));
    const double unit = std::ldexp(1.0, std::ilogb(want) - 23);
    ASSERT_LE(std::abs(got[i] - want), 2 * unit) << "exp(" << x[i] << ")";
  }
  const std::vector<float> edges = {-INFINITY, -1e30f, -87.01f, 0.0f, -0.0f, 88.71f, 1e30f, INFINITY, NAN};
  std::vector<float> out(edges.size());
  scalar_table().exp_of(edges.data(), edges.size(), 0.0f, 1.0f, out.data());
  const std::vector<float> want = {0, 0, 0, 1, 1, INFINITY, INFINITY, INFINITY};
  for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(out[i], want[i]) << edges[i];
  EXPECT_TRUE(std::isnan(out.back()));
}

TEST(RmsNorm, AgainstReference) {
  uint64_t seed = 100;
  for (const uint32_t n : {1u, 5u, 16u, 31u, 64u, 96u, 3072u}) {
    for (const uint32_t m : {1u, 3u, 40u}) {
      Draw draw(++seed);
      const float scale = seed % 3 == 0 ? 1e-4f : seed % 3 == 1 ? 1.0f : 1e4f;
      const std::vector<float> x = draw.normals(size_t{m} * n, scale), w = draw.normals(n);
      const ref::Vector want = ref::rms_norm(as_double(x), w, 1e-6f, m);
      std::vector<float> contract(x.size());
      rms_norm({}, x.data(), w.data(), 1e-6f, m, n, contract.data());
      for (size_t i = 0; i < x.size(); ++i)
        ASSERT_NEAR(contract[i], want[i], 2e-6 * std::abs(want[i]) + 1e-12);
      for (const Way& way : all_ways()) {
        std::vector<float> in_place = x;
        rms_norm(way.ctx, in_place.data(), w.data(), 1e-6f, m, n, in_place.data());
        expect_same_bits(contract, in_place, way.name + " n=" + std::to_string(n));
      }
    }
  }
}

TEST(RmsNorm, ZeroRow) {
  const std::vector<float> x(20, 0.0f), w(20, 1.0f);
  std::vector<float> out(20, 9.0f);
  for (const Way& way : all_ways()) {
    rms_norm(way.ctx, x.data(), w.data(), 1e-6f, 1, 20, out.data());
    EXPECT_EQ(out, x);
  }
}

TEST(Bf16, RoundsToNearestEvenOnEveryPattern) {
  Draw draw(200);
  std::vector<float> x = {0.0f,      -0.0f,   1e-40f, -1e-45f,     INFINITY,
                          -INFINITY, 3.4e38f, NAN,    1.00390625f, 1.01171875f};
  for (int i = 0; i < 100'003; ++i)
    x.push_back(std::bit_cast<float>(static_cast<uint32_t>(draw.rng().next())));
  const std::vector<Bf16> want = rounded(x);
  for (const Way& way : all_ways()) {
    std::vector<Bf16> got(x.size());
    to_bf16(way.ctx, x.data(), x.size(), got.data());
    expect_same_bits(want, got, way.name);
    std::vector<float> wide(want.size());
    bf16_to_f32(way.ctx, want.data(), want.size(), wide.data());
    for (size_t i = 0; i < want.size(); ++i)
      ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), static_cast<uint32_t>(want[i]) << 16);
  }
}

TEST(Embed, EveryFormat) {
  for (const WeightDtype dtype : {WeightDtype::kF32, WeightDtype::kBf16, WeightDtype::kFp8E4m3}) {
    Draw draw(300);
    const Matrix w(draw, dtype, 300, 150);
    const ref::Vector d = ref::dequantize(w.view());
    const std::vector<TokenId> tokens = {0, 299, 17, 17, 128};
    for (const Way& way : all_ways()) {
      std::vector<float> out(tokens.size() * 150);
      embed(way.ctx, w.view(), tokens, out.data());
      for (size_t i = 0; i < out.size(); ++i)
        ASSERT_EQ(out[i], static_cast<float>(d[tokens[i / 150] * 150 + i % 150])) << dtype_name(dtype);
    }
  }
}

TEST(Rope, AgainstReference) {
  struct Case {
    uint32_t heads, head_dim, rotary_dim;
  };
  for (const auto& [heads, head_dim, rotary_dim] :
       {Case{2, 128, 64}, Case{3, 16, 8}, Case{1, 24, 24}, Case{4, 20, 2}, Case{1, 8, 0}}) {
    Draw draw(400 + head_dim);
    const std::vector<uint32_t> positions = {0, 1, 5, 63, 511, 512, 131'071, 196'607, 5};
    const auto m = static_cast<uint32_t>(positions.size());
    const size_t row = size_t{heads} * head_dim;
    const std::vector<float> x = draw.normals(m * row);
    const Rope rope(head_dim, rotary_dim, 5e6);
    std::vector<float> contract = x;
    rope.apply({}, contract.data(), m, heads, positions.data());
    for (uint32_t i = 0; i < m; ++i) {
      const ref::Vector in(x.begin() + i * row, x.begin() + (i + 1) * row);
      const ref::Vector want = ref::rope(in, heads, head_dim, rotary_dim, 5e6, positions[i]);
      for (size_t j = 0; j < row; ++j) {
        ASSERT_NEAR(contract[i * row + j], want[j], 1e-6) << "position " << positions[i];
        if (j % head_dim >= rotary_dim) {
          ASSERT_EQ(contract[i * row + j], x[i * row + j]);
        }
      }
    }
    for (const Way& way : all_ways()) {
      std::vector<float> got = x;
      rope.apply(way.ctx, got.data(), m, heads, positions.data());
      expect_same_bits(contract, got, way.name);
      for (uint32_t i = 0; i < m; ++i) {  // one row alone
        std::vector<float> one(x.begin() + i * row, x.begin() + (i + 1) * row);
        rope.apply(way.ctx, one.data(), 1, heads, &positions[i]);
        expect_same_bits({contract.begin() + i * row, contract.begin() + (i + 1) * row}, one, way.name);
      }
    }
  }
}

TEST(Rope, TwoThetasDoNotMix) {
  const Rope a(8, 8, 1e4), b(8, 8, 5e6);
  const uint32_t position = 77;
  const std::vector<float> x = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> first = x, other = x, again = x;
  a.apply({}, first.data(), 1, 1, &position);
  b.apply({}, other.data(), 1, 1, &position);
  a.apply({}, again.data(), 1, 1, &position);
  EXPECT_NE(first, other);
  EXPECT_EQ(first, again);
}

}  // namespace
}  // namespace conclave::kernels::testing
