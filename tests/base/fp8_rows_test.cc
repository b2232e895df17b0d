#include "libs/model/fp8_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "libs/base/random.h"
#include "libs/model/numerics.h"

namespace conclave {
namespace {

std::vector<std::byte> encoded(const std::vector<float>& row) {
  std::vector<std::byte> out(row_bytes(RowDtype::kFp8, static_cast<uint32_t>(row.size())), std::byte{0xee});
  encode_fp8_row(row.data(), static_cast<uint32_t>(row.size()), out.data());
  return out;
}

std::vector<float> decoded(const std::vector<std::byte>& bytes, uint32_t hidden) {
  std::vector<Bf16> row(hidden);
  decode_fp8_row(bytes.data(), hidden, row.data());
  std::vector<float> out(hidden);
  for (uint32_t i = 0; i < hidden; ++i) out[i] = bf16_to_float(row[i]);
  return out;
}

// The definition in plain words, with the conversion that base_test checks exhaustively.
std::vector<std::byte> plain(const std::vector<float>& row) {
  const size_t n = row.size();
  std::vector<std::byte> out(row_bytes(RowDtype::kFp8, static_cast<uint32_t>(n)));
  for (size_t begin = 0; begin < n; begin += 128) {
    const size_t end = std::min(n, begin + 128);
    float largest = 0;
    for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(row[i]));
    const float scale = largest / 448.0f;
    std::memcpy(out.data() + n + begin / 128 * 4, &scale, 4);
    for (size_t i = begin; i < end; ++i) {
      out[i] = std::byte{scale == 0 ? uint8_t{0} : float_to_e4m3(row[i] / scale)};
    }
  }
  return out;
}

TEST(Fp8Rows, BytesAreTheDefinitions) {
  SplitMix64 random(1);
  for (const uint32_t hidden : {1u, 7u, 127u, 128u, 129u, 200u, 256u, 3072u}) {
    for (int kind = 0; kind < 40; ++kind) {
      std::vector<float> row(hidden);
      for (float& x : row) {
        // From the smallest subnormals to near the largest numbers, many of them near ties.
        const int exponent =
            kind < 20 ? static_cast<int>(random.below(12)) - 6 : static_cast<int>(random.below(270)) - 148;
        const float mantissa = 1 + static_cast<float>(random.below(64)) / (kind % 2 == 0 ? 16.0f : 64.0f);
        x = std::ldexp(random.chance(0.5) ? mantissa : -mantissa, exponent);
        if (random.chance(0.05)) x = 0;
      }
      ASSERT_EQ(encoded(row), plain(row)) << "hidden " << hidden << " kind " << kind;
    }
  }
}

TEST(Fp8Rows, ErrorIsThatOfThreeMantissaBits) {
  SplitMix64 random(2);
  std::vector<float> row(3072);
  for (float& x : row) x = static_cast<float>(random.uniform() * 8 - 4);
  const std::vector<float> back = decoded(encoded(row), 3072);
  for (size_t i = 0; i < row.size(); ++i) {
    const float step = 4.0f / 448.0f / 512.0f;
    EXPECT_LE(std::fabs(back[i] - row[i]), std::max(std::fabs(row[i]) * (1.0f / 16 + 1.0f / 256), step)) << i;
  }
}

TEST(Fp8Rows, TheLargestOfABlockComesBack) {
  std::vector<float> row(256, 0.0009f);
  row[5] = -448.0f;
  row[200] = 1.75f;
  const std::vector<float> back = decoded(encoded(row), 256);
  EXPECT_EQ(back[5], -448.0f);
  EXPECT_EQ(back[200], 1.75f);
  EXPECT_EQ(back[6], 0.0f) << "too small beside its block's largest";
  EXPECT_NE(back[201], 0.0f) << "another block has its own scale";
}

TEST(Fp8Rows, ZerosStayAndWhatIsNoNumberStaysNone) {
  EXPECT_EQ(decoded(encoded(std::vector<float>(130, 0.0f)), 130), std::vector<float>(130, 0.0f));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    std::vector<float> row(256, 1.0f);
    row[3] = bad;
    const std::vector<float> back = decoded(encoded(row), 256);
    EXPECT_TRUE(std::isnan(back[3])) << bad;
    EXPECT_EQ(back[255], 1.0f) << "the next block is its own";
  }
}

TEST(Fp8Rows, TheIdNamesTheWire) {
  EXPECT_NE(numerics_id(Precision::kBf16, "cpu", true).find("-wire.fp8-out.bf16-"), std::string::npos);
  EXPECT_EQ(numerics_id(Precision::kF32, "cpu", true), numerics_id(Precision::kF32, "cpu"));
  EXPECT_EQ(row_bytes(RowDtype::kFp8, 3072), 3072u + 24 * 4);
  EXPECT_EQ(row_bytes(RowDtype::kFp8, 129), 129u + 2 * 4);
}

}  // namespace
}  // namespace conclave
