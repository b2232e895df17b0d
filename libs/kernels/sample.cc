#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "libs/base/check.h"
#include "libs/kernels/parallel.h"

namespace conclave::kernels {
namespace {

// Orders by descending logit, then ascending id, as one integer; +0 and -0 are one logit.
uint64_t key_of(float logit, uint32_t id) {
  const uint32_t u = std::bit_cast<uint32_t>(logit + 0.0f);
  const uint32_t ascending = (u & 0x80000000u) ? ~u : u | 0x80000000u;
  return (static_cast<uint64_t>(~ascending) << 32) | id;
}
uint32_t id_of(uint64_t key) { return static_cast<uint32_t>(key); }

// The logits in descending order, sorted only as far as anybody looks. -inf is left out: it cannot be drawn.
class Descending {
 public:
  Descending(const Table& table, std::span<const float> logits) : table_(table), logits_(logits) {}

  // Makes at least `count` (or all) sorted and returns how many are.
  size_t ensure(size_t count) {
    if (sorted_ >= count || complete()) return sorted_;
    if (count <= kHeapLimit && keys_.empty()) {
      select(count);
      return sorted_;
    }
    if (!all_) {
      keys_.clear();
      sorted_ = 0;
      keys_.reserve(logits_.size());
      for (uint32_t i = 0; i < logits_.size(); ++i)
        if (logits_[i] > -INFINITY) keys_.push_back(key_of(logits_[i], i));
      all_ = true;
    }
    count = std::min(count, keys_.size());
    if (count <= sorted_) return sorted_;
    const auto first = keys_.begin() + static_cast<ptrdiff_t>(sorted_);
    const auto middle = keys_.begin() + static_cast<ptrdiff_t>(count);
    if (middle != keys_.end()) std::nth_element(first, middle, keys_.end());
    std::sort(first, middle);
    sorted_ = count;
    return sorted_;
  }
  // Whether ensure() can give no more.
  bool complete() const { return all_ && sorted_ == keys_.size(); }
  uint32_t id(size_t i) const { return id_of(keys_[i]); }
  float logit(size_t i) const { return logits_[id(i)]; }

 private:
  static constexpr size_t kHeapLimit = 512;

  // The first `count` by a bounded heap; whole chunks below its worst member are skipped.
  void select(size_t count) {
    constexpr size_t kChunk = 256;
    std::vector<uint64_t> heap;  // the worst on top
    heap.reserve(count);
    for (size_t begin = 0; begin < logits_.size(); begin += kChunk) {
      const size_t n = std::min(kChunk, logits_.size() - begin);
      if (heap.size() == count && !(table_.max_of(&logits_[begin], n) > logits_[id_of(heap.front())]))
        continue;
      for (size_t i = begin; i < begin + n; ++i) {
        if (!(logits_[i] > -INFINITY)) continue;
        const uint64_t key = key_of(logits_[i], static_cast<uint32_t>(i));
        if (heap.size() < count) {
          heap.push_back(key);
          std::push_heap(heap.begin(), heap.end());
        } else if (key < heap.front()) {
          std::pop_heap(heap.begin(), heap.end());
          heap.back() = key;
          std::push_heap(heap.begin(), heap.end());
        }
      }
    }
    std::sort(heap.begin(), heap.end());
    all_ = heap.size() < count;
    keys_ = std::move(heap);
    sorted_ = keys_.size();
  }

  const Table& table_;
  std::span<const float> logits_;
  std::vector<uint64_t> keys_;
  size_t sorted_ = 0;
  bool all_ = false;  // keys_ holds every id that can be drawn
};

// The draw: what is left after top_k, top_p and min_p, walked in descending order.
uint32_t draw(const Table& table, Descending& order, std::span<const float> logits, float max,
              const SamplingParams& params, float u) {
  const float inverse = 1.0f / params.temperature;
  const size_t limit = params.top_k == 0 ? logits.size() : std::min<size_t>(params.top_k, logits.size());
  const bool all = limit == logits.size();
  std::vector<float> weights;  // of order[0..), unnormalised; weights[0] is 1
  const auto more = [&](size_t count) {
    const size_t have = std::min(order.ensure(std::min(count, limit)), limit);
    if (have <= weights.size()) return false;
    const size_t begin = weights.size();
    std::vector<float> chunk(have - begin);
    for (size_t i = 0; i < chunk.size(); ++i) chunk[i] = order.logit(begin + i);
    weights.resize(have);
    table.exp_of(chunk.data(), chunk.size(), max, inverse, weights.data() + begin);
    return true;
  };
  constexpr size_t kFirst = 256, kGrowth = 16;
  const auto grow = [&] { return more(weights.empty() ? kFirst : weights.size() * kGrowth); };

  double total = 0;  // of what top_k leaves
  if (all) {
    total = table.exp_sum(logits.data(), logits.size(), max, inverse);
  } else {
    more(limit);
    for (const float w : weights) total += w;
  }
  // How many top_p keeps: the fewest whose sum reaches top_p * total. Then min_p relative to the largest,
  // which is 1.
  const bool cut_p = params.top_p<1.0f, cut_min = params.min_p> 0.0f;
  size_t kept = 0;
  double kept_sum = 0;
  if (cut_p || cut_min) {
    const double enough = cut_p ? static_cast<double>(params.top_p) * total : INFINITY;
    for (; kept_sum < enough || kept == 0; ++kept) {
      if (kept == weights.size() && !grow()) break;
      if (weights[kept] < params.min_p || (weights[kept] == 0.0f && kept > 0)) break;
      kept_sum += weights[kept];
    }
  } else {
    kept = limit;
    kept_sum = total;
  }
  const double target = static_cast<double>(u) * kept_sum;
  double sum = 0;
  size_t last = 0;
  for (size_t i = 0; i < kept; ++i) {
    if (i == weights.size() && !grow()) break;
    if (weights[i] == 0.0f && i > 0) break;
    sum += weights[i];
    last = i;
    if (sum > target) break;
  }
  return order.id(last);
}

// The distribution as the model gave it.
struct Raw {
  float max = 0;
  double log_sum = 0;

