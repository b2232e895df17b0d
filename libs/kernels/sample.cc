#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "libs/base/check.h"
#include "libs/kernels/parallel.h"
#include "libs/kernels/weight_index.h"

namespace conclave::kernels {
namespace {

// What drawing from a row needs, kept from row to row by the thread that draws.
struct Workspace {
  std::vector<uint64_t> keys;
  std::vector<float> sample, weights, chunk;
  std::vector<std::pair<TokenId, float>> saved;
};

Workspace& workspace() {
  thread_local Workspace kept;
  return kept;
}

// The logits in descending order, sorted only as far as anybody looks. -inf is left out: it cannot be drawn.
// One at a time on a thread, whose keys it uses.
class Descending {
 public:
  Descending(const Table& table, std::span<const float> logits)
      : table_(table), logits_(logits), keys_(workspace().keys) {
    keys_.clear();
  }

  // Makes at least `count` (or all) sorted and returns how many are.
  size_t ensure(size_t count) {
    if (sorted_ >= count || complete()) return sorted_;
    if (!all_ && count <= kHeapLimit) {
      select(count);
      return sorted_;
    }
    if (!all_ && select_by_sample(count)) return sorted_;
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
    std::vector<uint64_t>& heap = keys_;  // the worst on top
    heap.clear();
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
    sorted_ = keys_.size();
  }

  // The first `count` out of those above a logit that a sample of the row suggests; false when that gives too
  // few or saves little.
  bool select_by_sample(size_t count) {
    constexpr size_t kStride = 256, kRun = 16;
    const size_t n = logits_.size();
    std::vector<float>& sample = workspace().sample;
    sample.clear();
    for (size_t begin = 0; begin + kRun <= n; begin += kStride)
      for (size_t i = begin; i < begin + kRun; ++i)
        if (logits_[i] > -INFINITY) sample.push_back(logits_[i]);
    const size_t rank = count * kRun / kStride * 5 / 4 + 32;
    if (rank >= sample.size() / 4) return false;
    const auto at = sample.begin() + static_cast<ptrdiff_t>(rank);
    std::nth_element(sample.begin(), at, sample.end(), std::greater<>());
    const float max = table_.max_of(logits_.data(), n);
    const uint32_t end = std::min(std::bit_cast<uint32_t>(max - *at) + 1, std::bit_cast<uint32_t>(INFINITY));
    auto* ids = static_cast<uint32_t*>(thread_scratch(Scratch::kOrder, (n + 16) * sizeof(uint32_t)));
    const size_t found = table_.collect(logits_.data(), n, max, 1.0f, 0, end, ids);
    if (found < count) return false;
    keys_.resize(found);
    for (size_t i = 0; i < found; ++i) keys_[i] = key_of(logits_[ids[i]], ids[i]);
    const auto middle = keys_.begin() + static_cast<ptrdiff_t>(count);
    if (middle != keys_.end()) std::nth_element(keys_.begin(), middle, keys_.end());
    keys_.resize(count);
    std::sort(keys_.begin(), keys_.end());
    sorted_ = count;
    return true;
  }

  const Table& table_;
  std::span<const float> logits_;
  std::vector<uint64_t>& keys_;
  size_t sorted_ = 0;
  bool all_ = false;  // keys_ holds every id that can be drawn
};

// The draw as the contract has it: what is left after top_k, top_p and min_p, walked in descending order.
uint32_t draw(const Table& table, Descending& order, std::span<const float> logits, float max,
              const SamplingParams& params, float u) {
  const float inverse = 1.0f / params.temperature;
  const size_t limit = params.top_k == 0 ? logits.size() : std::min<size_t>(params.top_k, logits.size());
  const bool all = limit == logits.size();
  std::vector<float>& weights = workspace().weights;  // of order[0..), unnormalised; weights[0] is 1
  weights.clear();
  const auto more = [&](size_t count) {
    const size_t have = std::min(order.ensure(std::min(count, limit)), limit);
    if (have <= weights.size()) return false;
    const size_t begin = weights.size();
    std::vector<float>& chunk = workspace().chunk;
    chunk.resize(have - begin);
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

// Whether top_k keeps everything.
bool keeps_all(const SamplingParams& params, size_t count) {
  return params.top_k == 0 || params.top_k >= count;
}

// The same draw without a sorted row, where top_k keeps everything; nothing when a sum is too near to a
// border to be sure.
std::optional<uint32_t> quick_draw(WeightIndex& weights, const SamplingParams& params, float u) {
  double sum = weights.total();
  if (params.top_p < 1.0f) {
    const auto last = weights.find(static_cast<double>(params.top_p) * sum);
    if (!last) return std::nullopt;
    sum = last->sum;
  }
  if (params.min_p > 0.0f) {
    const auto above = weights.sum_from(params.min_p);
    if (!above) return std::nullopt;
    sum = params.top_p < 1.0f ? std::min(sum, *above) : *above;
  }
  const auto drawn = weights.find(static_cast<double>(u) * sum);
  if (!drawn) return std::nullopt;
  return drawn->id;
}

// The distribution as the model gave it.
struct Raw {
  float max = 0;
  double log_sum = 0;

  // `weights`, if given, becomes the index of the weights at temperature 1: one pass for both.
  static StatusOr<Raw> of(const Table& table, std::span<const float> logits,
                          std::optional<WeightIndex>* weights = nullptr) {
    Raw raw;
    raw.max = logits.empty() ? -INFINITY : table.max_of(logits.data(), logits.size());
    if (!std::isfinite(raw.max)) return internal_error("the model gave no finite logit");
    const float sum = weights != nullptr ? weights->emplace(table, logits, raw.max, 1.0f).total()
                                         : table.exp_sum(logits.data(), logits.size(), raw.max, 1.0f);
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
      : logits_(logits), saved_(workspace().saved) {
    CONCLAVE_CHECK(saved_.empty());  // one at a time on a thread
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
  std::vector<std::pair<TokenId, float>>& saved_;
};

}  // namespace

StatusOr<Sampled> sample(const Context& ctx, std::span<float> logits, const SamplingParams& params, float u,
                         const SampleState& state) {
  const Table& table = table_of(ctx.isa);
  logits = logits.first(cut(logits, params.vocab_limit).size());
  const FlushScope flush;
  const bool quick = params.temperature != 0.0f && keeps_all(params, logits.size());
  const bool plain = state.forbidden.empty() && params.logit_bias.empty() && !params.has_penalties();
  std::optional<WeightIndex> weights;
  ASSIGN_OR_RETURN(const Raw raw,
                   Raw::of(table, logits, quick && plain && params.temperature == 1.0f ? &weights : nullptr));
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
    std::optional<uint32_t> token;
    if (quick) {
      if (!weights) weights.emplace(table, logits, max, 1.0f / params.temperature);
      token = quick_draw(*weights, params, u);
    }
    result.token = token ? *token : draw(table, *order, logits, max, params, u);
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
