#include "tests/cluster/keeper.h"

#include <signal.h>

#include <boost/json.hpp>
#include <thread>

namespace conclave {
namespace {

constexpr Nanos kTend = 2 * kMillisecond;
constexpr size_t kLogTail = 1500;

std::string tail(const std::string& text) {
  return text.size() <= kLogTail ? text : text.substr(text.size() - kLogTail);
}

std::string text(const boost::json::object& object, const char* key) {
  const boost::json::string& value = object.at(key).as_string();
  return {value.data(), value.size()};
}

uint64_t number(const boost::json::object& object, const char* key) {
  const auto* value = object.if_contains(key);
  return value == nullptr ? 0 : value->to_number<uint64_t>();
}

}  // namespace

std::vector<std::string> Keeper::names() const {
  std::vector<std::string> out = {"scheduler", "worker"};
  for (size_t i = 0; i < cluster_.other_workers.size(); ++i) out.push_back("worker" + std::to_string(i + 1));
  for (size_t i = 0; i < cluster_.shards.size(); ++i) out.push_back("shard" + std::to_string(i));
  if (with_router_) out.push_back("router");
  std::erase_if(out, [this](const std::string& name) { return gone_.contains(name); });
  return out;
}

Process& Keeper::process(const std::string& name) {
  if (name == "scheduler") return cluster_.scheduler;
  if (name == "router") return cluster_.router;
  if (name == "worker") return cluster_.worker;
  if (name.starts_with("worker")) return cluster_.other_workers[std::stoul(name.substr(6)) - 1];
  return cluster_.shards[std::stoul(name.substr(5))];
}

void Keeper::start(const std::string& name) {
  due_.erase(name);
  if (name == "scheduler") return cluster_.start_scheduler();
  if (name == "router") return cluster_.start_router();
  if (name == "worker") return cluster_.start_worker();
  if (name.starts_with("worker")) return cluster_.start_worker(std::stoul(name.substr(6)));
  cluster_.start_shard(std::stoul(name.substr(5)));
}

void Keeper::kill(const std::string& name) {
  if (process(name).running()) killed_.insert(name);
  process(name).kill();
  tend();
}

void Keeper::tend() {
  for (const std::string& name : names()) {
    if (process(name).running()) continue;
    const auto [at, fresh] = due_.emplace(name, steady_now() + kRestartPause);
    if (fresh && killed_.erase(name) == 0) {
      unexpected_.push_back(name + " ended with " + std::to_string(process(name).wait(0).value_or(-1)) +
                            ":\n" + tail(process(name).log()));
    }
    if (steady_now() >= at->second) start(name);
  }
}

bool Keeper::tend_until(const std::function<bool()>& reached, Nanos limit) {
  const TimePoint end = steady_now() + limit;
  for (;;) {
    tend();
    if (reached()) return true;
    if (steady_now() > end) return false;
    std::this_thread::sleep_for(std::chrono::nanoseconds(kTend));
  }
}

void Keeper::tend_for(Nanos time) {
  const TimePoint end = steady_now() + time;
  tend_until([end] { return steady_now() >= end; }, time);
}

std::string Keeper::unsettled() {
  for (const std::string& name : names()) {
    if (!process(name).running()) return name + " does not run";
  }
  Process command =
      Process::start("conclave", {"status", "--json", "--scheduler", cluster_.scheduler_address()},
                     ClusterEnvironment::directory() + "/status" + std::to_string(++commands_ % 2));
  if (command.wait(10 * kSecond) != 0) return "conclave status: " + command.log();
  boost::system::error_code error;
  const boost::json::value parsed = boost::json::parse(command.log(), error);
  if (error || !parsed.is_object()) return "conclave status printed " + command.log();
  const boost::json::object& status = parsed.as_object();
  if (!status.at("ready").as_bool()) return "not ready: " + command.log();
  if (number(status, "requests_waiting") + number(status, "requests_running") > 0) return "open requests";
  std::map<std::string, std::string> states;
  for (const auto& entry : status.at("members").as_array()) {
    const boost::json::object& member = entry.as_object();
    const std::string name = text(member, "name");
    const bool fresh = states.emplace(name, text(member, "state")).second;
    if (!fresh && text(member, "role") != "router") return name + " is a member twice";
    if (number(member, "kv_blocks_used") > 0) return name + " has KV pages in use";
    if (number(member, "sequences") > 0) return name + " has sequences";
  }
  size_t workers = 0, shards = 0;
  for (const std::string& name : names()) {
    workers += name.starts_with("worker");
    shards += name.starts_with("shard");
    if (!name.starts_with("worker") && !name.starts_with("shard")) continue;
    if (const auto it = states.find(name); it == states.end()) return name + " is no member";
    if (states[name] != "ready") return name + " is " + states[name];
  }
  for (const auto& [name, state] : states) {
    if (name.starts_with("shard") && gone_.contains(name)) return name + " is still a member";
  }
  for (const std::string& name : names()) {
    if (name == "scheduler" || name == "router") continue;
    const double peers = cluster_.metric(name, "conclave_transport_peers");
    const size_t wanted = name.starts_with("worker") ? shards : workers;
    if (peers != static_cast<double>(wanted)) {
      return name + " has " + std::to_string(peers) + " endpoints of " + std::to_string(wanted);
    }
    if (name.starts_with("worker") && cluster_.metric(name, "conclave_attention_sequences") != 0) {
      return name + " holds sequences";
    }
    if (name.starts_with("shard") && cluster_.metric(name, "conclave_expert_queued_rows") != 0) {
      return name + " holds rows";
    }
  }
  return "";
}

std::string Keeper::settle(Nanos limit) {
  std::string why = "?";
  const TimePoint end = steady_now() + limit;
  while (!(why = unsettled()).empty() && steady_now() < end) tend_for(50 * kMillisecond);
  return why;
}

std::map<std::string, Holdings> Keeper::holdings() {
  std::map<std::string, Holdings> out;
  for (const std::string& name : names()) {
    const Process& p = process(name);
    out[name] = {p.pid(), p.descriptors(), p.anonymous_bytes()};
  }
  return out;
}

std::string Keeper::grown(const std::map<std::string, Holdings>& before, uint64_t more_bytes) {
  std::string out;
  for (const auto& [name, now] : holdings()) {
    const auto it = before.find(name);
    if (it == before.end() || it->second.pid != now.pid) continue;
    if (now.descriptors > it->second.descriptors) {
      out += name + " has " + std::to_string(now.descriptors) + " descriptors, had " +
             std::to_string(it->second.descriptors) + "; ";
    }
    if (now.anonymous_bytes > it->second.anonymous_bytes + more_bytes) {
      out += name + " grew by " + std::to_string((now.anonymous_bytes - it->second.anonymous_bytes) / 1024) +
             " KiB; ";
    }
  }
  return out;
}

}  // namespace conclave