  static StatusOr<Raw> of(const Table& table, std::span<const float> logits) {
    Raw raw;
    raw.max = logits.empty() ? -INFINITY : table.max_of(logits.data(), logits.size());
    if (!std::isfinite(raw.max)) return internal_error("the model gave no finite logit");
    const float sum = table.exp_sum(logits.data(), logits.size(), raw.max, 1.0f);
    if (std::isnan(sum)) return internal_error("the model gave a logit that is not a number");
    raw.log_sum = static_cast<double>(raw.max) + std::log(static_cast<double>(sum));
    return raw;
  }
  float logprob(float logit) const { return static_cast<float>(static_cast<double>(logit) - log_sum); }

  std::vector<TokenLogprob> top(Descending& order, uint32_t count) const {
    std::vector<TokenLogprob> result;
    if (count == 0) return result;
    const size_t n = std::min<size_t>(order.ensure(count), count);
    for (size_t i = 0; i < n; ++i) result.push_back({order.id(i), logprob(order.logit(i))});
    return result;
  }
};

std::span<const float> cut(std::span<const float> logits, uint32_t vocab_limit) {
  return vocab_limit != 0 && vocab_limit < logits.size() ? logits.first(vocab_limit) : logits;
}

// Changes the few logits that a request changes; puts them back when it goes.
class Adjusted {
 public:
  Adjusted(std::span<float> logits, const SamplingParams& params, const SampleState& state)
      : logits_(logits) {
    for (const TokenId token : state.forbidden) set(token, -INFINITY);
    for (const TokenBias& entry : params.logit_bias) {
      if (entry.token < logits.size()) set(entry.token, logits[entry.token] + entry.bias);
    }
    if (!params.has_penalties()) return;
    for (const SeenToken& seen : state.seen) {
      if (seen.token >= logits.size()) continue;
      float logit = logits[seen.token];
      logit = logit > 0.0f ? logit / params.repetition_penalty : logit * params.repetition_penalty;
      if (seen.output_count > 0) {
        logit -= params.frequency_penalty * static_cast<float>(seen.output_count);
        logit -= params.presence_penalty;
      }
      set(seen.token, logit);
    }
  }
  ~Adjusted() { restore(); }
  Adjusted(const Adjusted&) = delete;
  Adjusted& operator=(const Adjusted&) = delete;

  bool changed() const { return !saved_.empty(); }
  void restore() {
    for (; !saved_.empty(); saved_.pop_back()) logits_[saved_.back().first] = saved_.back().second;
  }

 private:
  void set(TokenId token, float value) {
    if (token >= logits_.size()) return;
    saved_.emplace_back(token, logits_[token]);
    logits_[token] = value;
  }

  std::span<float> logits_;
  std::vector<std::pair<TokenId, float>> saved_;
};

}  // namespace

StatusOr<Sampled> sample(const Context& ctx, std::span<float> logits, const SamplingParams& params, float u,
                         const SampleState& state) {
  const Table& table = table_of(ctx.isa);
  logits = logits.first(cut(logits, params.vocab_limit).size());
  const FlushScope flush;
  ASSIGN_OR_RETURN(const Raw raw, Raw::of(table, logits));
  Sampled result;
  std::optional<Descending> order(std::in_place, table, logits);
  result.top = raw.top(*order, params.top_logprobs);

  Adjusted adjusted(logits, params, state);
  float max = raw.max;
  if (adjusted.changed()) {
    order.emplace(table, logits);
    max = table.max_of(logits.data(), logits.size());
    if (max == -INFINITY) {
      return failed_precondition("every token is forbidden (logit_bias, min_tokens)");
    }
    if (!std::isfinite(max)) return internal_error("a logit left the range of numbers");
  }
  if (params.temperature == 0.0f) {
    uint32_t id = 0;
    while (logits[id] != max) ++id;
    result.token = id;
  } else {
    result.token = draw(table, *order, logits, max, params, u);
  }
  adjusted.restore();
  result.logprob = raw.logprob(logits[result.token]);
  return result;
}

void sample_rows(const Context& ctx, std::span<SampleRow> rows) {
  run_tasks(ctx, static_cast<uint32_t>(rows.size()), [&](uint32_t i) {
    SampleRow& row = rows[i];
    row.result = sample(ctx, row.logits, *row.params, row.u, row.state);
  });
}

StatusOr<PromptLogprob> token_logprob(const Context& ctx, std::span<const float> logits, uint32_t vocab_limit,
                                      TokenId token, uint32_t top) {
  const Table& table = table_of(ctx.isa);
  logits = cut(logits, vocab_limit);
  const FlushScope flush;
  ASSIGN_OR_RETURN(const Raw raw, Raw::of(table, logits));
  PromptLogprob result;
  result.logprob = token < logits.size() ? raw.logprob(logits[token]) : -INFINITY;
  Descending order(table, logits);
  result.top = raw.top(order, top);
  if (token < logits.size()) {
    const float own = logits[token];
    uint32_t before = 0;
    for (size_t id = 0; id < logits.size(); ++id)
      before +=
          static_cast<uint32_t>(logits[id] > own) | static_cast<uint32_t>(logits[id] == own && id < token);
    result.rank = before + 1;
  }
  return result;
}

}  // namespace conclave::kernels
