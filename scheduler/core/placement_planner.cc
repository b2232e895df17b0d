#include "scheduler/core/placement_planner.h"

#include <algorithm>
#include <cstdio>

#include "libs/base/check.h"

namespace conclave::scheduler {
namespace {

// Of a balance that was asked for: worth while at any gain that is more than noise.
constexpr double kAskedRatio = 1.02;

// The same homes without one shard's, if it has any.
PlacementTable without(const PlacementTable& table, Epoch epoch, Incarnation lost) {
  std::vector<ShardEndpoint> shards;
  std::vector<int> new_index;
  for (const ShardEndpoint& shard : table.shards()) {
    const bool keep = shard.shard != lost;
    new_index.push_back(keep ? static_cast<int>(shards.size()) : -1);
    if (keep) shards.push_back(shard);
  }
  PlacementTable result(epoch, table.layers(), table.experts(), std::move(shards));
  for (uint32_t layer = 0; layer < table.layers(); ++layer) {
    for (uint32_t expert = 0; expert < table.experts(); ++expert) {
      for (const uint16_t home : table.homes(layer, expert)) {
        if (new_index[home] >= 0) result.add_home(layer, expert, static_cast<uint16_t>(new_index[home]));
      }
    }
  }
  return result;
}

std::string two_digits(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

}  // namespace

PlacementPlanner::PlacementPlanner(const SchedulerOptions& options)
    : options_(options), load_(options.load_half_life_s * kSecond) {}

void PlacementPlanner::set_model(uint32_t layers, uint32_t experts) {
  layers_ = layers;
  experts_ = experts;
  load_.set_experts(static_cast<size_t>(layers) * experts);
}

void PlacementPlanner::want(std::string why, TimePoint when) {
  if (wanted_at_ != kNever) why = wanted_ + ", " + why;
  // Bounded: many may join and leave while a change is on its way.
  if (why.size() <= 256) wanted_ = std::move(why);
  wanted_at_ = std::min(wanted_at_, when);
}

void PlacementPlanner::shard_joined(const ShardEndpoint& shard, uint64_t slots, TimePoint now) {
  CONCLAVE_CHECK(live_.emplace(shard.shard, Shard{shard, slots, false}).second);
  // Where workers have nowhere to go there is nothing to gain by waiting for more than the settling time
  // either: the first shard alone would have to hold everything.
  want(shard.name + " joined", now + options_.placement_settle_ms * kMillisecond);
}

void PlacementPlanner::shard_leaving(Incarnation shard, TimePoint now) {
  const auto it = live_.find(shard);
  if (it == live_.end() || it->second.leaving) return;
  it->second.leaving = true;
  want(it->second.endpoint.name + " leaves", now);
}

void PlacementPlanner::shard_lost(Incarnation shard, TimePoint now) {
  const auto it = live_.find(shard);
  if (it == live_.end()) return;
  const std::string why = it->second.endpoint.name + " is lost";
  live_.erase(it);
  load_.forget(shard);
  const bool was_active = active_.find_shard(shard) >= 0;
  if (was_active) activate(without(active_, Epoch(next_epoch_++), shard), true, why);
  if (live_.empty()) {
    target_.reset();
    waiting_for_.clear();
    wanted_at_ = kNever;
    rebalance_at_ = kNever;
    return;
  }
  const bool in_target = target_ && target_->table.find_shard(shard) >= 0;
  if (!was_active && !in_target) return;
  if (in_target || !target_ || !active_complete_) {
    // Survivors take over at once; a join that was settling is part of it.
    change(why, now);
  } else {
    want(why, now);  // after what is prepared without it anyway
  }
}

bool PlacementPlanner::shard_load(Incarnation shard, const ExpertLoad& report, TimePoint now) {
  if (!load_.add(shard, report, now)) return false;
  if (rebalance_at_ == kNever && options_.rebalance_interval_s > 0 && live_.size() > 1)
    rebalance_at_ = now + options_.rebalance_interval_s * kSecond;
  return true;
}

std::vector<std::vector<uint16_t>> PlacementPlanner::current_homes(
    const std::vector<Incarnation>& order) const {
  std::vector<std::vector<uint16_t>> homes(static_cast<size_t>(layers_) * experts_);
  std::vector<int> index_of(active_.shards().size(), -1);
  for (size_t i = 0; i < order.size(); ++i) {
    if (const int at = active_.find_shard(order[i]); at >= 0) index_of[at] = static_cast<int>(i);
  }
  for (uint32_t layer = 0; layer < active_.layers(); ++layer) {
    for (uint32_t expert = 0; expert < active_.experts(); ++expert) {
      for (const uint16_t home : active_.homes(layer, expert)) {
        if (index_of[home] >= 0) {
          homes[static_cast<size_t>(layer) * experts_ + expert].push_back(
              static_cast<uint16_t>(index_of[home]));
        }
      }
    }
  }
  return homes;
}

PlacementPlanner::Proposal PlacementPlanner::propose(bool first_aid, double improve_ratio) const {
  Proposal proposal;
  std::vector<BalanceShard> shards;
  for (const auto& [incarnation, shard] : live_) {
    proposal.order.push_back(incarnation);
    shards.push_back({incarnation, shard.slots, shard.leaving});
  }
  BalanceOptions options;
  options.min_replicas = first_aid ? 1 : options_.min_replicas;
  options.max_replicas = options_.max_replicas;
  options.improve_ratio = improve_ratio;
  options.repair_only = first_aid;
  const auto current = current_homes(proposal.order);
  proposal.balance = balance_experts(layers_, experts_, load_.weights(), shards, current, options);
  if (!proposal.balance.complete) {
    // Who leaves stays as long as the others have no room for all that it holds. Who holds nothing any more was told
    // that it is drained, and may be stopped at any time: it gets nothing.
    for (BalanceShard& shard : shards) shard.leaving = shard.leaving && active_.find_shard(shard.shard) < 0;
    Balance all = balance_experts(layers_, experts_, load_.weights(), shards, current, options);
    if (all.complete) proposal.balance = std::move(all);
  }
  CONCLAVE_CHECK(proposal.balance.homes.size() == static_cast<size_t>(layers_) * experts_);
  return proposal;
}

bool PlacementPlanner::differs(const Proposal& proposal) const {
  if (active_.layers() != layers_) return true;
  auto current = current_homes(proposal.order);
  std::vector<char> named(proposal.order.size(), 0);
  for (size_t i = 0; i < current.size(); ++i) {
    std::vector<uint16_t> next = proposal.balance.homes[i];
    for (const uint16_t home : next) named[home] = 1;
    std::sort(next.begin(), next.end());
    std::sort(current[i].begin(), current[i].end());
    if (next != current[i]) return true;
  }
  // A shard without experts that workers know of, and that leaves.
  for (size_t s = 0; s < proposal.order.size(); ++s) {
    if (!named[s] && live_.at(proposal.order[s]).leaving && active_.find_shard(proposal.order[s]) >= 0)
      return true;
  }
  return false;
}

PlacementTable PlacementPlanner::table_of(const Proposal& proposal) {
  const auto& homes = proposal.balance.homes;
  std::vector<char> named(proposal.order.size(), 0);
  for (const auto& list : homes) {
    for (const uint16_t home : list) named[home] = 1;
  }
  std::vector<ShardEndpoint> shards;
  std::vector<uint16_t> index_of(proposal.order.size(), 0);
  for (size_t s = 0; s < proposal.order.size(); ++s) {
    const Shard& shard = live_.at(proposal.order[s]);
    if (shard.leaving && !named[s]) continue;
    index_of[s] = static_cast<uint16_t>(shards.size());
    shards.push_back(shard.endpoint);
  }
  PlacementTable table(Epoch(next_epoch_++), layers_, experts_, std::move(shards));
  for (uint32_t layer = 0; layer < layers_; ++layer) {
    for (uint32_t expert = 0; expert < experts_; ++expert) {
      for (const uint16_t home : homes[static_cast<size_t>(layer) * experts_ + expert])
        table.add_home(layer, expert, index_of[home]);
    }
  }
  return table;
}

void PlacementPlanner::change(const std::string& why, TimePoint now) {
  wanted_at_ = kNever;
  // What was being prepared is overtaken; shards keep what they have of it until the next release.
  const bool overtaken = target_.has_value();
  target_.reset();
  waiting_for_.clear();
  if (last_to_go()) return;
  const bool first_aid = !active_complete_;
  Proposal proposal = propose(first_aid, options_.rebalance_ratio);
  if (active_complete_ && !proposal.balance.complete) return;
  if (differs(proposal)) {
    prepare(std::move(proposal), first_aid, why, now);
  } else if (overtaken && !unreleased_) {
    release();
  }
}

Epoch PlacementPlanner::prepare(Proposal proposal, bool first_aid, const std::string& why, TimePoint now) {
  const Balance& balance = proposal.balance;
  Target target{table_of(proposal), first_aid, now};
  const Epoch epoch = target.table.epoch();
  waiting_for_.clear();
  for (const ShardEndpoint& shard : target.table.shards()) waiting_for_.insert(shard.shard);
  homes_added_ += balance.added;
  homes_removed_ += balance.removed;
  ++changes_;
  std::string note = why + ": " + std::to_string(balance.added) + " homes more, " +
                     std::to_string(balance.removed) + " fewer, the busiest shard from " +
                     two_digits(balance.busiest_before) + " to " + two_digits(balance.busiest_after);
  out_.push_back({PlacementOut::What::kPrepare, target.table, first_aid, std::move(note)});
  target_ = std::move(target);
  return epoch;
}

void PlacementPlanner::activate(PlacementTable table, bool urgent, std::string note) {
  active_ = std::move(table);
  active_complete_ = active_.complete();
  unreleased_ = true;
  out_.push_back({PlacementOut::What::kActivate, active_, urgent, std::move(note)});
}

void PlacementPlanner::release() {
  // Shards may have prepared a newer one that was overtaken: then it comes to them under an epoch of its own.
  const bool newest = active_.epoch() == this->newest();
  out_.push_back({PlacementOut::What::kRelease,
                  newest ? active_ : without(active_, Epoch(next_epoch_++), Incarnation()), false, ""});
}

void PlacementPlanner::shard_ready(Incarnation shard, Epoch epoch, TimePoint now) {
  if (!target_ || target_->table.epoch() != epoch) return;  // of a placement that was overtaken
  waiting_for_.erase(shard);
  if (!waiting_for_.empty()) return;
  Target done = std::move(*target_);
  target_.reset();
  // A loss that left the target in place made a newer one.
  if (done.table.epoch() < active_.epoch()) {
    done.table = without(done.table, Epoch(next_epoch_++), Incarnation());
  }
  activate(std::move(done.table), false, "every shard is ready");
  if (done.first_aid) want("replicas", now);
}

void PlacementPlanner::workers_use(Epoch oldest, TimePoint) {
  if (!unreleased_ || oldest < active_.epoch()) return;
  unreleased_ = false;
  // Shards of a target would let go of what it gives them; the release that follows it covers this one.
  if (!target_) release();
}

void PlacementPlanner::on_time(TimePoint now) {
  if (wanted_at_ <= now && may_begin()) change(wanted_, now);
  if (rebalance_at_ <= now && idle()) {
    rebalance_at_ = kNever;  // the next report of load sets it again
    if (active_complete_) change("balance", now);
  }
}

StatusOr<RebalanceSummary> PlacementPlanner::rebalance(bool dry_run, TimePoint now) {
  if (live_.empty() || !active_complete_)
    return failed_precondition("there is no placement yet that could be balanced");
  if (last_to_go()) return failed_precondition("every shard is drained: none is left to balance over");
  if (!dry_run && (!idle() || wanted_at_ != kNever))
    return failed_precondition("another change of the placement is on its way; try again when it is done");
  Proposal proposal = propose(false, kAskedRatio);
  const Balance& balance = proposal.balance;
  RebalanceSummary summary{balance.added, balance.removed, balance.busiest_before, balance.busiest_after,
                           Epoch()};
  if (!balance.complete) return failed_precondition("the shards have no room for every expert");
  if (!dry_run && differs(proposal)) summary.epoch = prepare(std::move(proposal), false, "asked for", now);
  return summary;
}

bool PlacementPlanner::last_to_go() const {
  return std::all_of(live_.begin(), live_.end(), [](const auto& entry) { return entry.second.leaving; });
}

bool PlacementPlanner::free_to_go(Incarnation shard) const {
  if (!live_.contains(shard) || last_to_go()) return true;
  const bool named = active_.find_shard(shard) >= 0 || (target_ && target_->table.find_shard(shard) >= 0);
  return !named && !unreleased_;
}

std::vector<Incarnation> PlacementPlanner::overdue(TimePoint now) const {
  if (!target_ || now < target_->since + options_.placement_ready_timeout_ms * kMillisecond) return {};
  return {waiting_for_.begin(), waiting_for_.end()};
}

TimePoint PlacementPlanner::next_timer() const {
  TimePoint next = target_ ? target_->since + options_.placement_ready_timeout_ms * kMillisecond : kNever;
  if (may_begin()) next = std::min(next, wanted_at_);
  if (idle()) next = std::min(next, rebalance_at_);
  return next;
}

std::vector<PlacementOut> PlacementPlanner::take() {
  std::vector<PlacementOut> out;
  out.swap(out_);
  return out;
}

uint64_t PlacementPlanner::slots() const {
  uint64_t sum = 0;
  for (const auto& [incarnation, shard] : live_) {
    if (shard.leaving) continue;
    if (shard.slots > UINT64_MAX - sum) return UINT64_MAX;
    sum += shard.slots;
  }
  return sum;
}

std::map<Incarnation, ShardFigures> PlacementPlanner::figures(TimePoint now) const {
  std::map<Incarnation, ShardFigures> figures;
  for (const auto& [incarnation, shard] : live_) {
    ShardFigures& f = figures[incarnation];
    f.slots = shard.slots;
    f.load = load_.shard_rate(incarnation, now);
  }
  std::vector<ShardFigures*> of_home;
  for (const ShardEndpoint& shard : active_.shards()) of_home.push_back(&figures[shard.shard]);
  for (uint32_t layer = 0; layer < active_.layers(); ++layer) {
    for (uint32_t expert = 0; expert < active_.experts(); ++expert) {
      const auto& homes = active_.homes(layer, expert);
      const double rate = load_.rate(static_cast<size_t>(layer) * experts_ + expert, now);
      for (const uint16_t home : homes) {
        ++of_home[home]->homes;
        of_home[home]->sole_homes += homes.size() == 1 ? 1 : 0;
        of_home[home]->assigned_load += rate / static_cast<double>(homes.size());
      }
    }
  }
  return figures;
}

double PlacementPlanner::busiest(bool by_layer) const {
  const size_t shards = active_.shards().size();
  if (shards == 0 || !load_.any()) return 0;
  std::vector<double> sum(shards, 0);
  double worst = 0;
  const auto ratio = [&] {
    double total = 0;
    for (const double load : sum) total += load;
    if (total <= 0) return 0.0;
    return *std::max_element(sum.begin(), sum.end()) * static_cast<double>(shards) / total;
  };
  for (uint32_t layer = 0; layer < active_.layers(); ++layer) {
    if (by_layer) std::fill(sum.begin(), sum.end(), 0);
    for (uint32_t expert = 0; expert < active_.experts(); ++expert) {
      const auto& homes = active_.homes(layer, expert);
      for (const uint16_t home : homes)
        sum[home] += load_.weights()[static_cast<size_t>(layer) * experts_ + expert] /
                     static_cast<double>(homes.size());
    }
    if (by_layer) worst = std::max(worst, ratio());
  }
  return by_layer ? worst : ratio();
}

}  // namespace conclave::scheduler
