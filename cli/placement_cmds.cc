// conclave shards, experts, rebalance: which shard has which experts, and what each is asked for.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <boost/json.hpp>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/cluster_control.h"
#include "cli/commands.h"

namespace conclave::cli {
namespace {

namespace json = boost::json;

struct PlacementFlags {
  SchedulerFlags scheduler;
  bool json = false;
  std::optional<uint32_t> layer;
  bool dry_run = false;
};

// --- shards

double part(double value, double whole) { return whole > 0 ? value / whole : 0; }

void print_shards_json(const v1::StatusReply& reply) {
  json::array shards;
  for (const auto& m : reply.members()) {
    if (m.role() != v1::ROLE_EXPERT) continue;
    const v1::ShardStatus& s = m.shard();
    json::object shard{{"name", m.name()},
                       {"incarnation", std::to_string(m.incarnation())},
                       {"state", m.state()},
                       {"homes", s.homes()},
                       {"sole_homes", s.sole_homes()},
                       {"held", s.held()},
                       {"slots", nullptr},
                       {"rows_per_s", s.load()},
                       {"assigned_rows_per_s", s.assigned_load()}};
    if (s.slots() > 0) shard["slots"] = s.slots();
    shards.push_back(std::move(shard));
  }
  const json::object out{{"epoch", reply.epoch()},
                         {"preparing_epoch", reply.preparing_epoch()},
                         {"layers", reply.layers()},
                         {"experts_per_layer", reply.experts()},
                         {"busiest_over_mean", reply.busiest()},
                         {"shards", std::move(shards)}};
  std::printf("%s\n", json::serialize(out).c_str());
}

void print_shards(const v1::StatusReply& reply) {
  std::printf("placement %lu", static_cast<unsigned long>(reply.epoch()));
  if (reply.preparing_epoch() > 0)
    std::printf(" (%lu is being prepared)", static_cast<unsigned long>(reply.preparing_epoch()));
  std::printf(", %u layers of %u experts", reply.layers(), reply.experts());
  if (reply.busiest() > 0) std::printf(", the busiest shard has %.2f times the mean load", reply.busiest());
  std::printf("\n");
  double all = 0;
  for (const auto& m : reply.members()) all += m.shard().load();
  const double layers = std::max(1u, reply.layers());
  std::printf("%-20s %-20s %-10s %14s %14s %10s %10s %6s\n", "NAME", "INCARNATION", "STATE", "EXPERTS/LAYER",
              "ONLY HERE", "HELD", "ROWS/S", "SHARE");
  for (const auto& m : reply.members()) {
    if (m.role() != v1::ROLE_EXPERT) continue;
    const v1::ShardStatus& s = m.shard();
    std::printf("%-20s %-20lu %-10s %14.1f %14.1f %10.1f %10.0f %5.1f%%\n", m.name().c_str(),
                static_cast<unsigned long>(m.incarnation()), m.state().c_str(), s.homes() / layers,
                s.sole_homes() / layers, s.held() / layers, s.load(), 100 * part(s.load(), all));
  }
}

Status run_shards(const PlacementFlags& flags) {
  ASSIGN_OR_RETURN(const v1::StatusReply reply, ClusterControl(flags.scheduler).status());
  flags.json ? print_shards_json(reply) : print_shards(reply);
  return OkStatus();
}

// --- experts

// The rows of an ExpertsReply; its columns are sound (ClusterControl::experts).
struct ExpertRows {
  explicit ExpertRows(const v1::ExpertsReply& reply) : r(reply) {}

  uint32_t layers() const {
    return r.experts() == 0 ? 0 : static_cast<uint32_t>(r.load_size()) / r.experts();
  }
  uint32_t layer_at(uint32_t i) const { return r.first_layer() + i; }
  int row(uint32_t i, uint32_t expert) const { return static_cast<int>(i * r.experts() + expert); }
  double load(uint32_t i, uint32_t expert) const { return r.load(row(i, expert)); }
  std::vector<uint32_t> homes(uint32_t i, uint32_t expert) const {
    const auto& all = r.home_shards();
    return {all.begin() + static_cast<int>(r.home_begin(row(i, expert))),
            all.begin() + static_cast<int>(r.home_begin(row(i, expert) + 1))};
  }
  double layer_load(uint32_t i) const {
    double sum = 0;
    for (uint32_t e = 0; e < r.experts(); ++e) sum += load(i, e);
    return sum;
  }
  // Load of the layer's busiest shard over the mean.
  double busiest_shard(uint32_t i) const {
    std::vector<double> shards(static_cast<size_t>(r.shards_size()), 0);
    for (uint32_t e = 0; e < r.experts(); ++e) {
      const auto at = homes(i, e);
      for (const uint32_t home : at) shards[home] += load(i, e) / static_cast<double>(at.size());
    }
    double sum = 0, most = 0;
    for (const double load : shards) sum += load, most = std::max(most, load);
    return part(most * static_cast<double>(shards.size()), sum);
  }

