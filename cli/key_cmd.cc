// conclave key: makes an API key. The key itself is shown once; the file of keys holds only its hash.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <memory>

#include "cli/commands.h"
#include "router_service/door/key_file.h"

namespace conclave::cli {
namespace {

struct KeyFlags {
  std::string name;
  std::string append_to;
  door::KeyGrant grant;
};

Status run_key(const KeyFlags& flags) {
  if (Status named = door::check_name(flags.name); !named.ok())
    return invalid_field("--name", message_of(named));
  ASSIGN_OR_RETURN(const std::string key, door::make_key());
  const std::string line = door::format_key_line({door::hash_key(key), flags.name, flags.grant});
  if (flags.append_to.empty()) {
    std::printf("key   %s\nline  %s\n", key.c_str(), line.c_str());
    return OkStatus();
  }
  std::ofstream out(flags.append_to, std::ios::app);
  out << line << "\n";
  if (!out.flush()) return invalid_field("--append-to", "cannot write " + flags.append_to);
  std::printf("%s\n", key.c_str());
  return OkStatus();
}

}  // namespace

void add_key_command(CLI::App& app, Command& chosen) {
  auto* command = app.add_subcommand("key", "Make an API key and its line for router.api_keys_file");
  auto flags = std::make_shared<KeyFlags>();
  command->add_option("--name", flags->name, "Whose key it is: the tenant in logs and limits")->required();
  command->add_option("--requests-per-minute", flags->grant.requests_per_minute, "Rate limit (default: none)")
      ->check(CLI::Range(1, 1'000'000'000));
  command
      ->add_option("--tokens-per-minute", flags->grant.tokens_per_minute,
                   "Rate limit, prompt and completion (default: none)")
      ->check(CLI::Range(1, 1'000'000'000));
  command->add_flag("--trusted", flags->grant.trusted, "The holder may set allow_special_tokens");
  command->add_option("--append-to", flags->append_to, "Add the line to this file and print the key alone");
  command->callback([&chosen, flags] { chosen = [flags] { return run_key(*flags); }; });
}

}  // namespace conclave::cli
