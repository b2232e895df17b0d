// The operations of the model on CPU. Every one obeys the contract in docs/numerics.md: a result is a
// function of its own row's inputs alone, equal in every bit for every batch size, thread count and
// instruction set that shares a numerics id. Plain references in double: libs/kernels/ref/. Conformance
// suite: tests/conformance.
//
// Shapes are row-major; m counts rows (tokens). Callers own all memory; nothing here allocates beyond
// per-thread scratch that is kept. Preconditions are CHECKed (our own bugs), input was validated before it
// came here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "libs/base/float_bits.h"
#include "libs/base/thread_pool.h"
#include "libs/model/numerics.h"
#include "libs/model/request.h"
#include "libs/model/weights.h"

namespace conclave::kernels {

enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kAvx512Bf16 };

// The instruction sets this CPU has, best last, each having passed self_check().
std::vector<Isa> available_isas();
// The last of them. Every process asks when it starts: no more is checked than what it uses.
Isa best_isa();
// That one, or what CONCLAVE_ISA names (scalar, avx2, avx512, avx512bf16).
StatusOr<Isa> choose_isa();
std::string_view isa_name(Isa isa);
// Compares an instruction set's kernels with the scalar contract on a small fixed set that includes
// subnormals.
Status self_check(Isa isa);

// Whether kAvx512Bf16 multiplies by the BF16 dot product or by plain fused multiply-adds: the same bits, and
// which is faster depends on the CPU. kMeasured times both once.
enum class DotProduct : uint8_t { kMeasured, kAlways, kNever };

struct Context {
  Isa isa = Isa::kScalar;
  ThreadPool* pool = nullptr;  // not owned; null: the caller's thread only
  DotProduct dot = DotProduct::kMeasured;
};

// --- matmul
// -------------------------------------------------------------------------------------------------------
// y[i][o] = sum_k x[i][k] * W[o][k] for i < m. x: Bf16 rows (kBf16) or float rows (kF32), x_stride elements
// apart; y: float rows, y_stride apart. Any cols, any rows, any m >= 0.
void matmul(const Context& ctx, const WeightView& w, Precision precision, const void* x, size_t x_stride,
            uint32_t m, float* y, size_t y_stride);

// --- element-wise
// ------------------------------------------------------------------------------------------------- out[i] =
// x[i] * (1/sqrt(mean(x[i]^2) + eps)) * w, per row of n; out may be x.
void rms_norm(const Context& ctx, const float* x, const float* w, float eps, uint32_t m, uint32_t n,
              float* out);
// out[i] = x rounded to nearest even.
void to_bf16(const Context& ctx, const float* x, size_t count, Bf16* out);
void bf16_to_f32(const Context& ctx, const Bf16* x, size_t count, float* out);
// Writes row `token` of the embedding, widened (FP8: scaled), for each token.
void embed(const Context& ctx, const WeightView& embedding, std::span<const TokenId> tokens, float* out);

// Rotates the first rotary_dim dimensions of each head in place, pairs (i, i + rotary_dim/2) ("neox"); angle
// = float(position) * float(inv_freq_i) in binary32, inv_freq_i = theta^(-2i/rotary_dim).
class Rope {
 public:
  Rope(uint32_t head_dim, uint32_t rotary_dim, double theta);
  // x: m rows of heads * head_dim floats; positions: m.
  void apply(const Context& ctx, float* x, uint32_t m, uint32_t heads, const uint32_t* positions) const;

 private:
  uint32_t head_dim_;
  uint32_t rotary_dim_;
  std::vector<float> inv_freq_;
  uint64_t id_ = 0;  // keys each thread's cache of angles
};

// --- attention
// ---------------------------------------------------------------------------------------------------- One
// layer's KV cache is an array of pages of kBlockTokens (16) positions. The layout within a page is this
// library's own business (docs/numerics.md); others move pages only whole.
struct KvShape {
  uint32_t num_heads = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  Precision precision = Precision::kBf16;
};
size_t kv_page_bytes(const KvShape& shape);
// Stores one position's k and v (num_kv_heads * head_dim floats each, rounded to the cache's dtype) in slot
// 0..15.
void kv_store(const KvShape& shape, std::byte* page, uint32_t slot, const float* k, const float* v);

