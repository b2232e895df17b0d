// MiniMax-M2's forward pass in plain loops and double precision, one token at a time. The oracle of the
// golden tests: it agrees with transformers on the golden files, and each of its planted faults does not.
// Test only; small models.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "libs/checkpoint/binding.h"

namespace conclave::reference {

// What a wrong implementation might do. All off: the model.
struct Faults {
  bool interleaved_rotation = false;  // pairs (2i, 2i+1) instead of (i, i + rotary_dim/2)
  bool full_rotation = false;         // all of head_dim rotated
  bool per_head_norm = false;         // q/k norm over each head alone
  bool biased_weights = false;        // the selection bias in the weights too
  bool no_renormalize = false;        // weights of the chosen left as they are
  bool ignore_bias = false;           // the selection bias not used at all
  bool swap_w1_w3 = false;
  bool transposed_scales = false;  // FP8 block scales read column by column
};

struct Options {
  Faults faults;
  // Rounds what the engine's BF16 mode rounds: matmul inputs, keys and values, expert rows in and out. The
  // residual stream, the expert gate and all sums stay as they are.
  bool bf16 = false;
};

struct Matrix {
  uint32_t rows = 0;
  uint32_t cols = 0;
  std::vector<double> values;
  // y = W x
  std::vector<double> operator()(std::span<const double> x) const;
};

// The model with every weight dequantized to double. Refers to `model`, which must outlive it.
class Model {
 public:
  Model(const BoundModel& model, const Options& options);

  const ModelSpec& spec() const { return bound_.spec; }

 private:
  friend class Sequence;
  struct Layer {
    Matrix q, k, v, o, gate;
    std::vector<Matrix> w1, w2, w3;
  };
  Matrix dequantize(const WeightView& w) const;

  const BoundModel& bound_;
  Options options_;
  Matrix embed_, lm_head_;
  std::vector<Layer> layers_;
};

// One sequence: feeds tokens, keeps keys and values.
class Sequence {
 public:
  explicit Sequence(const Model& model);

  // Feeds the next token.
  void feed(TokenId token);
  // Logits after the newest token. [vocab]
  std::vector<double> logits() const;
  // The smallest distance, over all tokens and layers so far, between the last expert chosen and the first
  // one that was not: below the noise of another implementation, either choice is right.
  double gate_margin() const { return gate_margin_; }
  // How many (token, layer) choices the selection bias has changed.
  uint64_t choices_changed_by_bias() const { return changed_; }

 private:
  std::vector<double> attention(uint32_t layer, std::span<const double> x);
  std::vector<double> experts(uint32_t layer, std::span<const double> x);
  double round(double v) const;
  std::vector<double> rounded(std::vector<double> v) const;
  std::vector<double> norm(std::span<const double> x, std::span<const float> w, size_t group) const;
  void rotate(std::vector<double>& heads) const;

  const Model& model_;
  uint32_t position_ = 0;
  std::vector<double> hidden_;
  std::vector<std::vector<std::vector<double>>> keys_, values_;  // [layer][position]
  double gate_margin_ = 1e9;
  uint64_t changed_ = 0;
};

}  // namespace conclave::reference
