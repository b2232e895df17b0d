// The `conclave` command.
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>

#include "cli/commands.h"

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // a reader that went away is an error of the write, not a death
  CLI::App app("Conclave serves MiniMax-M2 models on a cluster of attention workers and expert shards.",
               "conclave");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("conclave ") + CONCLAVE_VERSION);
  conclave::cli::Command chosen;
  conclave::cli::add_up_command(app, chosen);
  conclave::cli::add_generate_command(app, chosen);
  conclave::cli::add_chat_command(app, chosen);
  conclave::cli::add_status_command(app, chosen);
  conclave::cli::add_drain_command(app, chosen);
  conclave::cli::add_placement_commands(app, chosen);
  conclave::cli::add_bench_command(app, chosen);
  conclave::cli::add_model_commands(app, chosen);
  conclave::cli::add_logits_command(app, chosen);
  conclave::cli::add_key_command(app, chosen);
  conclave::cli::add_log_level_command(app, chosen);
  conclave::cli::add_diag_command(app, chosen);
  conclave::cli::add_timeline_command(app, chosen);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;  // --help and --version, or a fault in the arguments
  }
  const conclave::Status status = chosen();
  if (status.ok()) return conclave::cli::exit_code;
  const std::string field = conclave::field_of(status);
  std::fprintf(stderr, "conclave: %s%s%s\n", field.empty() ? "" : field.c_str(), field.empty() ? "" : ": ",
               conclave::message_of(status).c_str());
  return status.code() == conclave::StatusCode::kInvalidArgument ? 2 : 1;
}
