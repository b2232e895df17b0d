// conclave timeline: how one request went, for chrome://tracing and Perfetto.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/http_client.h"
#include "libs/base/clock.h"

namespace conclave::cli {
namespace {

constexpr Nanos kLimit = 10 * kSecond;

struct TimelineFlags {
  std::string id;
  std::string admin = "127.0.0.1:8003";
  std::string out;
  bool json = false;
};

// Everything but letters, digits, '-', '_' and '.'.
std::string percent_encoded(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '_' || c == '.';
    if (plain) {
      out += c;
      continue;
    }
    char buffer[4];
    std::snprintf(buffer, sizeof buffer, "%%%02X", static_cast<unsigned>(static_cast<unsigned char>(c)));
    out += buffer;
  }
  return out;
}

Status run_timeline(const TimelineFlags& flags) {
  auto server = parse_url(flags.admin);
  if (!server.ok()) return invalid_field("--admin", message_of(server.status()));
  const std::string path =
      "/debug/requests/" + percent_encoded(flags.id) + (flags.json ? "" : "?format=chrome");
  auto response = http_request(*server, "GET", path, "", kLimit);
  if (!response.ok()) {
    return make_status(response.status().code(),
                       message_of(response.status()) +
                           "; name the router's admin address with --admin, as `conclave up` printed it");
  }
  if (response->status != 200) return error_from(*response);
  if (flags.out.empty()) {
    std::fputs(response->body.c_str(), stdout);
    return OkStatus();
  }
  std::ofstream file(flags.out, std::ios::trunc | std::ios::binary);
  file << response->body;
  if (!file.flush()) return invalid_field("--out", "'" + flags.out + "' cannot be written");
  std::printf("%s: %s\n", flags.out.c_str(),
              flags.json ? "the timeline as JSON" : "open it in chrome://tracing or https://ui.perfetto.dev");
  return OkStatus();
}

}  // namespace

void add_timeline_command(CLI::App& app, Command& chosen) {
  auto* command =
      app.add_subcommand("timeline", "How a request went, hop by hop, as a Chrome trace (docs/timelines.md)");
  auto flags = std::make_shared<TimelineFlags>();
  command
      ->add_option("ID", flags->id,
                   "The request's id in its answer, the x-request-id it came with, or its trace's id")
      ->required();
  command->add_option("--admin", flags->admin, "The router's admin address")
      ->envname("CONCLAVE_ROUTER_ADMIN_LISTEN")
      ->capture_default_str();
  command->add_option("--out", flags->out, "File to write; without it: standard output");
  command->add_flag("--json", flags->json, "The timeline itself instead of a trace");
  command->callback([&chosen, flags] { chosen = [flags] { return run_timeline(*flags); }; });
}

}  // namespace conclave::cli
