#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "libs/base/random.h"
#include "libs/kernels/parallel.h"

namespace conclave::kernels {
namespace {

constexpr std::array kAllIsas = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16};

bool cpu_has(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kAvx512:
      return cpu_has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::kAvx512Bf16:
      return cpu_has(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("gfni");
  }
  return false;
}

// Whether a matmul on an instruction set has the bits of the scalar contract, in each way it has. The contract, most of
// the time that a check takes, is computed once.
bool matmul_agrees(std::initializer_list<Context> ways, const WeightView& w, Precision precision, const void* x,
                   uint32_t m) {
  std::vector<float> want(size_t{m} * w.rows), got(want.size());
  matmul({Isa::kScalar, nullptr}, w, precision, x, w.cols, m, want.data(), w.rows);
  for (const Context& way : ways) {
    std::fill(got.begin(), got.end(), -1.0f);
    matmul(way, w, precision, x, w.cols, m, got.data(), w.rows);
    if (std::memcmp(want.data(), got.data(), want.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

// Values of every size, zeros and subnormals of both signs among them; no NaN, whose payload no contract
// covers.
uint16_t any_bf16(SplitMix64& rng) {
  const auto r = static_cast<uint32_t>(rng.next());
  const uint32_t exponent = (r >> 24) % 4 == 0 ? (r >> 16) % 3 : 100 + (r >> 16) % 50;
  return static_cast<uint16_t>((r & 0x807fu) | (exponent << 7));
}

}  // namespace

const Table& table_of(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return scalar_table();
    case Isa::kAvx2:
      return avx2_table();
    case Isa::kAvx512:
      return avx512_table();
    case Isa::kAvx512Bf16:
      return avx512bf16_table();
  }
  return scalar_table();
}

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512bf16";
  }
  return "unknown";
}

Status self_check(Isa isa) {
  if (!cpu_has(isa)) return failed_precondition("this CPU has no " + std::string(isa_name(isa)));
  SplitMix64 rng(1);
  const auto wrong = [&](const char* what) {
    return internal_error(std::string(isa_name(isa)) + " differs from the scalar contract in " + what);
  };
  constexpr uint32_t kRows = 20, kCols = 208, kTokens = 7;  // small: every process runs this at start
  std::vector<uint16_t> x(size_t{kTokens} * kCols), w(size_t{kRows} * kCols);
  std::vector<uint8_t> w8(w.size());
  std::vector<float> x32(x.size()), w32(w.size()), scales(2);
  for (auto& v : x) v = any_bf16(rng);
  for (auto& v : w) v = any_bf16(rng);
  for (auto& v : w8) v = static_cast<uint8_t>(rng.next());
  for (auto& s : scales) s = 0.25f + static_cast<float>(rng.uniform());
  for (size_t i = 0; i < x.size(); ++i) x32[i] = bf16_to_float(x[i]);
  for (size_t i = 0; i < w.size(); ++i) w32[i] = bf16_to_float(w[i]);
  const WeightView views[] = {{w.data(), WeightDtype::kBf16, kRows, kCols, nullptr, 0},
                              {w8.data(), WeightDtype::kFp8E4m3, kRows, kCols, scales.data(), 2},
                              {w32.data(), WeightDtype::kF32, kRows, kCols, nullptr, 0},
                              // Widths that the single-row path takes.
                              {w.data(), WeightDtype::kBf16, kRows, 192, nullptr, 0},
                              {w8.data(), WeightDtype::kFp8E4m3, kRows, 192, scales.data(), 2}};
  for (const WeightView& view : views) {
    for (const uint32_t m : {1u, 2u, 4u, kTokens}) {
      if (!matmul_agrees({{isa, nullptr, DotProduct::kNever}, {isa, nullptr, DotProduct::kAlways}}, view,
                         Precision::kBf16, x.data(), m))
        return wrong("matmul");
      if (!matmul_agrees({{isa, nullptr}}, view, Precision::kF32, x32.data(), m)) return wrong("matmul in f32");
    }
  }
  const Table &mine = table_of(isa), &contract = scalar_table();
  std::vector<float> in(203), other(203), a(203), b(203);
  for (auto& v : in) v = static_cast<float>(rng.uniform() * 200 - 100);
  for (auto& v : other) v = bf16_to_float(any_bf16(rng));
  const FlushScope flush;
  const auto same = [&] { return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; };
  mine.silu_mul(in.data(), other.data(), in.size(), a.data());
  contract.silu_mul(in.data(), other.data(), in.size(), b.data());
  if (!same()) return wrong("silu");
  mine.sigmoid(in.data(), in.size(), a.data());
  contract.sigmoid(in.data(), in.size(), b.data());
  if (!same()) return wrong("sigmoid");
  mine.rms_norm(in.data(), other.data(), 1e-6f, 203, a.data());
  contract.rms_norm(in.data(), other.data(), 1e-6f, 203, b.data());
  if (!same()) return wrong("rms_norm");
  return OkStatus();
}

std::vector<Isa> available_isas() {
  static const std::vector<Isa> isas = [] {
    std::vector<Isa> passed;
    for (const Isa isa : kAllIsas)
      if (cpu_has(isa) && self_check(isa).ok()) passed.push_back(isa);
    return passed;
  }();
  return isas;
}

Isa best_isa() {
  static const Isa best = [] {
    for (size_t i = kAllIsas.size(); i-- > 1;)
      if (cpu_has(kAllIsas[i]) && self_check(kAllIsas[i]).ok()) return kAllIsas[i];
    return Isa::kScalar;
  }();
  return best;
}

StatusOr<Isa> choose_isa() {
  const char* wanted = std::getenv("CONCLAVE_ISA");
  if (wanted == nullptr || *wanted == '\0') return best_isa();
  const std::vector<Isa> isas = available_isas();
  for (const Isa isa : isas)
    if (isa_name(isa) == wanted) return isa;
  std::string names;
  for (const Isa isa : isas) names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  return invalid_field("CONCLAVE_ISA", "'" + std::string(wanted) + "' is not among this machine's: " + names);
}

}  // namespace conclave::kernels
