// conclave generate: one completion, streamed to the terminal.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <memory>

#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/sampling_flags.h"

namespace conclave::cli {
namespace {

struct GenerateFlags {
  SamplingFlags sampling;
  std::string prompt;
  bool json = false;
};

Status run_generate(const GenerateFlags& flags) {
  std::string prompt = flags.prompt;
  if (prompt == "-") prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
  RateLine rate("generating");
  ASSIGN_OR_RETURN(
      const StreamResult result,
      run_stream(flags.sampling, "/v1/completions", {{"prompt", prompt}}, [&](const std::string& text, bool) {
        if (!flags.json) {
          std::fwrite(text.data(), 1, text.size(), stdout);
          std::fflush(stdout);
        }
        rate.tick(!flags.json && isatty(STDOUT_FILENO));
        return std::ferror(stdout) == 0;
      }));
  rate.clear();
  if (flags.json) {
    const boost::json::object out{{"text", result.text},
                                  {"finish_reason", result.finish_reason},
                                  {"prompt_tokens", result.prompt_tokens},
                                  {"completion_tokens", result.completion_tokens},
                                  {"first_token_ms", static_cast<double>(result.first_token) / kMillisecond},
                                  {"total_ms", static_cast<double>(result.total) / kMillisecond}};
    std::printf("%s\n", boost::json::serialize(out).c_str());
    return OkStatus();
  }
  std::printf("\n");
  print_summary(result);
  return OkStatus();
}

}  // namespace

void add_generate_command(CLI::App& app, Command& chosen) {
  auto* command = app.add_subcommand("generate", "Complete a prompt and print the text as it comes");
  auto flags = std::make_shared<GenerateFlags>();
  command->add_option("--prompt,-p", flags->prompt, "The prompt; - reads it from standard input")->required();
  command->add_flag("--json", flags->json, "Print one JSON object at the end instead of text");
  flags->sampling.add_to(*command);
  command->callback([&chosen, flags] { chosen = [flags] { return run_generate(*flags); }; });
}

}  // namespace conclave::cli
