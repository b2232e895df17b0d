// Reads the committed golden files and remakes their checkpoints.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/checkpoint/binding.h"

namespace conclave::golden {

struct Prompt {
  std::vector<TokenId> tokens;
  std::vector<uint32_t> positions;  // whose logits are stored
  std::vector<uint32_t> tied;       // of those, where another expert choice would be as right
  size_t row = 0;                   // of positions[0]; the others follow
  std::vector<TokenId> continuation;
};

struct Case {
  std::string name;
  std::string dtype;  // f32 | bf16 | fp8
  uint64_t seed = 0;
  bool fused = false;
  std::vector<std::pair<std::string, std::string>> set;
  std::string fingerprint;
  size_t vocab = 0;
  size_t ties = 0;
  uint64_t bias_changed = 0;
  std::vector<Prompt> prompts;
  std::vector<float> logits;  // rows of vocab

  std::span<const float> row(size_t r) const { return std::span(logits).subspan(r * vocab, vocab); }
};

// All cases, from tests/golden/data below the repository root (the tests' working directory).
StatusOr<std::vector<Case>> read_cases();

// Makes the case's checkpoint in `dir` (which must not exist) and loads it; an error when its fingerprint is
// not the one the golden file was made with.
StatusOr<std::unique_ptr<BoundModel>> make_and_load(const Case& c, const std::string& dir);

// Largest |a - b| relative to the largest |b|.
double relative_error(std::span<const double> a, std::span<const float> b);
// KL(softmax(b) || softmax(a)) in nats.
double kl_divergence(std::span<const double> a, std::span<const float> b);

}  // namespace conclave::golden
