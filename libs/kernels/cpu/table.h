// What each instruction set provides, as plain functions over plain data. The translation units behind it are
// compiled with their own -m flags, so this header and what they include must define no inline function with
// linkage: the linker could keep the wrong instruction set's copy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace conclave::kernels {

// Element formats as the kernels see them; the values are those of WeightDtype.
enum class Elem : uint8_t { kF32 = 0, kBf16 = 1, kE4m3 = 2 };

// One matmul. `x` holds Bf16 or float rows as `x_elem` says; K groups and blocks: docs/numerics.md.
struct MatmulArgs {
  const void* w = nullptr;
  Elem w_elem = Elem::kF32;
  uint32_t rows = 0;
  uint32_t cols = 0;
  const float* scales = nullptr;  // kE4m3 only
  uint32_t scale_cols = 0;
  const void* x = nullptr;
  Elem x_elem = Elem::kF32;
  size_t x_stride = 0;                       // elements
  const std::byte* const* x_rows = nullptr;  // when set, each token's row by itself; for prepare_x alone
  uint32_t m = 0;
  float* y = nullptr;
  size_t y_stride = 0;                // elements
  uint32_t y_origin = 0;              // y[i * y_stride + (row - y_origin)] is row's result for token i
  bool dot = false;                   // multiply by the BF16 dot product where that applies; changes no bit
  const float* x_prepared = nullptr;  // what prepare_x wrote, or null when prepared_floats said 0
};

// Rows [row_begin, row_end) of one slice, all query heads of `kv_heads` kv heads.
struct AttendArgs {
  uint32_t num_heads = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  Elem elem = Elem::kF32;  // of the cache: kBf16 or kF32
  float scale = 0;
  const float* q = nullptr;  // the slice's rows
  float* out = nullptr;
  uint32_t start = 0;  // position of the slice's row 0
  const std::byte* const* pages = nullptr;
  uint32_t kv_head = 0;  // the first
  uint32_t kv_heads = 1;
  uint32_t row_begin = 0;
  uint32_t row_end = 0;
};

struct Table {
  // y[.][row_begin..row_end) of one matmul. row_begin is a multiple of four.
  void (*matmul_rows)(const MatmulArgs& args, uint32_t row_begin, uint32_t row_end);
  // Floats of scratch in which x is laid out once for all row blocks of a matmul; 0 when x is used as it is.
  size_t (*prepared_floats)(const MatmulArgs& args);
  // Lays out x rows [begin, end).
  void (*prepare_x)(const MatmulArgs& args, float* out, uint32_t begin, uint32_t end);

  void (*rms_norm)(const float* x, const float* w, float eps, uint32_t n, float* out);
  void (*round_bf16)(const float* x, size_t count, uint16_t* out);
  void (*widen_bf16)(const uint16_t* x, size_t count, float* out);
  // out = silu(gate) * up.
  void (*silu_mul)(const float* gate, const float* up, size_t count, float* out);
  void (*sigmoid)(const float* x, size_t count, float* out);
  // x1, x2: the two halves of a head's rotated part.
  void (*rotate)(float* x1, float* x2, const float* cosines, const float* sines, uint32_t half);
  // acc = 0, acc = fma(w, row, acc) in slot order, out += acc.
  void (*combine)(Elem elem, const std::byte* const* rows, const float* weights, uint32_t slots, uint32_t n,
                  float* out);
  // The largest x, NaN aside; sum over i of exp((x[i] - max) * inv_temperature), NaN when an x is NaN. No x
  // is above max.
  float (*max_of)(const float* x, size_t count);
  float (*exp_sum)(const float* x, size_t count, float max, float inv_temperature);
  // out[i] = exp((x[i] - max) * inv_temperature).
  void (*exp_of)(const float* x, size_t count, float max, float inv_temperature, float* out);
  // The same sum as exp_sum; adds each term also to the sum of its bin: those of even i to even[bin], the
  // others to odd[bin], so that equal bins side by side do not wait for each other. Both have kWeightSlots
  // elements, zero before.
  float (*exp_bins)(const float* x, size_t count, float max, float inv_temperature, double* even,
                    double* odd);
  // The i, ascending, whose distance (max - x[i]) * inv_temperature has bits in [begin, end), end at most
  // those of infinity; returns how many. `ids` has room for count + 16.
  size_t (*collect)(const float* x, size_t count, float max, float inv_temperature, uint32_t begin,
                    uint32_t end, uint32_t* ids);

  // Attention over segments [seg_begin, seg_end). `partial` null: all of the rows' segments, writes out.
  // Otherwise the state of each (segment, kv head, row) goes to partial, (head_dim rounded up to 16) + 16
  // floats each.
  void (*attend)(const AttendArgs& args, uint32_t seg_begin, uint32_t seg_end, float* partial);
  // Merges `segments` states per row in ascending order and writes out.
  void (*attend_merge)(const AttendArgs& args, const float* partial, uint32_t segments);
};

inline constexpr uint32_t kRowBlock = 64;       // output rows a matmul task of few tokens computes
inline constexpr uint32_t kPanelRows = 96;      // output rows a matmul task of many computes a multiple of
inline constexpr uint32_t kBlockK = 128;        // k's per accumulation block, equal to a scale block
inline constexpr uint32_t kSegmentKeys = 512;   // attention segment
inline constexpr uint32_t kSubBlockKeys = 64;   // attention sub-block
inline constexpr uint32_t kPageKeys = 16;       // == kBlockTokens
inline constexpr uint32_t kMaxAttendRows = 64;  // (position, head) pairs a task aims at

// Bins of distances by the upper bits of the float: 64 to an octave from 2^-20 (bin 0 has all that is nearer)
// to 2^7, beyond which every weight is 0. Weights of 0 go to one of sixteen more slots, which nobody reads:
// at a low temperature they are most, and would all wait for one bin.
inline constexpr uint32_t kWeightBinShift = 17;
inline constexpr uint32_t kFirstWeightBin = (127 - 20) << 6;
inline constexpr uint32_t kWeightBins = ((127 + 7) << 6) - kFirstWeightBin + 1;
inline constexpr uint32_t kWeightSlots = kWeightBins + 16;

const Table& scalar_table();
const Table& avx2_table();
const Table& avx512_table();
const Table& avx512bf16_table();
// Whether the dot product beats two fused multiply-adds on this CPU: twice as fast on some, half as fast on
// others.
bool avx512bf16_dot_is_faster();

// Memory of the calling thread, 64-byte aligned, kept until the thread ends; contents undefined. Each slot is
// separate and stays valid until the same slot is asked for again.
enum class Scratch : uint32_t {
  kPanel,
  kTotals,
  kAttention,
  kPrepared,
  kRows,
  kPartials,
  kExperts,
  kWeights,
  kOrder,
  kCount
};
void* thread_scratch(Scratch slot, size_t bytes);

}  // namespace conclave::kernels
