// Writes valid random checkpoints of any geometry: `conclave model make`. Deterministic: a tensor's values
// depend on the seed, its name, its dtype and its shape alone, not on the number of layers, files or threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "libs/base/status.h"

namespace conclave {

struct MakeOptions {
  std::string out;                   // created; must be absent or empty
  std::string geometry = "tiny-m2";  // m2 | tiny-m2
  uint32_t layers = 0;               // 0: the geometry's own (m2: 62, tiny-m2: 4)
  std::string dtype = "bf16";        // fp8 | bf16 | f32
  uint64_t seed = 1;
  // Deviation of e_score_correction_bias. The scores that it is added to lie between 0 and 1, around 0.5:
  // from about 0.3 on the bias decides, and the same few experts of a layer get most of the tokens.
  float gate_bias_std = 0.15f;
  // Fields of config.json to change, in order; values are JSON, or plain strings where they are not. A dot
  // reaches into an object ("rope_parameters.partial_rotary_factor"). Unknown fields are refused.
  std::vector<std::pair<std::string, std::string>> set;
  bool sparse = false;       // headers and file sizes only; all weights read as zero, and take no space
  bool fused = false;        // names and fused experts as transformers 5 keeps them
  bool single_file = false;  // model.safetensors instead of an index and numbered files
  uint64_t file_bytes = 0;   // limit per file; 0: chosen from the total (1 MiB to 4 GiB)
  // Called with bytes written and in total, a few times a second at most; may be empty.
  std::function<void(uint64_t, uint64_t)> progress;
};

struct MakeReport {
  size_t tensors = 0;
  size_t files = 0;
  uint64_t bytes = 0;  // of tensor data
};

// Streams to disk within 200 MB of memory. INVALID_ARGUMENT names the option or config field;
// RESOURCE_EXHAUSTED when the disk has not the room, before anything is written. config.json is written last,
// so an interrupted run leaves no directory that looks like a checkpoint.
StatusOr<MakeReport> make_checkpoint(const MakeOptions& options);

}  // namespace conclave
