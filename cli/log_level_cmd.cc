// conclave log-level: what processes write into their logs, by module, changed while they run.
#include <CLI/CLI.hpp>
#include <boost/json.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/cluster_control.h"
#include "cli/commands.h"
#include "cli/http_client.h"
#include "cli/processes.h"
#include "cli/status_page.h"
#include "libs/telemetry/log_levels.h"

namespace conclave::cli {
namespace {

namespace json = boost::json;

constexpr Nanos kAnswerLimit = 5 * kSecond;

struct LogLevelFlags {
  SchedulerFlags scheduler;
  std::string target;
  std::vector<std::string> changes;  // module=level
  double for_s = static_cast<double>(kDefaultLogChange / kSecond);
  bool permanent = false;
  bool json = false;
};

// The queries of the changes; INVALID_ARGUMENT before anything has changed.
StatusOr<std::vector<std::string>> queries_of(const LogLevelFlags& flags) {
  std::vector<std::string> out;
  for (const std::string& change : flags.changes) {
    const size_t equals = change.find('=');
    if (equals == std::string::npos)
      return invalid_field("MODULE=LEVEL", "'" + change + "': write module=level, e.g. requests=debug");
    char seconds[40];
    std::snprintf(seconds, sizeof seconds, "%.3f", flags.permanent ? 0.0 : flags.for_s);
    out.push_back("module=" + change.substr(0, equals) + "&level=" + change.substr(equals + 1) +
                  "&for_s=" + seconds);
    RETURN_IF_ERROR(parse_log_change(out.back()).status());
  }
  return out;
}

Status error_of(const HttpResponse& response, const std::string& address) {
  boost::system::error_code error;
  const json::value body = json::parse(response.body, error);
  std::string message = "HTTP " + std::to_string(response.status);
  if (!error && body.is_object() && body.as_object().contains("error") && body.at("error").is_string())
    message = body.at("error").as_string().c_str();
  if (response.status == 404) message = "is of a release without log levels by module";
  return failed_precondition(address + ": " + message);
}

StatusOr<json::value> ask(const std::string& address, const char* method, const std::string& path) {
  ASSIGN_OR_RETURN(const ServerUrl url, parse_url(address));
  ASSIGN_OR_RETURN(const HttpResponse response, http_request(url, method, path, "", kAnswerLimit));
  if (response.status != 200) return error_of(response, address);
  boost::system::error_code error;
  json::value body = json::parse(response.body, error);
  if (error || !body.is_object() || !body.as_object().contains("modules") || !body.at("modules").is_array())
    return internal_error(address + " answers something else than log levels");
  return body;
}

std::string text_of(const json::value& object, const char* key) {
  const json::value* value = object.is_object() ? object.as_object().if_contains(key) : nullptr;
  return value != nullptr && value->is_string() ? value->as_string().c_str() : "";
}

void print_levels(const ProcessAddress& process, const json::value& levels) {
  std::printf("%s (%s)\n", process.name.c_str(), process.ops_address.c_str());
  for (const json::value& one : levels.at("modules").as_array()) {
    std::string note;
    if (one.is_object() && one.as_object().contains("changed") && one.at("changed").is_bool() &&
        one.at("changed").as_bool()) {
      const json::value* left = one.as_object().if_contains("left_s");
      note = "changed from " + text_of(one, "configured") +
             (left != nullptr && left->is_number() ? " for " + short_age(left->to_number<double>()) + " more"
                                                   : " until the process ends");
    }
    std::printf("  %-10s %-6s %s\n", text_of(one, "module").c_str(), text_of(one, "level").c_str(),
                note.c_str());
  }
}

Status run_log_level(const LogLevelFlags& flags) {
  ASSIGN_OR_RETURN(const std::vector<std::string> queries, queries_of(flags));
  std::vector<ProcessAddress> processes;
  if (is_address(flags.target)) {
    processes.push_back({"", flags.target, flags.target, "", "", 0});
  } else {
    ASSIGN_OR_RETURN(const v1::StatusReply reply, ClusterControl(flags.scheduler).status());
    ASSIGN_OR_RETURN(processes, processes_named(processes_of(reply, flags.scheduler.address), flags.target));
  }
  json::array all;
  Status first;
  for (const ProcessAddress& process : processes) {
    const auto failed = [&](const Status& why) {
      std::fprintf(stderr, "conclave: %s: %s\n", process.name.c_str(), message_of(why).c_str());
      if (first.ok()) first = failed_precondition("not every process could be asked");
    };
    if (process.ops_address.empty()) {
      failed(failed_precondition("does not say where its operations port is; name that address"));
      continue;
    }
    StatusOr<json::value> levels = internal_error("");
    for (const std::string& query : queries) {
      levels = ask(process.ops_address, "PUT", "/debug/log?" + query);
      if (!levels.ok()) break;
    }
    if (queries.empty()) levels = ask(process.ops_address, "GET", "/debug/log");
    if (!levels.ok()) {
      failed(levels.status());
      continue;
    }
    if (!flags.json) {
      print_levels(process, *levels);
      continue;
    }
    json::object one{{"role", process.role}, {"name", process.name}, {"ops_address", process.ops_address}};
    one["modules"] = levels->at("modules");
    all.push_back(std::move(one));
  }
  if (flags.json) std::printf("%s\n", json::serialize(json::object{{"processes", std::move(all)}}).c_str());
  return first;
}

}  // namespace

void add_log_level_command(CLI::App& app, Command& chosen) {
  auto* command =
      app.add_subcommand("log-level", "Show or change what processes log, by module, while they run");
  auto flags = std::make_shared<LogLevelFlags>();
  add_scheduler_flag(*command, flags->scheduler);
  command
      ->add_option(
          "target", flags->target,
          "all, a role (router, scheduler, attention, expert), a member's name or incarnation, or the "
          "HOST:PORT of an operations port")
      ->required();
  command->add_option(
      "changes", flags->changes,
      "MODULE=LEVEL; the module may be all, the level debug, info, warn, error, or default, which "
      "takes a change back. Without any: shows the levels");
  auto* time =
      command->add_option("--for", flags->for_s, "Seconds until a change ends by itself (default 900)")
          ->check(CLI::Range(0.001, static_cast<double>(kLongestLogChange / kSecond)));
  command->add_flag("--permanent", flags->permanent, "It stays until the process ends")->excludes(time);
  command->add_flag("--json", flags->json, "As one JSON object");
  command->callback([&chosen, flags] { chosen = [flags] { return run_log_level(*flags); }; });
}

}  // namespace conclave::cli
