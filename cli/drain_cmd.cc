// conclave drain: moves what a worker runs or a shard holds to others, so that it can be taken away.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>

#include "cli/cluster_control.h"
#include "cli/commands.h"
#include "libs/base/clock.h"

namespace conclave::cli {
namespace {

constexpr std::chrono::milliseconds kPoll(100);  // of --wait: the status has no way to tell by itself

struct DrainFlags {
  SchedulerFlags scheduler;
  std::string id;
  bool wait = false;
  uint32_t wait_s = 600;
};

Status run_drain(const DrainFlags& flags) {
  ClusterControl control(flags.scheduler);
  ASSIGN_OR_RETURN(const v1::StatusReply cluster, control.status());
  ASSIGN_OR_RETURN(const v1::MemberStatus member, find_member(cluster, flags.id));
  if (member.role() == v1::ROLE_ROUTER) {
    return failed_precondition(member.name() +
                               " is a router: it drains by POST /admin/drain of its own admin address");
  }
  RETURN_IF_ERROR(control.drain(member.incarnation()));
  if (!flags.wait) {
    std::printf("%s is draining; `conclave status` shows when it is drained\n", member.name().c_str());
    return OkStatus();
  }
  const TimePoint end = steady_now() + flags.wait_s * kSecond;
  for (;;) {
    ASSIGN_OR_RETURN(const v1::StatusReply now, control.status());
    const auto there = find_member(now, std::to_string(member.incarnation()));
    if (!there.ok()) {
      std::printf("%s is drained and has left\n", member.name().c_str());
      return OkStatus();
    }
    if (there->state() == "drained") {
      std::printf("%s is drained\n", member.name().c_str());
      return OkStatus();
    }
    if (steady_now() > end) {
      const std::string left =
          member.role() == v1::ROLE_EXPERT
              ? " is still home to " + std::to_string(there->shard().homes()) +
                    " experts of all layers after "
              : " still runs " + std::to_string(there->sequences()) + " sequences after ";
      return deadline_exceeded(member.name() + left + std::to_string(flags.wait_s) +
                               " s; it goes on draining");
    }
    std::this_thread::sleep_for(kPoll);
  }
}

}  // namespace

void add_drain_command(CLI::App& app, Command& chosen) {
  auto* command = app.add_subcommand(
      "drain",
      "Move what a worker runs or a shard holds to the others; it gets nothing new until it is restarted");
  auto flags = std::make_shared<DrainFlags>();
  command->add_option("ID", flags->id, "Name or incarnation, as `conclave status` shows them")->required();
  add_scheduler_flag(*command, flags->scheduler);
  command->add_flag("--wait", flags->wait, "Return when nothing is left there");
  command->add_option("--wait-limit", flags->wait_s, "Seconds after which --wait gives up")
      ->check(CLI::Range(1, 86'400))
      ->capture_default_str();
  command->callback([&chosen, flags] { chosen = [flags] { return run_drain(*flags); }; });
}

}  // namespace conclave::cli