  const v1::ExpertsReply& r;
};

void print_experts_json(const v1::ExpertsReply& reply) {
  const ExpertRows rows(reply);
  json::array shards, experts;
  for (const auto& shard : reply.shards())
    shards.push_back({{"name", shard.name()}, {"incarnation", std::to_string(shard.incarnation())}});
  for (uint32_t i = 0; i < rows.layers(); ++i) {
    for (uint32_t e = 0; e < reply.experts(); ++e) {
      json::array homes;
      for (const uint32_t home : rows.homes(i, e))
        homes.push_back(json::value(reply.shards(static_cast<int>(home)).name()));
      experts.push_back({{"layer", rows.layer_at(i)},
                         {"expert", e},
                         {"rows_per_s", rows.load(i, e)},
                         {"homes", std::move(homes)}});
    }
  }
  const json::object out{{"epoch", reply.epoch()},
                         {"layers", reply.layers()},
                         {"experts_per_layer", reply.experts()},
                         {"shards", std::move(shards)},
                         {"experts", std::move(experts)}};
  std::printf("%s\n", json::serialize(out).c_str());
}

// One line a layer.
void print_layers(const ExpertRows& rows) {
  std::printf("placement %lu; `--layer L` lists the experts of one layer\n",
              static_cast<unsigned long>(rows.r.epoch()));
  std::printf("%6s %10s %15s %16s %14s\n", "LAYER", "ROWS/S", "BUSIEST EXPERT", "BUSIEST SHARD", "HOMES");
  for (uint32_t i = 0; i < rows.layers(); ++i) {
    uint32_t busiest = 0;
    size_t least = rows.homes(i, 0).size(), most = least;
    for (uint32_t e = 0; e < rows.r.experts(); ++e) {
      if (rows.load(i, e) > rows.load(i, busiest)) busiest = e;
      least = std::min(least, rows.homes(i, e).size());
      most = std::max(most, rows.homes(i, e).size());
    }
    const double sum = rows.layer_load(i);
    char expert[32];
    std::snprintf(expert, sizeof expert, "%u (%.1f)", busiest,
                  part(rows.load(i, busiest) * rows.r.experts(), sum));
    std::printf("%6u %10.1f %15s %16.2f %7zu to %zu\n", rows.layer_at(i), sum, expert, rows.busiest_shard(i),
                least, most);
  }
  std::printf("In brackets and for shards: times the mean.\n");
}

void print_layer(const ExpertRows& rows) {
  std::printf("placement %lu, layer %u: the busiest shard has %.2f times the mean load\n",
              static_cast<unsigned long>(rows.r.epoch()), rows.layer_at(0), rows.busiest_shard(0));
  std::printf("%7s %10s %10s  %s\n", "EXPERT", "ROWS/S", "OVER MEAN", "HOMES");
  const double sum = rows.layer_load(0);
  for (uint32_t e = 0; e < rows.r.experts(); ++e) {
    std::string homes;
    for (const uint32_t home : rows.homes(0, e)) {
      homes += (homes.empty() ? "" : ", ") + rows.r.shards(static_cast<int>(home)).name();
    }
    std::printf("%7u %10.2f %10.2f  %s\n", e, rows.load(0, e), part(rows.load(0, e) * rows.r.experts(), sum),
                homes.empty() ? "none" : homes.c_str());
  }
}

Status run_experts(const PlacementFlags& flags) {
  ASSIGN_OR_RETURN(const v1::ExpertsReply reply, ClusterControl(flags.scheduler).experts(flags.layer));
  const ExpertRows rows(reply);
  if (flags.json) {
    print_experts_json(reply);
  } else if (rows.layers() == 0) {
    std::printf("no model is known yet: no worker and no shard has joined\n");
  } else {
    flags.layer ? print_layer(rows) : print_layers(rows);
  }
  return OkStatus();
}

// --- rebalance

Status run_rebalance(const PlacementFlags& flags) {
  ASSIGN_OR_RETURN(const v1::RebalanceReply reply, ClusterControl(flags.scheduler).rebalance(flags.dry_run));
  if (flags.json) {
    const json::object out{{"dry_run", flags.dry_run},
                           {"added", reply.added()},
                           {"removed", reply.removed()},
                           {"busiest_before", reply.busiest_before()},
                           {"busiest_after", reply.busiest_after()},
                           {"epoch", reply.epoch()}};
    std::printf("%s\n", json::serialize(out).c_str());
    return OkStatus();
  }
  if (reply.added() == 0 && reply.removed() == 0) {
    std::printf("nothing to move: the busiest shard of the worst layer has %.2f times the mean load\n",
                reply.busiest_before());
    return OkStatus();
  }
  std::printf(
      "%s %lu homes and lets %lu go: the busiest shard of the worst layer from %.2f to %.2f times the "
      "mean load\n",
      flags.dry_run ? "would map" : "maps", static_cast<unsigned long>(reply.added()),
      static_cast<unsigned long>(reply.removed()), reply.busiest_before(), reply.busiest_after());
  if (reply.epoch() > 0) {
    std::printf("placement %lu is being prepared; `conclave shards` shows when it is in use\n",
                static_cast<unsigned long>(reply.epoch()));
  }
  return OkStatus();
}

}  // namespace

void add_placement_commands(CLI::App& app, Command& chosen) {
  const auto add = [&](const char* name, const char* doc, Status (*run)(const PlacementFlags&)) {
    auto* command = app.add_subcommand(name, doc);
    auto flags = std::make_shared<PlacementFlags>();
    add_scheduler_flag(*command, flags->scheduler);
    command->add_flag("--json", flags->json, "As one JSON object");
    command->callback([&chosen, flags, run] { chosen = [flags, run] { return run(*flags); }; });
    return std::pair(command, flags);
  };
  add("shards", "Show the expert shards: what they hold and how busy they are", run_shards);
  const auto [experts, experts_flags] =
      add("experts", "Show what experts are asked for and where they live", run_experts);
  experts->add_option("--layer", experts_flags->layer, "List the experts of this layer");
  const auto [rebalance, rebalance_flags] =
      add("rebalance", "Even out the shards' load now, also where the difference is small", run_rebalance);
  rebalance->add_flag("--dry-run", rebalance_flags->dry_run, "Only say what would be done");
}

}  // namespace conclave::cli
