// conclave logits: every position's logits for a list of tokens, computed by the way every request goes
// (gate, dispatch, shard, combine), in one process.
#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <memory>
#include <thread>

#include "cli/commands.h"
#include "cli/npy.h"
#include "cli/progress.h"
#include "libs/local_cluster/local_cluster.h"

namespace conclave::cli {
namespace {

struct LogitsFlags {
  std::string model;
  std::string tokens;
  std::string dtype = "bf16";
  std::string out;
  unsigned threads = 0;
};

StatusOr<std::vector<TokenId>> parse_tokens(const std::string& text) {
  std::vector<TokenId> tokens;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    TokenId token = 0;
    const auto [stop, error] = std::from_chars(text.data() + begin, text.data() + end, token);
    if (error != std::errc() || stop != text.data() + end) {
      return invalid_field("--tokens",
                           "wants ids separated by commas, not '" + text.substr(begin, end - begin) + "'");
    }
    tokens.push_back(token);
    begin = end + 1;
  }
  return tokens;
}

Status run_logits(const LogitsFlags& flags) {
  ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, parse_tokens(flags.tokens));
  LocalClusterOptions options;
  ASSIGN_OR_RETURN(options.precision, parse_precision(flags.dtype, "--dtype"));
  options.shards = 1;
  options.threads = flags.threads > 0 ? flags.threads : std::max(1u, std::thread::hardware_concurrency());
  options.all_logits = true;
  show_line("loading");
  auto cluster = LocalCluster::load(flags.model, std::move(options));
  clear_line();
  RETURN_IF_ERROR(cluster.status());
  const ModelSpec& spec = (*cluster)->spec();
  if (tokens.size() >= spec.max_positions) {
    return invalid_field("--tokens", std::to_string(tokens.size()) + " tokens do not fit the model's " +
                                         std::to_string(spec.max_positions) + " positions");
  }
  for (TokenId token : tokens) {
    if (token >= spec.vocab_size) {
      return invalid_field("--tokens", "id " + std::to_string(token) + " is not below the vocabulary's " +
                                           std::to_string(spec.vocab_size));
    }
  }
  RETURN_IF_ERROR((*cluster)->wait_ready());
  show_line("computing");
  const auto logits = (*cluster)->logits(tokens);
  clear_line();
  RETURN_IF_ERROR(logits.status());
  RETURN_IF_ERROR(write_npy(flags.out, *logits, tokens.size(), spec.vocab_size));
  std::printf("%s: float32 [%zu, %u]\n", flags.out.c_str(), tokens.size(), spec.vocab_size);
  return OkStatus();
}

}  // namespace

void add_logits_command(CLI::App& app, Command& chosen) {
  auto* command =
      app.add_subcommand("logits", "Write every position's logits for a list of tokens (.npy, float32)");
  auto flags = std::make_shared<LogitsFlags>();
  command->add_option("--model", flags->model, "Checkpoint directory")->required();
  command->add_option("--tokens", flags->tokens, "Token ids, separated by commas")->required();
  command->add_option("--dtype", flags->dtype, "bf16 as in serving, or f32 (parity mode)")
      ->capture_default_str();
  command->add_option("--out", flags->out, "File to write")->required();
  command->add_option("--threads", flags->threads, "Threads (default: all cores)")
      ->check(CLI::Range(1u, 1024u));
  command->callback([&chosen, flags] { chosen = [flags] { return run_logits(*flags); }; });
}

}  // namespace conclave::cli
