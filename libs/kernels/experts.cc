#include <algorithm>
#include <limits>
#include <vector>

#include "libs/base/check.h"
#include "libs/kernels/parallel.h"

namespace conclave::kernels {

void route(const Context& ctx, const float* logits, const float* bias, uint32_t m, uint32_t experts,
           uint32_t top_k, uint16_t* ids, float* weights) {
  CONCLAVE_CHECK(top_k >= 1 && top_k <= experts && experts <= 65535);
  const Table& table = table_of(ctx.isa);
  const FlushScope flush;
  thread_local std::vector<float> scores, best;
  scores.resize(experts);
  best.resize(top_k);
  for (uint32_t row = 0; row < m; ++row, logits += experts, ids += top_k, weights += top_k) {
    table.sigmoid(logits, experts, scores.data());
    uint32_t filled = 0;
    for (uint32_t e = 0; e < experts; ++e) {
      float choice = bias == nullptr ? scores[e] : scores[e] + bias[e];
      if (choice != choice)
        choice = -std::numeric_limits<float>::infinity();  // a NaN still needs k distinct experts
      if (filled == top_k && !(choice > best[top_k - 1])) continue;
      uint32_t at = filled < top_k ? filled++ : top_k - 1;
      for (; at > 0 && choice > best[at - 1]; --at) {
        best[at] = best[at - 1];
        ids[at] = ids[at - 1];
      }
      best[at] = choice;
      ids[at] = static_cast<uint16_t>(e);
    }
    float sum = 0;
    for (uint32_t s = 0; s < top_k; ++s) sum = sum + scores[ids[s]];
    for (uint32_t s = 0; s < top_k; ++s) weights[s] = scores[ids[s]] / sum;
  }
}

namespace {

// One job while it runs: where its rows lie in the shared scratch.
struct Running {
  const ExpertJob* job = nullptr;
  MatmulArgs gate, up, down;
  std::byte* rows = nullptr;   // gathered inputs, where the kernels take them as they are
  std::byte* inner = nullptr;  // silu(gate) * up, rounded
  float* prepared_rows = nullptr;
  float* prepared_inner = nullptr;
};

struct BlockTask {
  uint32_t job = 0;
  uint32_t begin = 0;
  uint32_t end = 0;
};

constexpr uint32_t kTokensPerTask = 8;

// The lists of one group, kept from call to call by the thread that calls: a group is part of every layer.
struct Lists {
  std::vector<Running> running;
  std::vector<BlockTask> by_tokens, inner, down;
};

// Cuts [0, extent) of each job into blocks.
template <class Extent, class Block>
void split(const std::vector<Running>& running, const Extent& extent, const Block& block_of,
           std::vector<BlockTask>& tasks) {
  tasks.clear();
  for (uint32_t j = 0; j < running.size(); ++j) {
    const uint32_t n = extent(running[j]), block = block_of(running[j]);
    for (uint32_t begin = 0; begin < n; begin += block)
      tasks.push_back({j, begin, std::min(begin + block, n)});
  }
}

size_t aligned(size_t bytes) { return (bytes + 63) & ~size_t{63}; }

void run_group(const Context& ctx, Precision precision, std::span<const ExpertJob> jobs) {
  const Table& table = table_of(ctx.isa);
  const Elem elem = precision == Precision::kBf16 ? Elem::kBf16 : Elem::kF32;
  const size_t bytes = precision == Precision::kBf16 ? 2 : 4;
  thread_local Lists kept;
  // Other threads see this thread's lists.
  std::vector<Running>& running = kept.running;
  std::vector<BlockTask>& by_tokens = kept.by_tokens;
  std::vector<BlockTask>& inner_tasks = kept.inner;
  std::vector<BlockTask>& down_tasks = kept.down;
  running.clear();
  size_t total = 0;
  for (const ExpertJob& job : jobs) {
    if (job.m == 0) continue;
    const ExpertWeights& w = *job.weights;
    CONCLAVE_CHECK(w.w1.cols == w.w3.cols && w.w1.rows == w.w3.rows && w.w2.cols == w.w1.rows &&
                   w.w2.rows == w.w1.cols);
    Running r;
    r.job = &job;
    r.gate = matmul_args(ctx, w.w1, elem, nullptr, w.w1.cols, job.m, nullptr, 0);
    r.up = matmul_args(ctx, w.w3, elem, nullptr, w.w3.cols, job.m, nullptr, 0);
    r.down = matmul_args(ctx, w.w2, elem, nullptr, w.w2.cols, job.m, nullptr, 0);
    r.gate.x_rows = r.up.x_rows = job.in;
    const size_t prepared = table.prepared_floats(r.gate);
    total += prepared > 0 ? aligned(prepared * 4) : aligned(size_t{job.m} * w.w1.cols * bytes);
    total += aligned(size_t{job.m} * w.w2.cols * bytes) + aligned(table.prepared_floats(r.down) * 4);
    running.push_back(r);
  }
  auto* scratch = static_cast<std::byte*>(thread_scratch(Scratch::kExperts, total));
  for (Running& r : running) {
    const auto take = [&scratch](size_t n) {
      std::byte* at = scratch;
      scratch += aligned(n);
      return at;
    };
    if (const size_t n = table.prepared_floats(r.gate))
      r.prepared_rows = reinterpret_cast<float*>(take(n * 4));
    else
      r.rows = take(size_t{r.job->m} * r.gate.cols * bytes);
    r.inner = take(size_t{r.job->m} * r.down.cols * bytes);
    if (const size_t n = table.prepared_floats(r.down))
      r.prepared_inner = reinterpret_cast<float*>(take(n * 4));
    r.gate.x = r.up.x = r.rows;
    r.down.x = r.inner;
    r.gate.x_prepared = r.up.x_prepared = r.prepared_rows;
    r.down.x_prepared = r.prepared_inner;
  }

  split(
      running, [](const Running& r) { return r.job->m; }, [](const Running&) { return kTokensPerTask; },
      by_tokens);
  // Gathering a few rows is not worth waking anybody.
  Context here = ctx;
  if (by_tokens.size() < 4) here.pool = nullptr;
  run_tasks(here, static_cast<uint32_t>(by_tokens.size()), [&](uint32_t i) {
    const BlockTask& t = by_tokens[i];
    const Running& r = running[t.job];
    if (r.prepared_rows != nullptr) return table.prepare_x(r.gate, r.prepared_rows, t.begin, t.end);
    const size_t row_bytes = r.gate.cols * bytes;
    for (uint32_t row = t.begin; row < t.end; ++row)
      __builtin_memcpy(r.rows + row * row_bytes, r.job->in[row], row_bytes);
  });

  split(
      running, [](const Running& r) { return r.gate.rows; },
      [&](const Running& r) { return rows_per_task(ctx, r.gate.rows, r.job->m); }, inner_tasks);
  run_tasks(ctx, static_cast<uint32_t>(inner_tasks.size()), [&](uint32_t i) {
    const BlockTask& t = inner_tasks[i];
    const Running& r = running[t.job];
    const uint32_t n = t.end - t.begin;
    const size_t floats = size_t{r.job->m} * n;
    auto* gate_out = static_cast<float*>(thread_scratch(Scratch::kRows, 2 * floats * sizeof(float)));
    float* up_out = gate_out + floats;
    MatmulArgs gate = r.gate, up = r.up;
    gate.y = gate_out;
    up.y = up_out;
    gate.y_stride = up.y_stride = n;
    gate.y_origin = up.y_origin = t.begin;
    table.matmul_rows(gate, t.begin, t.end);
    table.matmul_rows(up, t.begin, t.end);
    table.silu_mul(gate_out, up_out, floats, gate_out);
    for (uint32_t row = 0; row < r.job->m; ++row) {
      const float* g = gate_out + size_t{row} * n;
      std::byte* to = r.inner + (size_t{row} * r.down.cols + t.begin) * bytes;
      if (precision == Precision::kBf16)
        table.round_bf16(g, n, reinterpret_cast<uint16_t*>(to));
      else
        __builtin_memcpy(to, g, n * sizeof(float));
    }
  });

  if (std::any_of(running.begin(), running.end(),
                  [](const Running& r) { return r.prepared_inner != nullptr; })) {
    run_tasks(ctx, static_cast<uint32_t>(by_tokens.size()), [&](uint32_t i) {
      const BlockTask& t = by_tokens[i];
      const Running& r = running[t.job];
      if (r.prepared_inner != nullptr) table.prepare_x(r.down, r.prepared_inner, t.begin, t.end);
    });
  }

  split(
      running, [](const Running& r) { return r.down.rows; },
      [&](const Running& r) { return rows_per_task(ctx, r.down.rows, r.job->m); }, down_tasks);
  run_tasks(ctx, static_cast<uint32_t>(down_tasks.size()), [&](uint32_t i) {
    const BlockTask& t = down_tasks[i];
    const Running& r = running[t.job];
    const uint32_t n = t.end - t.begin;
    auto* out = static_cast<float*>(thread_scratch(Scratch::kRows, size_t{r.job->m} * n * sizeof(float)));
    MatmulArgs down = r.down;
    down.y = out;
    down.y_stride = n;
    down.y_origin = t.begin;
    table.matmul_rows(down, t.begin, t.end);
    for (uint32_t row = 0; row < r.job->m; ++row) {
      std::byte* to = r.job->out[row] + t.begin * bytes;
      if (precision == Precision::kBf16)
        table.round_bf16(out + size_t{row} * n, n, reinterpret_cast<uint16_t*>(to));
      else
        __builtin_memcpy(to, out + size_t{row} * n, n * sizeof(float));
    }
  });
}

}  // namespace

void run_experts(const Context& ctx, Precision precision, std::span<const ExpertJob> jobs) {
  // Groups bound the scratch: rows of a group are at most this many unless one job alone has more.
  constexpr uint64_t kGroupRows = 2048;
  size_t begin = 0;
  while (begin < jobs.size()) {
    size_t end = begin;
    uint64_t rows = 0;
    while (end < jobs.size() && (end == begin || rows + jobs[end].m <= kGroupRows)) rows += jobs[end++].m;
    if (rows > 0) run_group(ctx, precision, jobs.subspan(begin, end - begin));
    begin = end;
  }
}

}  // namespace conclave::kernels