// Consecutive positions [start, start+count) of one sequence. Their own keys and values are already stored.
struct AttentionSlice {
  const float* q = nullptr;  // count rows of num_heads * head_dim, after norm and rope
  float* out = nullptr;      // count rows of num_heads * head_dim
  uint32_t start = 0;
  uint32_t count = 0;
  const std::byte* const* pages = nullptr;  // page p holds positions 16p .. 16p+15
};
// Causal softmax attention, scale head_dim^-0.5, query head h reads kv head h / (num_heads / num_kv_heads).
// Runs over KV segments at fixed absolute positions, so chunking and threads change nothing.
void paged_attention(const Context& ctx, const KvShape& shape, std::span<const AttentionSlice> slices);

// --- experts
// ------------------------------------------------------------------------------------------------------ The
// expert gate: scores = sigmoid(logits), choice = scores + bias, the top_k by choice (ties to the lower id),
// in descending order of choice; weights = scores of the chosen (without the bias) over their sum. logits: m
// x experts. bias may be null. ids, weights: m x top_k.
void route(const Context& ctx, const float* logits, const float* bias, uint32_t m, uint32_t experts,
           uint32_t top_k, uint16_t* ids, float* weights);

// out = W2 ( silu(W1 x) * (W3 x) ) for each row of one expert. In and out rows are Bf16 (kBf16) or float
// (kF32), given by pointer so that rows of many messages form one batch; the inner product is rounded as the
// precision says.
struct ExpertJob {
  const ExpertWeights* weights = nullptr;
  const std::byte* const* in = nullptr;
  std::byte* const* out = nullptr;
  uint32_t m = 0;
};
void run_experts(const Context& ctx, Precision precision, std::span<const ExpertJob> jobs);

// out[0..n) += sum over slots, in slot order, of weights[s] * rows[s]: acc = 0; acc = fma(w_s, row_s, acc);
// out + acc.
void combine_slots(Precision precision, const std::byte* const* rows, const float* weights, uint32_t slots,
                   uint32_t n, float* out);

// --- sampling
// -----------------------------------------------------------------------------------------------------
// A token that occurs in a sequence.
struct SeenToken {
  TokenId token = 0;
  uint32_t output_count = 0;  // times it was generated; 0: it is only in the prompt
};
// What decides a draw beside logits and parameters.
struct SampleState {
  std::span<const SeenToken> seen;     // each token once; read only when the parameters have penalties
  std::span<const TokenId> forbidden;  // beside those with a bias of -infinity
};
struct Sampled {
  TokenId token = 0;
  float logprob = 0;              // of the distribution before anything below
  std::vector<TokenLogprob> top;  // top_logprobs of them, of the same
};
// vocab_limit cuts ids off first. Then forbidden tokens, logit_bias, repetition, frequency and presence
// penalties (docs/numerics.md). temperature 0: the largest logit, ties to the lower id. Otherwise
// temperature, then top_k, top_p, min_p, then one draw u in [0,1) over what is left in descending order (ties
// to the lower id). A row with no finite logit is an error of the model: INTERNAL. FAILED_PRECONDITION when
// every token is forbidden. The logits are changed and changed back.
StatusOr<Sampled> sample(const Context& ctx, std::span<float> logits, const SamplingParams& params, float u,
                         const SampleState& state = {});

// Several rows, side by side on the pool's threads; each as sample() would alone.
struct SampleRow {
  std::span<float> logits;
  const SamplingParams* params = nullptr;  // borrowed
  float u = 0;
  SampleState state;
  StatusOr<Sampled> result = Sampled();  // out
};
void sample_rows(const Context& ctx, std::span<SampleRow> rows);

// The log-probability of one token, below vocab_limit or not (then -infinity), its rank among those
// below vocab_limit (from 1, ties to the lower id; 0 for one that is not), and the `top` most likely.
// Same numbers as sample's. INTERNAL for a row with no finite logit.
StatusOr<PromptLogprob> token_logprob(const Context& ctx, std::span<const float> logits, uint32_t vocab_limit,
                                      TokenId token, uint32_t top);

}  // namespace conclave::kernels
