#include "tests/conformance/support.h"

namespace conclave::kernels::testing {
namespace {

constexpr WeightDtype kDtypes[] = {WeightDtype::kF32, WeightDtype::kBf16, WeightDtype::kFp8E4m3};
constexpr Precision kPrecisions[] = {Precision::kBf16, Precision::kF32};

struct Case {
  uint32_t rows, cols;
  std::vector<uint32_t> batches;
};

std::vector<uint32_t> small_batches() {
  std::vector<uint32_t> m;
  for (uint32_t i = 1; i <= 33; ++i) m.push_back(i);
  return m;
}

std::vector<float> run(const Context& ctx, const WeightView& w, Precision p, const std::vector<float>& x,
                       uint32_t m) {
  // Rows lie apart, so that reading or writing past a row is seen.
  const size_t x_stride = w.cols + 3, y_stride = w.rows + 5;
  std::vector<float> spread(m * x_stride, NAN), y(m * y_stride, -77.0f), out(size_t{m} * w.rows);
  for (uint32_t i = 0; i < m; ++i)
    std::memcpy(&spread[i * x_stride], &x[size_t{i} * w.cols], w.cols * sizeof(float));
  const std::vector<Bf16> half = rounded(spread);
  matmul(ctx, w, p, p == Precision::kBf16 ? static_cast<const void*>(half.data()) : spread.data(), x_stride,
         m, y.data(), y_stride);
  for (uint32_t i = 0; i < m; ++i) {
    for (size_t o = w.rows; o < y_stride; ++o) EXPECT_EQ(y[i * y_stride + o], -77.0f);
    std::memcpy(&out[size_t{i} * w.rows], &y[i * y_stride], w.rows * sizeof(float));
  }
  return out;
}

// Checks the contract (scalar, one row at a time) against the reference, then everything else against the
// contract.
void check(uint64_t seed, uint32_t rows, uint32_t cols, const std::vector<uint32_t>& batches) {
  for (const WeightDtype dtype : kDtypes) {
    for (const Precision precision : kPrecisions) {
      Draw draw(seed);
      const Matrix w(draw, dtype, rows, cols);
      const uint32_t most = *std::max_element(batches.begin(), batches.end());
      const std::vector<float> x = draw.normals(size_t{most} * cols);
      const Context scalar;
      std::vector<float> contract;
      for (uint32_t i = 0; i < most; ++i) {
        const auto y =
            run(scalar, w.view(), precision, {x.begin() + i * cols, x.begin() + (i + 1) * cols}, 1);
        contract.insert(contract.end(), y.begin(), y.end());
      }
      const uint32_t against = std::min(most, 3u);  // rows held against the reference
      ref::Vector xd = precision == Precision::kBf16 ? as_double(rounded(x)) : as_double(x);
      xd.resize(size_t{against} * cols);
      const ref::Vector want = ref::matmul(w.view(), xd, against);
      const ref::Vector size = ref::matmul_magnitude(w.view(), xd, against);
      for (size_t i = 0; i < want.size(); ++i)
        ASSERT_NEAR(contract[i], want[i], 4e-6 * size[i] + 1e-30)
            << dtype_name(dtype) << " " << rows << "x" << cols << " element " << i;
      for (const Way& way : all_ways()) {
        for (const uint32_t m : batches) {
          const std::string where =
              way.name + " " + dtype_name(dtype) + (precision == Precision::kBf16 ? "" : " f32") + " " +
              std::to_string(rows) + "x" + std::to_string(cols) + " m=" + std::to_string(m);
          const auto y = run(way.ctx, w.view(), precision, {x.begin(), x.begin() + size_t{m} * cols}, m);
          expect_same_bits({contract.begin(), contract.begin() + size_t{m} * rows}, y, where);
        }
      }
    }
  }
}

TEST(Matmul, EverySmallBatch) {
  check(1, 50, 136, small_batches());
  check(2, 12, 256, small_batches());
}

TEST(Matmul, OddShapes) {
  uint64_t seed = 10;
  for (const uint32_t rows : {1u, 3u, 50u, 65u})
    for (const uint32_t cols : {1u, 7u, 8u, 40u, 96u, 127u, 128u, 130u, 136u, 160u})
      check(++seed, rows, cols, {1, 2, 3, 4, 5, 6, 7, 8, 9, 13});
}

TEST(Matmul, BatchesOfTheContract) {
  check(3, kSmallShapes ? 21 : 70, kSmallShapes ? 192 : 320, {1, 7, 64, 300});
  if (!kSmallShapes) {
    check(4, 132, 1536, {1, 3, 7, 64});
    check(5, 68, 3072, {1, 2, 7});
  }
}

TEST(Matmul, SubnormalsZerosAndLargeValues) {
  const uint32_t rows = 9, cols = 264, m = 6;
  for (const WeightDtype dtype : {WeightDtype::kF32, WeightDtype::kBf16}) {
    Draw draw(77);
    Matrix w(draw, dtype, rows, cols);
    const size_t width = dtype == WeightDtype::kF32 ? 4 : 2;
    std::vector<float> x = draw.normals(size_t{m} * cols);
    const float specials[] = {0.0f, -0.0f, 1e-39f, -3e-40f, 1.2e-38f, 1e19f, -1e19f, 1e-30f, 1e-25f};
    for (size_t i = 0; i < x.size(); i += 3) x[i] = specials[draw.rng().below(9)];
    for (size_t i = 0; i < size_t{rows} * cols; i += 2) {
      const float f = specials[draw.rng().below(9)];
      const uint32_t u = std::bit_cast<uint32_t>(f);
      if (width == 4)
        std::memcpy(w.data() + i * 4, &u, 4);
      else
        std::memcpy(w.data() + i * 2, reinterpret_cast<const char*>(&u) + 2, 2);
    }
    for (const Precision p : kPrecisions) {
      const auto want = run({}, w.view(), p, x, m);
      for (const Way& way : all_ways()) expect_same_bits(want, run(way.ctx, w.view(), p, x, m), way.name);
    }
  }
}

TEST(Matmul, EveryE4m3Code) {
  // Row o picks code 2o or 2o+1 by an x that is one at one place.
  Draw draw(5);
  Matrix w(draw, WeightDtype::kFp8E4m3, 128, 2);
  for (int i = 0; i < 256; ++i) w.data()[i] = static_cast<std::byte>((i & 0x7f) == 0x7f ? 0 : i);
  for (const Way& way : all_ways()) {
    const auto y = run(way.ctx, w.view(), Precision::kBf16, {1, 0, 0, 1}, 2);
    for (int i = 0; i < 256; ++i) {
      const float code = (i & 0x7f) == 0x7f ? 0.0f : e4m3_to_float(static_cast<uint8_t>(i));
      EXPECT_EQ(y[(i % 2) * 128 + i / 2], code * w.view().scales[0]) << way.name << " code " << i;
    }
  }
}

TEST(Matmul, NothingToDo) {
  Draw draw(6);
  const Matrix w(draw, WeightDtype::kBf16, 4, 16);
  float y = 5;
  matmul({}, w.view(), Precision::kBf16, nullptr, 16, 0, &y, 4);
  EXPECT_EQ(y, 5);
}

}  // namespace
}  // namespace conclave::kernels::testing
