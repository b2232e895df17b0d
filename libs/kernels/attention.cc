#include <algorithm>
#include <cmath>
#include <vector>

#include "libs/base/check.h"
#include "libs/kernels/parallel.h"
#include "libs/model/plan.h"

namespace conclave::kernels {
namespace {

static_assert(kPageKeys == kBlockTokens);

uint32_t padded_dim(uint32_t dim) { return (dim + 15) & ~15u; }
size_t elem_bytes(const KvShape& shape) { return shape.precision == Precision::kBf16 ? 2 : 4; }
size_t k_bytes(const KvShape& shape) {
  return size_t{(shape.head_dim + 1) & ~1u} * kPageKeys * elem_bytes(shape);
}
size_t head_bytes(const KvShape& shape) {
  return k_bytes(shape) + size_t{padded_dim(shape.head_dim)} * kPageKeys * elem_bytes(shape);
}

void put(std::byte* to, float value, Precision precision) {
  if (precision == Precision::kBf16) {
    const Bf16 h = float_to_bf16(value);
    __builtin_memcpy(to, &h, sizeof h);
  } else {
    __builtin_memcpy(to, &value, sizeof value);
  }
}

// Rows of one slice and some kv heads, over the segments [seg_begin, seg_end).
struct Task {
  AttendArgs args;
  uint32_t seg_begin = 0;
  uint32_t seg_end = 0;
  size_t partial = 0;  // offset in floats of the state of seg_begin
};

constexpr uint32_t kFewPositions = 2;  // of a slice

// Kept from call to call by the thread that calls; other threads see its lists.
struct Lists {
  std::vector<Task> tasks, parts;
};

uint32_t segments_of(const AttendArgs& a) { return (a.start + a.row_end - 1) / kSegmentKeys + 1; }

}  // namespace

size_t kv_page_bytes(const KvShape& shape) { return shape.num_kv_heads * head_bytes(shape); }

void kv_store(const KvShape& shape, std::byte* page, uint32_t slot, const float* k, const float* v) {
  CONCLAVE_CHECK(slot < kPageKeys);
  const size_t bytes = elem_bytes(shape);
  const uint32_t dim = shape.head_dim, padded = padded_dim(dim);
  // BF16 lies in pairs (attention_ops.inc): two dimensions of a key, two positions' values.
  const uint32_t pair = shape.precision == Precision::kBf16 ? 2 : 1;
  for (uint32_t h = 0; h < shape.num_kv_heads; ++h, k += dim, v += dim) {
    std::byte* keys = page + h * head_bytes(shape);
    std::byte* values = keys + k_bytes(shape);
    for (uint32_t d = 0; d < dim; ++d)
      put(keys + ((d / pair * kPageKeys + slot) * pair + d % pair) * bytes, k[d], shape.precision);
    for (uint32_t d = 0; d < padded; ++d)
      put(values + ((slot / pair * padded + d) * pair + slot % pair) * bytes, d < dim ? v[d] : 0.0f,
          shape.precision);
  }
}

void paged_attention(const Context& ctx, const KvShape& shape, std::span<const AttentionSlice> slices) {
  CONCLAVE_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0);
  const Table& table = table_of(ctx.isa);
  const uint32_t group = shape.num_heads / shape.num_kv_heads;
  const uint32_t positions = std::max(1u, kMaxAttendRows / group);
  const unsigned threads = thread_count(ctx);
  constexpr uint32_t kTasksPerThread = 4;
  // A few rows read the cache at the pace of memory, which is at its best when all heads of a page are read
  // one after the other. Fewer heads a task where there would be too few tasks.
  uint64_t row_segments = 0;
  bool few_rows = true;
  for (const AttentionSlice& slice : slices) {
    row_segments += (slice.start + slice.count - 1) / kSegmentKeys + 1;
    few_rows = few_rows && slice.count <= kFewPositions;
  }
  uint32_t heads_per_task = 1;
  if (few_rows) {
    heads_per_task = shape.num_kv_heads;
    while (heads_per_task > 1 &&
           row_segments * (shape.num_kv_heads / heads_per_task) < size_t{threads} * kTasksPerThread) {
      heads_per_task = (heads_per_task + 1) / 2;
    }
  }
  thread_local Lists kept;
  std::vector<Task>& tasks = kept.tasks;
  std::vector<Task>& parts = kept.parts;
  tasks.clear();
  parts.clear();
  uint64_t segments = 0, partial_floats = 0;
  const size_t state = size_t{padded_dim(shape.head_dim)} + 16;
  for (const AttentionSlice& slice : slices) {
    for (uint32_t head = 0; head < shape.num_kv_heads; head += heads_per_task) {
      for (uint32_t row = 0; row < slice.count; row += positions) {
        Task task;
        AttendArgs& a = task.args;
        a.num_heads = shape.num_heads;
        a.num_kv_heads = shape.num_kv_heads;
        a.head_dim = shape.head_dim;
        a.elem = shape.precision == Precision::kBf16 ? Elem::kBf16 : Elem::kF32;
        a.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
        a.q = slice.q;
        a.out = slice.out;
        a.start = slice.start;
        a.pages = slice.pages;
        a.kv_head = head;
        a.kv_heads = std::min(heads_per_task, shape.num_kv_heads - head);
        a.row_begin = row;
        a.row_end = std::min(row + positions, slice.count);
        task.seg_end = segments_of(a);
        segments += task.seg_end;
        partial_floats += size_t{task.seg_end} * a.kv_heads * (a.row_end - a.row_begin) * group * state;
        tasks.push_back(task);
      }
    }
  }
  constexpr size_t kMaxPartialFloats = size_t{8} << 20;
  // Few long rows: share out their segments, and merge afterwards in the same order as one thread would.
  if (threads > 1 && tasks.size() < size_t{threads} * kTasksPerThread && segments > tasks.size() &&
      partial_floats <= kMaxPartialFloats) {
    const auto each =
        static_cast<uint32_t>(std::max<uint64_t>(1, segments / (uint64_t{threads} * kTasksPerThread)));
    size_t offset = 0;
    for (Task& task : tasks) {
      task.partial = offset;
      const size_t per_segment =
          size_t{task.args.kv_heads} * (task.args.row_end - task.args.row_begin) * group * state;
      for (uint32_t begin = 0; begin < task.seg_end; begin += each) {
        Task part = task;
        part.seg_begin = begin;
        part.seg_end = std::min(begin + each, task.seg_end);
        part.partial = offset + begin * per_segment;
        parts.push_back(part);
      }
      offset += task.seg_end * per_segment;
    }
    auto* partials = static_cast<float*>(thread_scratch(Scratch::kPartials, offset * sizeof(float)));
    run_tasks(ctx, static_cast<uint32_t>(parts.size()), [&](uint32_t i) {
      const Task& part = parts[i];
      table.attend(part.args, part.seg_begin, part.seg_end, partials + part.partial);
    });
    Context here = ctx;
    here.pool = nullptr;
    run_tasks(here, static_cast<uint32_t>(tasks.size()), [&](uint32_t i) {
      table.attend_merge(tasks[i].args, partials + tasks[i].partial, tasks[i].seg_end);
    });
    return;
  }
  run_tasks(ctx, static_cast<uint32_t>(tasks.size()),
            [&](uint32_t i) { table.attend(tasks[i].args, 0, tasks[i].seg_end, nullptr); });
}

}  // namespace conclave::kernels
