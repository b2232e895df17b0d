// conclave status: what the scheduler sees of its cluster.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <utility>

#include "cli/cluster_control.h"
#include "cli/cluster_watch.h"
#include "cli/commands.h"
#include "cli/status_page.h"
#include "cli/watch_screen.h"

namespace conclave::cli {
namespace {

struct StatusFlags {
  SchedulerFlags scheduler;
  bool json = false;
  bool watch = false;
  double interval_s = 1;
  uint64_t count = 0;
};

double seconds(int64_t ns) { return static_cast<double>(ns) / kSecond; }

void print_table(const v1::StatusReply& reply) {
  std::printf("%s%s%s, epoch %lu, %u running, %u waiting, numerics %s\n",
              reply.fleet().ready() ? "ready" : "not ready", reply.fleet().ready() ? "" : ": ",
              reply.fleet().not_ready().c_str(), static_cast<unsigned long>(reply.epoch()),
              reply.requests_running(), reply.requests_waiting(), reply.fleet().numerics_id().c_str());
  std::printf("%-10s %-20s %-20s %-10s %s\n", "ROLE", "NAME", "INCARNATION", "STATE", "LOAD");
  for (const auto& m : reply.members()) {
    char load[96] = "";
    if (m.role() == v1::ROLE_ATTENTION) {
      std::snprintf(load, sizeof load, "%u sequences, %u of %u KV blocks", m.sequences(), m.kv_blocks_used(),
                    m.kv_blocks_total());
    } else if (m.role() == v1::ROLE_EXPERT) {
      std::snprintf(load, sizeof load, "%.4g of %u experts a layer, %.0f rows/s",
                    reply.layers() > 0 ? static_cast<double>(m.experts_held()) / reply.layers() : 0.0,
                    reply.experts(), m.shard().load());
    }
    std::printf("%-10s %-20s %-20lu %-10s %s\n", role_name(m.role()), m.name().c_str(),
                static_cast<unsigned long>(m.incarnation()), m.state().c_str(), load);
  }
}

// Of the last minutes, the newest first.
void print_events(const v1::StatusReply& reply) {
  bool head = false;
  for (int i = reply.events_size() - 1; i >= 0; --i) {
    const v1::ClusterEvent& event = reply.events(i);
    if (seconds(event.age_ns()) > kEventMinutes * 60) continue;
    if (!std::exchange(head, true)) std::printf("events of the last %.0f minutes:\n", kEventMinutes);
    std::printf("  %7s ago  %-9s %s%s%s", short_age(seconds(event.age_ns())).c_str(), event.kind().c_str(),
                event.who().c_str(), event.who().empty() || event.detail().empty() ? "" : ": ",
                event.detail().c_str());
    std::printf(event.times() > 1 ? " (%u times)\n" : "\n", event.times());
  }
}

Status run_status(const StatusFlags& flags) {
  if (!flags.watch) {
    ASSIGN_OR_RETURN(const v1::StatusReply reply, ClusterControl(flags.scheduler).status());
    if (flags.json) {
      StatusView view = view_of(reply, flags.scheduler.address);
      view.wall_ns = wall_now_ns();
      std::printf("%s\n", status_json(view).c_str());
    } else {
      print_table(reply);
      print_events(reply);
    }
    return OkStatus();
  }
  block_watch_signals();  // before gRPC has threads
  ClusterWatch watch(flags.scheduler.address, std::make_unique<ClusterControl>(flags.scheduler));
  WatchOptions options;
  options.interval = static_cast<Nanos>(flags.interval_s * kSecond);
  options.json = flags.json;
  options.count = flags.count;
  return run_watch(options, [&watch] { return watch.look(); });
}

}  // namespace

void add_status_command(CLI::App& app, Command& chosen) {
  auto* command = app.add_subcommand("status", "Show the members of a cluster and their load");
  auto flags = std::make_shared<StatusFlags>();
  add_scheduler_flag(*command, flags->scheduler);
  command->add_flag("--json", flags->json, "As one JSON object; with --watch one a line");
  auto* watch =
      command->add_flag("--watch", flags->watch,
                        "A live page until Ctrl-C or q; pages in a row where the output is no terminal");
  command->add_option("--interval", flags->interval_s, "Seconds between looks (default 1)")
      ->check([](const std::string& text) {
        double value = 0;  // a range of CLI11's lets "nan" pass
        const bool number = CLI::detail::lexical_cast(text, value);
        return number && value >= 0.1 && value <= 3600 ? std::string() : text + " is not in 0.1 to 3600";
      })
      ->needs(watch);
  command->add_option("--count", flags->count, "End after so many looks")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 53))  // CLI11 takes -1 for the largest number
      ->needs(watch);
  command->callback([&chosen, flags] { chosen = [flags] { return run_status(*flags); }; });
}

}  // namespace conclave::cli
