// Sixteen float lanes with the same bits on every instruction set: only IEEE operations, fused only where
// fma() says. Everything is in an unnamed namespace and always inlined, since each includer is compiled for
// another target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace conclave::kernels {
namespace {

#define CONCLAVE_INLINE inline __attribute__((always_inline))

typedef float F16 __attribute__((vector_size(64)));
typedef float F8 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));
typedef double D8 __attribute__((vector_size(64)));
typedef double D4 __attribute__((vector_size(32)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));

CONCLAVE_INLINE F16 splat(float v) { return F16{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
CONCLAVE_INLINE U16 splat_u(uint32_t v) { return U16{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
template <class V>
CONCLAVE_INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
CONCLAVE_INLINE F16 load(const float* p) { return load_as<F16>(p); }
CONCLAVE_INLINE void store(float* p, F16 v) { std::memcpy(p, &v, sizeof v); }
// The first n (< 16) lanes; the rest is `fill`.
CONCLAVE_INLINE F16 load_part(const float* p, size_t n, float fill) {
  F16 v = splat(fill);
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}
CONCLAVE_INLINE void store_part(float* p, F16 v, size_t n) { std::memcpy(p, &v, n * sizeof(float)); }

CONCLAVE_INLINE F16 fma(F16 a, F16 b, F16 c) {
#if defined(__AVX512F__)
  return (F16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  struct Halves {
    F8 h[2];
  };
  const Halves x = __builtin_bit_cast(Halves, a), y = __builtin_bit_cast(Halves, b),
               z = __builtin_bit_cast(Halves, c);
  const Halves r = {{(F8)_mm256_fmadd_ps((__m256)x.h[0], (__m256)y.h[0], (__m256)z.h[0]),
                     (F8)_mm256_fmadd_ps((__m256)x.h[1], (__m256)y.h[1], (__m256)z.h[1])}};
  return __builtin_bit_cast(F16, r);
#else
  F16 r;
  for (int i = 0; i < 16; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}
// acc = fma(x, w, acc) for register tiles. Written out, since with the intrinsic GCC 12 copies x for every
// product and keeps the tile on the stack, at two thirds of the speed.
CONCLAVE_INLINE void accumulate(F16& acc, F16 x, F16 w) {
#if defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(x), "v"(w));
#else
  acc = fma(x, w, acc);
#endif
}
// a > b ? a : b, so that a NaN in a gives b on every instruction set.
CONCLAVE_INLINE F16 max(F16 a, F16 b) { return a > b ? a : b; }

// The fold 8, 4, 2, 1: t[i] with t[i + w]. Written on half vectors so that it stays in registers.
template <class Op>
CONCLAVE_INLINE float fold(F16 v, const Op& op) {
  struct Two8 {
    F8 h[2];
  };
  struct Two4 {
    F4 h[2];
  };
  const Two8 a = __builtin_bit_cast(Two8, v);
  const Two4 b = __builtin_bit_cast(Two4, op(a.h[0], a.h[1]));
  const F4 c = op(b.h[0], b.h[1]);
  return op(op(c[0], c[2]), op(c[1], c[3]));
}
CONCLAVE_INLINE float sum_lanes(F16 v) {
  return fold(
      v, [](auto x, auto y) __attribute__((always_inline)) { return x + y; });
}
CONCLAVE_INLINE float max_lanes(F16 v) {
  return fold(
      v, [](auto x, auto y) __attribute__((always_inline)) { return x > y ? x : y; });
}

CONCLAVE_INLINE F16 widen(H16 h) { return (F16)(__builtin_convertvector(h, U16) << 16); }
CONCLAVE_INLINE F16 load_bf16(const void* p) { return widen(load_as<H16>(p)); }
// Sixteen pairs of BF16: their first and their second values.
CONCLAVE_INLINE F16 load_first(const void* p) { return (F16)(load_as<U16>(p) << 16); }
CONCLAVE_INLINE F16 load_second(const void* p) { return (F16)(load_as<U16>(p) & 0xffff0000u); }
// Round to nearest even, as float_to_bf16.
CONCLAVE_INLINE H16 narrow(F16 f) {
  const U16 u = (U16)f;
  const U16 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U16 quiet = (u >> 16) | 0x40u;
  const U16 nan = (U16)((u & 0x7fffffffu) > 0x7f800000u);
  return __builtin_convertvector((nan & quiet) | (~nan & rounded), H16);
}

// e^x: n = round(x log2 e), r = x - n ln 2 in two parts, a polynomial of degree 6 in r (Taylor's coefficients
// fitted to |r| <= ln2/2), times 2^n. Below -87 the result is 0, above 88.7 it is +inf; NaN stays NaN.
CONCLAVE_INLINE F16 exp(F16 x) {
  const F16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F16 low = splat(-87.0f), high = splat(88.7f);
  F16 c = x < low ? low : x;
  c = c > high ? high : c;
  const F16 shifted = fma(c, splat(1.44269504f), magic);
  const F16 n = shifted - magic;
  F16 r = fma(n, splat(-0.693359375f), c);
  r = fma(n, splat(2.12194440e-4f), r);
  F16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  // n is in [-126, 128]; two factors keep 2^128 finite until the product.
  const I16 bits = (I16)shifted - (I16)magic;
  const I16 half = bits >> 1;
  const F16 f1 = (F16)((half + 127) << 23);
  const F16 f2 = (F16)((bits - half + 127) << 23);
  const F16 value = (p * f1) * f2;
  const F16 zeroed = x < low ? splat(0.0f) : value;
  const F16 full = x > high ? splat(__builtin_inff()) : zeroed;
  return x == x ? full : x;
}

// The sixteen lanes in parts that the processor has registers for. GCC 12 keeps vectors that are longer in
// memory, at a tenth of the speed; loops that matter are written over parts.
#if defined(__AVX2__) && !defined(__AVX512F__)
typedef F8 Part;
typedef I8 PartInt;
CONCLAVE_INLINE F8 fma(F8 a, F8 b, F8 c) { return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
typedef F16 Part;
typedef I16 PartInt;
#endif
constexpr size_t kPartLanes = sizeof(Part) / sizeof(float), kParts = 16 / kPartLanes;

// exp() for x <= 0 (or NaN), the same bits with fewer steps: 2^n is a normal number there. V: a vector of
// floats, I: as many integers.
template <class V, class I>
CONCLAVE_INLINE V exp_down_of(V x) {
  const V magic = V{} + 12582912.0f;
  const V low = V{} - 87.0f;
  const V c = x < low ? low : x;
  const V shifted = fma(c, V{} + 1.44269504f, magic);
  const V n = shifted - magic;
  V r = fma(n, V{} - 0.693359375f, c);
  r = fma(n, V{} + 2.12194440e-4f, r);
  V p = V{} + 1.9875691500e-4f;
  p = fma(p, r, V{} + 1.3981999507e-3f);
  p = fma(p, r, V{} + 8.3334519073e-3f);
  p = fma(p, r, V{} + 4.1665795894e-2f);
  p = fma(p, r, V{} + 1.6666665459e-1f);
  p = fma(p, r, V{} + 5.0000001201e-1f);
  p = fma(p, r * r, r) + 1.0f;
  const V value = p * (V)((((I)shifted - (I)magic) + 127) << 23);
  return x < low ? V{} : value;
}
CONCLAVE_INLINE F16 exp_down(F16 x) { return exp_down_of<F16, I16>(x); }
CONCLAVE_INLINE Part exp_down_part(Part x) { return exp_down_of<Part, PartInt>(x); }

CONCLAVE_INLINE void widen_to_double(double* p, Part v) {
#if defined(__AVX512F__)
  typedef F8 Narrow;
  typedef D8 Wide;
#else
  typedef F4 Narrow;
  typedef D4 Wide;
#endif
  struct Pieces {
    Narrow p[sizeof(Part) / sizeof(Narrow)];
  };
  const Pieces x = __builtin_bit_cast(Pieces, v);
  for (const Narrow& piece : x.p) {
    const Wide wide = __builtin_convertvector(piece, Wide);
    std::memcpy(p, &wide, sizeof wide);
    p += sizeof(Narrow) / sizeof(float);
  }
}

// Writes base + i for each lane i with v[i] in [begin, end), ascending, and returns how many. There must be
// room for sixteen; no v has its top bit set, end neither.
CONCLAVE_INLINE size_t indices_in(PartInt v, uint32_t begin, uint32_t end, uint32_t base, uint32_t* out) {
#if defined(__AVX512F__)
  const __mmask16 in = _mm512_cmplt_epu32_mask((__m512i)(v - static_cast<int32_t>(begin)),
                                               _mm512_set1_epi32(static_cast<int>(end - begin)));
  const U16 index = U16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + base;
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(in, (__m512i)index));
  return static_cast<size_t>(__builtin_popcount(in));
#else
  const PartInt in = (v >= static_cast<int32_t>(begin)) & (v < static_cast<int32_t>(end));
  size_t n = 0;
#if defined(__AVX2__)
  for (auto left = static_cast<uint32_t>(_mm256_movemask_ps((__m256)in)); left != 0; left &= left - 1)
    out[n++] = base + static_cast<uint32_t>(__builtin_ctz(left));
#else
  for (uint32_t i = 0; i < kPartLanes; ++i) {
    out[n] = base + i;
    n -= static_cast<size_t>(in[i]);
  }
#endif
  return n;
#endif
}

}  // namespace
}  // namespace conclave::kernels
