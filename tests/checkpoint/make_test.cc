#include "libs/checkpoint/make.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <fstream>

#include "libs/base/float_bits.h"
#include "libs/checkpoint/binding.h"
#include "libs/checkpoint/inspect.h"
#include "tests/checkpoint/test_files.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;
using testing::read_text;
using testing::TempDir;

std::string make_error(const MakeOptions& o) {
  const auto made = make_checkpoint(o);
  return made.ok() ? std::string("made") : message_of(made.status());
}

TEST(Make, BadOptionsAreNamed) {
  TempDir dir;
  MakeOptions o;
  EXPECT_THAT(make_error(o), HasSubstr("directory to write to"));
  o.out = dir / "m";
  o.geometry = "m1";
  EXPECT_THAT(make_error(o), HasSubstr("comes with MiniMax-M1"));
  o.geometry = "tiny-m1";
  EXPECT_THAT(make_error(o), HasSubstr("comes with MiniMax-M1"));
  o.geometry = "m3";
  EXPECT_THAT(make_error(o), HasSubstr("unknown geometry \"m3\""));
  o.geometry = "tiny-m2";
  o.dtype = "int4";
  EXPECT_THAT(make_error(o), HasSubstr("unknown dtype \"int4\""));
  o.dtype = "fp8";
  o.set = {{"hiden_size", "1"}};
  EXPECT_THAT(make_error(o), HasSubstr("--set hiden_size: config.json has no such field"));
  o.set = {{"num_attention_heads", "7"}};
  EXPECT_THAT(make_error(o), HasSubstr("num_attention_heads"));
  o.set = {{"vocab_size", "309"}};
  EXPECT_THAT(make_error(o), HasSubstr("vocab_size: must be at least 310"));
  o.set = {{"rope_parameters.partial_rotary_factor", "1.0"}};
  EXPECT_THAT(make_error(o), HasSubstr("rotated"));
  EXPECT_FALSE(std::filesystem::exists(o.out));  // nothing is left behind
  o.set = {};
  std::filesystem::create_directories(o.out);
  testing::write_text(o.out + "/file", "x");
  EXPECT_THAT(make_error(o), HasSubstr("not an empty directory"));
}

TEST(Make, DependsOnTheSeedAlone) {
  TempDir dir;
  for (const std::string dtype : {"fp8", "bf16", "f32"}) {
    MakeOptions a;
    a.out = dir / (dtype + "a");
    a.dtype = dtype;
    a.single_file = true;
    a.layers = 1;
    MakeOptions b = a;
    b.out = dir / (dtype + "b");
    MakeOptions c = a;
    c.out = dir / (dtype + "c");
    c.seed = 99;
    for (const MakeOptions& o : {a, b, c}) ASSERT_EQ(make_error(o), "made");
    EXPECT_EQ(read_text(a.out + "/model.safetensors"), read_text(b.out + "/model.safetensors"));
    EXPECT_NE(read_text(a.out + "/model.safetensors"), read_text(c.out + "/model.safetensors"));
    // A larger model begins with the same values.
    MakeOptions d = a;
    d.out = dir / (dtype + "d");
    d.layers = 3;
    d.single_file = false;
    d.file_bytes = 100'000;
    ASSERT_EQ(make_error(d), "made");
    const auto ma = load_model(a.out), md = load_model(d.out);
    ASSERT_TRUE(ma.ok() && md.ok());
    const WeightView& x = (*ma)->experts[0][2].w2;
    const WeightView& y = (*md)->experts[0][2].w2;
    EXPECT_EQ(std::memcmp(x.data, y.data, x.bytes()), 0);
    EXPECT_EQ((*ma)->dense.layers[0].gate_bias, (*md)->dense.layers[0].gate_bias);
  }
}

// What the golden files rest on: the same bytes on every machine and compiler.
TEST(Make, ValuesAreTheKnownOnes) {
  TempDir dir;
  MakeOptions o;
  o.out = dir / "m";
  o.layers = 1;
  for (const auto& [dtype, expected] :
       std::vector<std::pair<std::string, std::string>>{{"f32", "d62d99b86af72e314e492b4a5c9e7b87"},
                                                        {"bf16", "95aaf99058e5f8f9240ad2e264166342"},
                                                        {"fp8", "0a2f9bede8173080b9cb17a29e8b9a01"}}) {
    o.dtype = dtype;
    o.out = dir / dtype;
    ASSERT_EQ(make_error(o), "made");
    const auto model = load_model(o.out);
    ASSERT_TRUE(model.ok());
    EXPECT_EQ((*model)->fingerprint, expected) << dtype;
  }
}

