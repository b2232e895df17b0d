// conclave model make | inspect: checkpoints on disk.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/progress.h"
#include "libs/checkpoint/inspect.h"
#include "libs/checkpoint/make.h"

namespace conclave::cli {
namespace {

struct MakeFlags {
  MakeOptions options;
  std::vector<std::string> set;
};

Status run_make(MakeFlags flags) {
  for (const auto& assignment : flags.set) {
    const size_t equals = assignment.find('=');
    if (equals == std::string::npos || equals == 0) {
      return invalid_field("--set", "wants key=value, not '" + assignment + "'");
    }
    flags.options.set.emplace_back(assignment.substr(0, equals), assignment.substr(equals + 1));
  }
  flags.options.progress = [](uint64_t written, uint64_t total) {
    char line[100];
    std::snprintf(line, sizeof line, "writing: %.2f of %.2f GB", static_cast<double>(written) / 1e9,
                  static_cast<double>(total) / 1e9);
    show_line(line);
  };
  const auto report = make_checkpoint(flags.options);
  clear_line();
  RETURN_IF_ERROR(report.status());
  std::printf("%s: %zu tensors, %.3f GB in %zu files\n", flags.options.out.c_str(), report->tensors,
              static_cast<double>(report->bytes) / 1e9, report->files);
  return OkStatus();
}

struct InspectFlags {
  std::string dir;
  bool json = false;
};

Status run_inspect(const InspectFlags& flags) {
  ASSIGN_OR_RETURN(const Inspection report, inspect_checkpoint(flags.dir));
  std::fputs((flags.json ? inspection_json(report) : inspection_table(report)).c_str(), stdout);
  if (report.fault_count > 0) {
    return invalid_argument(std::to_string(report.fault_count) + " faults in " + flags.dir);
  }
  return OkStatus();
}

}  // namespace

void add_model_commands(CLI::App& app, Command& chosen) {
  auto* model = app.add_subcommand("model", "Make and inspect checkpoints");
  model->require_subcommand(1);

  auto* make = model->add_subcommand("make", "Write a valid random checkpoint of any geometry");
  auto flags = std::make_shared<MakeFlags>();
  MakeOptions& options = flags->options;
  make->add_option("--out", options.out, "Directory to write; must be absent or empty")->required();
  make->add_option("--geometry", options.geometry, "m2 or tiny-m2")->capture_default_str();
  make->add_option("--layers", options.layers, "Layers (default: the geometry's own)")
      ->check(CLI::Range(1u, 100'000u));
  make->add_option("--dtype", options.dtype, "fp8, bf16 or f32")->capture_default_str();
  make->add_option("--seed", options.seed, "Same seed, same weights")->capture_default_str();
  make->add_option("--gate-bias-std", options.gate_bias_std,
                   "Deviation of the routing bias; beyond 0.3 few experts get most of the tokens")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  make->add_option("--set", flags->set, "key=value of config.json to change; may be repeated");
  make->add_flag("--sparse", options.sparse,
                 "Headers and sizes only: weights read as zero and take no disk space");
  make->add_flag("--fused", options.fused, "Tensor names and fused experts as transformers 5 writes them");
  make->add_flag("--single-file", options.single_file,
                 "model.safetensors instead of an index and numbered files");
  make->callback([&chosen, flags] { chosen = [flags] { return run_make(*flags); }; });

  auto* inspect = model->add_subcommand("inspect", "Show a checkpoint's geometry, sizes and faults");
  auto inspect_flags = std::make_shared<InspectFlags>();
  inspect->add_option("dir", inspect_flags->dir, "Checkpoint directory")->required();
  inspect->add_flag("--json", inspect_flags->json, "As one JSON object");
  inspect->callback(
      [&chosen, inspect_flags] { chosen = [inspect_flags] { return run_inspect(*inspect_flags); }; });
}

}  // namespace conclave::cli
