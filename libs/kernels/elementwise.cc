#include <atomic>
#include <cmath>

#include "libs/base/check.h"
#include "libs/kernels/parallel.h"

namespace conclave::kernels {
namespace {

constexpr uint32_t kRowsPerTask = 16;

// Tasks of some rows each; small jobs are not worth waking the pool for.
template <class Body>
void for_rows(const Context& ctx, uint32_t m, size_t row_elements, const Body& body) {
  constexpr size_t kWorthElements = size_t{1} << 16;
  Context here = ctx;
  if (m * row_elements < kWorthElements) here.pool = nullptr;
  run_tasks(here, (m + kRowsPerTask - 1) / kRowsPerTask, [&](uint32_t task) {
    const uint32_t end = (task + 1) * kRowsPerTask < m ? (task + 1) * kRowsPerTask : m;
    for (uint32_t row = task * kRowsPerTask; row < end; ++row) body(row);
  });
}

}  // namespace

void rms_norm(const Context& ctx, const float* x, const float* w, float eps, uint32_t m, uint32_t n,
              float* out) {
  const Table& table = table_of(ctx.isa);
  for_rows(ctx, m, n,
           [&](uint32_t row) { table.rms_norm(x + size_t{row} * n, w, eps, n, out + size_t{row} * n); });
}

void to_bf16(const Context& ctx, const float* x, size_t count, Bf16* out) {
  const FlushScope flush;
  table_of(ctx.isa).round_bf16(x, count, out);
}

void bf16_to_f32(const Context& ctx, const Bf16* x, size_t count, float* out) {
  const FlushScope flush;
  table_of(ctx.isa).widen_bf16(x, count, out);
}

void embed(const Context& ctx, const WeightView& embedding, std::span<const TokenId> tokens, float* out) {
  const Table& table = table_of(ctx.isa);
  const size_t n = embedding.cols;
  const FlushScope flush;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const size_t token = tokens[i];
    CONCLAVE_CHECK(token < embedding.rows);
    float* to = out + i * n;
    const auto* data = static_cast<const std::byte*>(embedding.data);
    switch (embedding.dtype) {
      case WeightDtype::kF32:
        __builtin_memcpy(to, data + token * n * sizeof(float), n * sizeof(float));
        break;
      case WeightDtype::kBf16:
        table.widen_bf16(reinterpret_cast<const uint16_t*>(data + token * n * sizeof(Bf16)), n, to);
        break;
      case WeightDtype::kFp8E4m3: {
        const float* scales = embedding.scales + token / kBlockK * embedding.scale_cols;
        const auto* row = reinterpret_cast<const uint8_t*>(data) + token * n;
        for (size_t k = 0; k < n; ++k) to[k] = e4m3_to_float(row[k]) * scales[k / kBlockK];
        break;
      }
    }
  }
}

Rope::Rope(uint32_t head_dim, uint32_t rotary_dim, double theta)
    : head_dim_(head_dim), rotary_dim_(rotary_dim) {
  CONCLAVE_CHECK(rotary_dim % 2 == 0 && rotary_dim <= head_dim);
  static std::atomic<uint64_t> next_id{1};
  id_ = next_id.fetch_add(1, std::memory_order_relaxed);
  for (uint32_t i = 0; i < rotary_dim / 2; ++i)
    inv_freq_.push_back(static_cast<float>(std::pow(theta, -2.0 * i / rotary_dim)));
}

namespace {

// cos and sin of positions, kept per thread: every layer asks for the same few.
class AngleCache {
 public:
  // Cosines, then sines, half as many as the rotary dimension each.
  const float* of(uint64_t rope, uint32_t position, const std::vector<float>& inv_freq) {
    const size_t half = inv_freq.size();
    if (half != half_) {
      half_ = half;
      entries_.assign(kKept, {});
      values_.resize(kKept * 2 * half);
    }
    Entry& entry = entries_[position % kKept];
    float* cosines = values_.data() + position % kKept * 2 * half;
    if (entry.rope == rope && entry.position == position) return cosines;
    for (size_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * inv_freq[i];
      cosines[i] = static_cast<float>(std::cos(static_cast<double>(angle)));
      cosines[half + i] = static_cast<float>(std::sin(static_cast<double>(angle)));
    }
    entry = {rope, position};
    return cosines;
  }

 private:
  static constexpr size_t kKept = 512;  // positions
  struct Entry {
    uint64_t rope = 0;
    uint32_t position = 0;
  };
  size_t half_ = 0;
  std::vector<Entry> entries_;
  std::vector<float> values_;
};

}  // namespace

void Rope::apply(const Context& ctx, float* x, uint32_t m, uint32_t heads, const uint32_t* positions) const {
  const Table& table = table_of(ctx.isa);
  const uint32_t half = rotary_dim_ / 2;
  if (half == 0) return;
  for_rows(ctx, m, size_t{heads} * head_dim_, [&](uint32_t row) {
    thread_local AngleCache cache;
    const float* cosines = cache.of(id_, positions[row], inv_freq_);
    float* head = x + size_t{row} * heads * head_dim_;
    for (uint32_t h = 0; h < heads; ++h, head += head_dim_)
      table.rotate(head, head + half, cosines, cosines + half, half);
  });
}

void combine_slots(Precision precision, const std::byte* const* rows, const float* weights, uint32_t slots,
                   uint32_t n, float* out) {
  static const Table& table = table_of(best_isa());
  const FlushScope flush;
  table.combine(precision == Precision::kBf16 ? Elem::kBf16 : Elem::kF32, rows, weights, slots, n, out);
}

}  // namespace conclave::kernels
