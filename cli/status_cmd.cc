// conclave status: what the scheduler sees of its cluster.
#include <CLI/CLI.hpp>
#include <boost/json.hpp>
#include <cstdio>
#include <memory>

#include "cli/cluster_control.h"
#include "cli/commands.h"

namespace conclave::cli {
namespace {

namespace json = boost::json;

struct StatusFlags {
  SchedulerFlags scheduler;
  bool json = false;
};

void print_json(const v1::StatusReply& reply) {
  json::array members;
  for (const auto& m : reply.members()) {
    members.push_back({{"role", role_name(m.role())},
                       {"name", m.name()},
                       {"incarnation", std::to_string(m.incarnation())},  // 64 bits do not fit a JSON number
                       {"state", m.state()},
                       {"kv_blocks_total", m.kv_blocks_total()},
                       {"kv_blocks_used", m.kv_blocks_used()},
                       {"kv_blocks_cached", m.kv_blocks_cached()},
                       {"sequences", m.sequences()},
                       {"experts_held", m.experts_held()},
                       {"expert_load", m.shard().load()}});
  }
  const json::object out{{"scheduler_incarnation", std::to_string(reply.scheduler_incarnation())},
                         {"ready", reply.fleet().ready()},
                         {"not_ready", reply.fleet().not_ready()},
                         {"numerics_id", reply.fleet().numerics_id()},
                         {"epoch", reply.epoch()},
                         {"requests_waiting", reply.requests_waiting()},
                         {"requests_running", reply.requests_running()},
                         {"members", members}};
  std::printf("%s\n", json::serialize(out).c_str());
}

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

Status run_status(const StatusFlags& flags) {
  ASSIGN_OR_RETURN(const v1::StatusReply reply, ClusterControl(flags.scheduler).status());
  flags.json ? print_json(reply) : print_table(reply);
  return OkStatus();
}

}  // namespace

void add_status_command(CLI::App& app, Command& chosen) {
  auto* command = app.add_subcommand("status", "Show the members of a cluster and their load");
  auto flags = std::make_shared<StatusFlags>();
  add_scheduler_flag(*command, flags->scheduler);
  command->add_flag("--json", flags->json, "As one JSON object");
  command->callback([&chosen, flags] { chosen = [flags] { return run_status(*flags); }; });
}

}  // namespace conclave::cli
