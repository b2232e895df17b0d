#include "libs/base/check.h"
#include "libs/kernels/parallel.h"

namespace conclave::kernels {

namespace {

bool use_dot(const Context& ctx) {
  if (ctx.isa != Isa::kAvx512Bf16 || ctx.dot == DotProduct::kNever) return false;
  if (ctx.dot == DotProduct::kAlways) return true;
  static const bool faster = avx512bf16_dot_is_faster();
  return faster;
}

}  // namespace

MatmulArgs matmul_args(const Context& ctx, const WeightView& w, Elem x_elem, const void* x, size_t x_stride,
                       uint32_t m, float* y, size_t y_stride) {
  static_assert(static_cast<int>(WeightDtype::kF32) == static_cast<int>(Elem::kF32));
  static_assert(static_cast<int>(WeightDtype::kBf16) == static_cast<int>(Elem::kBf16));
  static_assert(static_cast<int>(WeightDtype::kFp8E4m3) == static_cast<int>(Elem::kE4m3));
  MatmulArgs a;
  a.w = w.data;
  a.w_elem = static_cast<Elem>(w.dtype);
  a.rows = w.rows;
  a.cols = w.cols;
  a.scales = w.scales;
  a.scale_cols = w.scale_cols;
  a.x = x;
  a.x_elem = x_elem;
  a.x_stride = x_stride;
  a.m = m;
  a.y = y;
  a.y_stride = y_stride;
  a.dot = use_dot(ctx);
  CONCLAVE_CHECK(a.w_elem != Elem::kE4m3 ||
                 (a.scales != nullptr && a.scale_cols >= (a.cols + kBlockK - 1) / kBlockK));
  return a;
}

void matmul(const Context& ctx, const WeightView& w, Precision precision, const void* x, size_t x_stride,
            uint32_t m, float* y, size_t y_stride) {
  if (m == 0 || w.rows == 0) return;
  const Table& table = table_of(ctx.isa);
  MatmulArgs args = matmul_args(ctx, w, precision == Precision::kBf16 ? Elem::kBf16 : Elem::kF32, x, x_stride,
                                m, y, y_stride);
  if (const size_t floats = table.prepared_floats(args); floats > 0) {
    auto* prepared = static_cast<float*>(thread_scratch(Scratch::kPrepared, floats * sizeof(float)));
    constexpr uint32_t kTokens = 16;
    run_tasks(ctx, (m + kTokens - 1) / kTokens, [&](uint32_t i) {
      const uint32_t begin = i * kTokens;
      table.prepare_x(args, prepared, begin, begin + kTokens < m ? begin + kTokens : m);
    });
    args.x_prepared = prepared;
  }
  const uint32_t block = rows_per_task(ctx, w.rows, m);
  run_tasks(ctx, (w.rows + block - 1) / block, [&](uint32_t i) {
    const uint32_t begin = i * block;
    table.matmul_rows(args, begin, begin + block < w.rows ? begin + block : w.rows);
  });
}

}  // namespace conclave::kernels
