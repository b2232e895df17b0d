// Writes the checkpoints of the golden files, for make_goldens.py and by hand:
//   make_checkpoint OUT DTYPE SEED [--sparse] [--fused] [--geometry G] [--layers N] [key=value ...]
// and prints what inspection finds.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "libs/checkpoint/inspect.h"
#include "libs/checkpoint/make.h"

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr,
                 "usage: make_checkpoint OUT DTYPE SEED [--sparse] [--fused] [--geometry G] [--layers N] "
                 "[key=value ...]\n");
    return 2;
  }
  conclave::MakeOptions options;
  options.out = argv[1];
  options.dtype = argv[2];
  options.seed = std::strtoull(argv[3], nullptr, 10);
  for (int i = 4; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--sparse") {
      options.sparse = true;
    } else if (arg == "--fused") {
      options.fused = true;
    } else if (arg == "--geometry" && i + 1 < argc) {
      options.geometry = argv[++i];
    } else if (arg == "--layers" && i + 1 < argc) {
      options.layers = static_cast<uint32_t>(std::strtoul(argv[++i], nullptr, 10));
    } else if (const size_t at = arg.find('='); at != std::string::npos) {
      options.set.emplace_back(arg.substr(0, at), arg.substr(at + 1));
    } else {
      std::fprintf(stderr, "make_checkpoint: unknown argument %s\n", arg.c_str());
      return 2;
    }
  }
  const auto made = conclave::make_checkpoint(options);
  if (!made.ok()) {
    std::fprintf(stderr, "make_checkpoint: %s\n", conclave::message_of(made.status()).c_str());
    return 1;
  }
  const auto inspection = conclave::inspect_checkpoint(options.out);
  if (!inspection.ok()) {
    std::fprintf(stderr, "make_checkpoint: %s\n", conclave::message_of(inspection.status()).c_str());
    return 1;
  }
  std::fputs(conclave::inspection_table(*inspection).c_str(), stdout);
  return inspection->fault_count == 0 ? 0 : 1;
}
