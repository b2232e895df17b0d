// How every operation runs its tasks: over the pool, with the floating-point environment of the contract.
#pragma once

#include <xmmintrin.h>

#include <cstdint>

#include "libs/kernels/cpu/table.h"
#include "libs/kernels/ops.h"

namespace conclave::kernels {

// Denormals are zero, as operands and as results, while this lives: the BF16 dot product instruction does so
// whatever MXCSR says, and all instruction sets must agree.
class FlushScope {
 public:
  FlushScope() : saved_(_mm_getcsr()) { _mm_setcsr((saved_ & ~0x6000u) | 0x8040u); }
  ~FlushScope() { _mm_setcsr(saved_); }
  FlushScope(const FlushScope&) = delete;
  FlushScope& operator=(const FlushScope&) = delete;

 private:
  unsigned saved_;
};

const Table& table_of(Isa isa);

template <class Body>
void run_tasks(const Context& ctx, uint32_t count, const Body& body) {
  if (ctx.pool == nullptr || count < 2) {
    const FlushScope flush;
    for (uint32_t i = 0; i < count; ++i) body(i);
    return;
  }
  ctx.pool->parallel_for(count, [&body](uint32_t i) {
    const FlushScope flush;
    body(i);
  });
}

inline unsigned thread_count(const Context& ctx) { return ctx.pool == nullptr ? 1 : ctx.pool->threads(); }

// Output rows a task of a matmul computes: of kPanelRows or, for a few tokens, a multiple of kRowBlock. Those
// are bound by memory: longer runs of addresses there, so that fetching ahead pays, but enough tasks that a
// thread that wakes late finds some.
inline uint32_t rows_per_task(const Context& ctx, uint32_t rows, uint32_t m) {
  if (m > 4) return kPanelRows;
  const uint32_t tasks = thread_count(ctx) < 2 ? 1 : thread_count(ctx) * 6;
  const uint32_t each = (rows + tasks - 1) / tasks;
  return (each + kRowBlock - 1) / kRowBlock * kRowBlock;
}

// The parts of a matmul, for callers that have several to run in one go.
MatmulArgs matmul_args(const Context& ctx, const WeightView& w, Elem x_elem, const void* x, size_t x_stride,
                       uint32_t m, float* y, size_t y_stride);

}  // namespace conclave::kernels
