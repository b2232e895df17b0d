// Shared by the conformance suite: seeded data, every way to run an operation, and what "the same bits"
// means.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "libs/base/float_bits.h"
#include "libs/base/random.h"
#include "libs/kernels/ops.h"
#include "libs/kernels/ref/ref.h"

namespace conclave::kernels::testing {

#ifdef CONCLAVE_SMALL_SHAPES
inline constexpr bool kSmallShapes = true;
#else
inline constexpr bool kSmallShapes = false;
#endif

class Draw {
 public:
  explicit Draw(uint64_t seed) : rng_(seed) {}
  // Roughly normal, standard deviation 1.
  float normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += rng_.uniform();
    return static_cast<float>(sum);
  }
  std::vector<float> normals(size_t n, float scale = 1.0f) {
    std::vector<float> v(n);
    for (float& x : v) x = normal() * scale;
    return v;
  }
  SplitMix64& rng() { return rng_; }

 private:
  SplitMix64 rng_;
};

// A weight matrix that owns its data.
class Matrix {
 public:
  Matrix(Draw& draw, WeightDtype dtype, uint32_t rows, uint32_t cols, float scale = 1.0f) {
    view_.dtype = dtype;
    view_.rows = rows;
    view_.cols = cols;
    const size_t n = size_t{rows} * cols;
    bytes_.resize(view_.bytes());
    for (size_t i = 0; i < n; ++i) {
      if (dtype == WeightDtype::kF32) {
        const float f = draw.normal() * scale;
        std::memcpy(&bytes_[i * 4], &f, 4);
      } else if (dtype == WeightDtype::kBf16) {
        const Bf16 h = float_to_bf16(draw.normal() * scale);
        std::memcpy(&bytes_[i * 2], &h, 2);
      } else {
        // Every code but NaN, subnormals often.
        const auto r = static_cast<uint32_t>(draw.rng().next());
        auto code = static_cast<uint8_t>(r & 0xff);
        if ((r >> 8) % 8 == 0) code &= 0x87;
        if ((code & 0x7f) == 0x7f) code ^= 1;
        bytes_[i] = static_cast<std::byte>(code);
      }
    }
    if (dtype == WeightDtype::kFp8E4m3) {
      view_.scale_cols = (cols + 127) / 128;
      scales_.resize(size_t{(rows + 127) / 128} * view_.scale_cols);
      for (float& s : scales_) s = scale * 0.01f * static_cast<float>(0.25 + draw.rng().uniform());
      view_.scales = scales_.data();
    }
    view_.data = bytes_.data();
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  const WeightView& view() const { return view_; }
  std::byte* data() { return bytes_.data(); }

 private:
  std::vector<std::byte> bytes_;
  std::vector<float> scales_;
  WeightView view_;
};

inline std::vector<Bf16> rounded(const std::vector<float>& x) {
  std::vector<Bf16> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = float_to_bf16(x[i]);
  return out;
}
inline ref::Vector as_double(const std::vector<float>& x) { return {x.begin(), x.end()}; }
inline ref::Vector as_double(const std::vector<Bf16>& x) {
  ref::Vector out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = bf16_to_float(x[i]);
  return out;
}

// Every instruction set of this machine with one thread and with two, with and without the dot product.
struct Way {
  std::string name;
  Context ctx;
};
inline const std::vector<Way>& all_ways() {
  static ThreadPool pool(2);
  static const std::vector<Way> ways = [] {
    std::vector<Way> w;
    for (const Isa isa : available_isas()) {
      w.push_back({std::string(isa_name(isa)) + "/1", {isa, nullptr}});
      w.push_back({std::string(isa_name(isa)) + "/2", {isa, &pool}});
      if (isa == Isa::kAvx512Bf16)
        for (const DotProduct dot : {DotProduct::kAlways, DotProduct::kNever})
          w.push_back({std::string(isa_name(isa)) + (dot == DotProduct::kAlways ? "/dot" : "/fma"),
                       {isa, &pool, dot}});
    }
    return w;
  }();
  return ways;
}

template <class T>
void expect_same_bits(const std::vector<T>& want, const std::vector<T>& got, const std::string& where) {
  ASSERT_EQ(want.size(), got.size()) << where;
  if (std::memcmp(want.data(), got.data(), want.size() * sizeof(T)) == 0) return;
  for (size_t i = 0; i < want.size(); ++i)
    if (std::memcmp(&want[i], &got[i], sizeof(T)) != 0) {
      ADD_FAILURE() << where << ": element " << i << " of " << want.size() << " is " << got[i]
                    << ", contract says " << want[i];
      return;
    }
}

inline const char* dtype_name(WeightDtype d) {
  return d == WeightDtype::kF32 ? "f32" : d == WeightDtype::kBf16 ? "bf16" : "fp8";
}

}  // namespace conclave::kernels::testing
