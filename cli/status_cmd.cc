// conclave status: what the scheduler sees of its cluster.
#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <boost/json.hpp>
#include <chrono>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "conclave/v1/cluster.grpc.pb.h"

namespace conclave::cli {
namespace {

namespace json = boost::json;

struct StatusFlags {
  std::string scheduler = "127.0.0.1:7070";
  bool json = false;
};

const char* role_name(v1::Role role) {
  switch (role) {
    case v1::ROLE_ROUTER:
      return "router";
    case v1::ROLE_ATTENTION:
      return "attention";
    case v1::ROLE_EXPERT:
      return "expert";
    default:
      return "unknown";
  }
}

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
                       {"experts_held", m.experts_held()}});
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
  std::printf("%-10s %-20s %-10s %s\n", "ROLE", "NAME", "STATE", "LOAD");
  for (const auto& m : reply.members()) {
    char load[96] = "";
    if (m.role() == v1::ROLE_ATTENTION) {
      std::snprintf(load, sizeof load, "%u sequences, %u of %u KV blocks", m.sequences(), m.kv_blocks_used(),
                    m.kv_blocks_total());
    } else if (m.role() == v1::ROLE_EXPERT) {
      std::snprintf(load, sizeof load, "%u experts", m.experts_held());
    }
    std::printf("%-10s %-20s %-10s %s\n", role_name(m.role()), m.name().c_str(), m.state().c_str(), load);
  }
}

Status run_status(const StatusFlags& flags) {
  auto stub = v1::Cluster::NewStub(grpc::CreateChannel(flags.scheduler, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  v1::StatusReply reply;
  const grpc::Status status = stub->Status(&context, {}, &reply);
  if (!status.ok()) {
    return unavailable("no scheduler answers at " + flags.scheduler + " (" + status.error_message() +
                       "); name its address with --scheduler, as `conclave up` printed it");
  }
  flags.json ? print_json(reply) : print_table(reply);
  return OkStatus();
}

}  // namespace

void add_status_command(CLI::App& app, Command& chosen) {
  auto* command = app.add_subcommand("status", "Show the members of a cluster and their load");
  auto flags = std::make_shared<StatusFlags>();
  command->add_option("--scheduler", flags->scheduler, "The scheduler's address")
      ->envname("CONCLAVE_SCHEDULER_ADDRESS")
      ->capture_default_str();
  command->add_flag("--json", flags->json, "As one JSON object");
  command->callback([&chosen, flags] { chosen = [flags] { return run_status(*flags); }; });
}

}  // namespace conclave::cli
