// Placement: what is told to shards and workers, and what people see of it.
#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "scheduler/core/core.h"

namespace conclave::scheduler {

void SchedulerCore::handle(Rebalance& event, TimePoint now) {
  emit(ReplyRebalance{event.ticket, placement_.rebalance(event.dry_run, now)});
}

Epoch SchedulerCore::oldest_epoch() const {
  Epoch oldest(UINT64_MAX);
  for (const auto& [session, member] : members_.all()) {
    if (member.hello.role == Role::kAttention) oldest = std::min(oldest, member.epoch_in_use);
  }
  return oldest;
}

bool SchedulerCore::workers_follow() const {
  bool any = false;
  for (const auto& [session, member] : members_.all()) {
    if (member.hello.role != Role::kAttention || !member.epoch_in_use) continue;
    if (member.epoch_in_use < placement_.active().epoch()) return false;
    any = true;
  }
  return any;
}

void SchedulerCore::publish_placements(TimePoint now) {
  for (;;) {
    if (std::exchange(epochs_changed_, false) && placement_.awaits_workers())
      placement_.workers_use(oldest_epoch(), now);
    placement_.on_time(now);
    std::vector<PlacementOut> outs = placement_.take();
    if (outs.empty()) return;
    for (PlacementOut& out : outs) publish(out, now);
  }
}

void SchedulerCore::publish(PlacementOut& out, TimePoint now) {
  using What = PlacementOut::What;
  all_due_ = true;
  const PlacementTable& table = out.table;
  if (out.what == What::kActivate) {
    // Steps may have been held for want of homes: their time begins with the placement that gives them.
    for (auto& [incarnation, worker] : workers_) worker.forgive(now);
    epochs_changed_ = true;  // where there is no worker, nothing waits for one
    show_placement(now);
  }
  if (out.what != What::kRelease) ++counters_.placements_published;
  for (const auto& [session, member] : members_.all()) {
    const bool shard = member.hello.role == Role::kExpert;
    if (shard == (out.what == What::kActivate)) continue;
    if (out.what == What::kPrepare && table.find_shard(member.hello.incarnation) < 0) continue;
    emit(SendMember{session, PlacementUpdate{table, out.urgent, out.what == What::kRelease}});
  }
  if (!out.note.empty()) {
    const std::string what = out.what == What::kPrepare ? "preparing a placement" : "placement in use";
    const std::string epoch = "epoch " + std::to_string(table.epoch().value) + ": " + out.note;
    events_.add("placement", "", (out.what == What::kPrepare ? "preparing " : "in use: ") + epoch, now);
    emit(Note{what, epoch});
  }
}

StatusOr<ExpertsSnapshot> SchedulerCore::experts(std::optional<uint32_t> layer) const {
  ExpertsSnapshot snapshot;
  const PlacementTable& active = placement_.active();
  snapshot.epoch = active.epoch();
  const auto& model = members_.model();
  if (!model) return snapshot;
  snapshot.layers = model->num_layers;
  snapshot.experts = model->num_experts;
  if (layer && *layer >= snapshot.layers) {
    return invalid_field("layer", std::to_string(*layer) + " is not below the number of layers, " +
                                      std::to_string(snapshot.layers));
  }
  const uint64_t rows = uint64_t{layer ? 1 : snapshot.layers} * snapshot.experts;
  if (rows > kMaxExpertRows) {
    return invalid_field("layer", "all layers have " + std::to_string(rows) + " experts, more than the " +
                                      std::to_string(kMaxExpertRows) + " of one answer; name a layer");
  }
  snapshot.first_layer = layer.value_or(0);
  snapshot.shards = active.shards();
  snapshot.load.reserve(rows);
  snapshot.homes.reserve(rows);
  for (uint64_t i = 0; i < rows; ++i) {
    const auto l = static_cast<uint32_t>(snapshot.first_layer + i / snapshot.experts);
    const auto e = static_cast<uint32_t>(i % snapshot.experts);
    snapshot.load.push_back(placement_.load().rate(static_cast<size_t>(l) * snapshot.experts + e, last_now_));
    snapshot.homes.push_back(active.layers() > 0 ? active.homes(l, e) : std::vector<uint16_t>());
  }
  return snapshot;
}

// A look at every expert: once a second is often enough for figures with a half-life of a minute.
void SchedulerCore::show_load(TimePoint now) {
  const PlacementTable& active = placement_.active();
  const auto& model = members_.model();
  if (!model || !placement_.load().any()) return;
  if (load_shown_ != kNever && now - load_shown_ < kSecond) return;
  load_shown_ = now;
  auto gauges = std::make_shared<LoadGauges>();
  const uint32_t experts = model->num_experts;
  std::vector<double> rates(experts);
  std::vector<double> by_shard;
  for (uint32_t layer = 0; layer < model->num_layers; ++layer) {
    LayerGauge& gauge = gauges->layers.emplace_back();
    by_shard.assign(active.shards().size(), 0);
    for (uint32_t expert = 0; expert < experts; ++expert) {
      const double rate = placement_.load().rate(size_t{layer} * experts + expert, now);
      rates[expert] = rate;
      gauge.load += rate;
      if (rate > 0) gauges->experts.push_back({layer, expert, rate});
      if (layer >= active.layers()) continue;
      const auto& homes = active.homes(layer, expert);
      for (const uint16_t home : homes) by_shard[home] += rate / static_cast<double>(homes.size());
    }
    if (gauge.load <= 0) continue;
    const auto busy = rates.begin() + static_cast<ptrdiff_t>(std::min<size_t>(kBusyExperts, rates.size()));
    std::partial_sort(rates.begin(), busy, rates.end(), std::greater<>());
    gauge.busiest_expert = rates.front() * experts / gauge.load;
    gauge.busy_share = std::accumulate(rates.begin(), busy, 0.0) / gauge.load;
    if (by_shard.empty()) continue;
    gauge.busiest_shard = *std::max_element(by_shard.begin(), by_shard.end()) *
                          static_cast<double>(by_shard.size()) / gauge.load;
  }
  auto& listed = gauges->experts;
  const size_t count = std::min(kListedExperts, listed.size());
  std::partial_sort(listed.begin(), listed.begin() + static_cast<ptrdiff_t>(count), listed.end(),
                    [](const ExpertGauge& a, const ExpertGauge& b) {
                      return a.load != b.load     ? a.load > b.load
                             : a.layer != b.layer ? a.layer < b.layer
                                                  : a.expert < b.expert;
                    });
  listed.resize(count);
  counters_.load_gauges = std::move(gauges);
}

void SchedulerCore::show_members() {
  auto gauges = std::make_shared<std::vector<MemberGauge>>();
  for (const auto& [session, member] : members_.all())
    gauges->push_back({member.hello.role, member.hello.incarnation, member.hello.name});
  counters_.member_gauges = std::move(gauges);
}

void SchedulerCore::show_placement(TimePoint now) {
  show_load(now);
  auto gauges = std::make_shared<std::vector<ShardGauge>>();
  const PlacementTable& active = placement_.active();
  for (const auto& [incarnation, figures] : placement_.figures(now)) {
    const Member* member = members_.find(incarnation);
    if (member == nullptr) continue;
    gauges->push_back({incarnation, member->hello.name, figures.homes, figures.load, figures.assigned_load});
  }
  counters_.shard_gauges = std::move(gauges);
  counters_.busiest = placement_.busiest(false);
  counters_.busiest_layer = placement_.busiest(true);
  counters_.experts_short = 0;
  for (uint32_t layer = 0; layer < active.layers(); ++layer) {
    for (uint32_t expert = 0; expert < active.experts(); ++expert)
      counters_.experts_short += active.homes(layer, expert).size() < options_.min_replicas ? 1 : 0;
  }
}

}  // namespace conclave::scheduler