// Weights as they are meant: about the deviation that keeps activations near 1, no degenerate values.
TEST(Make, WeightsAreSpread) {
  TempDir dir;
  for (const std::string dtype : {"fp8", "bf16", "f32"}) {
    MakeOptions o;
    o.out = dir / dtype;
    o.dtype = dtype;
    o.layers = 1;
    ASSERT_EQ(make_error(o), "made");
    const auto model = load_model(o.out);
    ASSERT_TRUE(model.ok());
    const WeightView& w = (*model)->dense.layers[0].q_proj;
    double square = 0, sum = 0;
    const size_t n = size_t{w.rows} * w.cols;
    for (size_t i = 0; i < n; ++i) {
      const double v = w.dtype == WeightDtype::kF32 ? static_cast<const float*>(w.data)[i]
                       : w.dtype == WeightDtype::kBf16
                           ? bf16_to_float(static_cast<const Bf16*>(w.data)[i])
                           : e4m3_to_float(static_cast<const uint8_t*>(w.data)[i]) *
                                 w.scales[i / w.cols / 128 * w.scale_cols + i % w.cols / 128];
      square += v * v;
      sum += v;
    }
    const double std = std::sqrt(square / static_cast<double>(n));
    EXPECT_GT(std, 0.4 / std::sqrt(128.0)) << dtype;
    EXPECT_LT(std, 1.6 / std::sqrt(128.0)) << dtype;
    EXPECT_LT(std::abs(sum / static_cast<double>(n)), 0.02 * std) << dtype;
    for (const float b : (*model)->dense.layers[0].gate_bias) EXPECT_NE(b, 0.0f);
  }
}

TEST(Make, ReportsProgressToTheEnd) {
  TempDir dir;
  MakeOptions o;
  o.out = dir / "m";
  uint64_t last = 0, total = 0;
  o.progress = [&](uint64_t done, uint64_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  };
  const auto made = make_checkpoint(o);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(last, total);
  EXPECT_EQ(total, made->bytes);
}

TEST(Make, DiskWithoutRoomIsSaidBeforehand) {
  TempDir dir;
  MakeOptions o;
  o.out = dir / "m";
  o.geometry = "m2";
  o.dtype = "f32";
  o.set = {{"hidden_size", "1048576"}, {"intermediate_size", "1048576"}};
  const auto made = make_checkpoint(o);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), StatusCode::kResourceExhausted);
  EXPECT_FALSE(std::filesystem::exists(o.out));
  o.set = {{"num_local_experts", "65535"}};
  EXPECT_THAT(make_error(o), HasSubstr("4063170 experts make more than the limit of 500000 tensors"));
}

// Half a gigabyte of one layer of real width, streamed: peak memory stays far below the checkpoint's size.
TEST(Make, StreamsWithinItsMemory) {
  TempDir dir;
  const std::filesystem::space_info space = std::filesystem::space(dir.path());
  if (space.available < 1ull << 30) GTEST_SKIP() << "needs 1 GiB of temporary space";
  MakeOptions o;
  o.out = dir / "m";
  o.geometry = "m2";
  o.layers = 1;
  o.dtype = "fp8";
  o.set = {{"num_local_experts", "32"}, {"vocab_size", "2048"}};
  struct rusage before {};
  getrusage(RUSAGE_SELF, &before);
  const auto start = std::chrono::steady_clock::now();
  const auto made = make_checkpoint(o);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ASSERT_TRUE(made.ok()) << message_of(made.status());
  struct rusage after {};
  getrusage(RUSAGE_SELF, &after);
  const double mib = static_cast<double>(made->bytes) / (1 << 20);
  std::printf("%.0f MiB in %.1f s (%.0f MiB/s), peak memory %ld MiB\n", mib, seconds, mib / seconds,
              after.ru_maxrss >> 10);
  EXPECT_GT(mib, 400);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(after.ru_maxrss >> 10, 200);
#endif
}

}  // namespace
}  // namespace conclave
