// Placement in the scheduler core: replicas, joins, losses, drains, releases, load, rebalancing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr uint32_t kPairs = 16;  // of the harness's model: 2 layers of 8 experts

struct PlacementHarness : Harness {
  explicit PlacementHarness(SchedulerOptions o = {}) : Harness(o) {
    worker = join_worker(101);
    gateway = join_gateway();
  }
  const PlacementTable& table() { return workers[worker].placement; }
  SessionId session(uint64_t shard) { return sessions[Incarnation(shard)]; }
  uint32_t homes(uint64_t shard) {
    const int index = table().find_shard(Incarnation(shard));
    uint32_t count = 0;
    each([&](const std::vector<uint16_t>& homes) {
      count += std::count(homes.begin(), homes.end(), index) > 0 ? 1 : 0;
    });
    return count;
  }
  // The fewest homes of any expert.
  size_t least() {
    size_t least = 99;
    each([&](const std::vector<uint16_t>& homes) { least = std::min(least, homes.size()); });
    return least;
  }
  void each(const std::function<void(const std::vector<uint16_t>&)>& f) {
    for (uint32_t l = 0; l < table().layers(); ++l) {
      for (uint32_t e = 0; e < table().experts(); ++e) f(table().homes(l, e));
    }
  }
  void lose(uint64_t shard) {
    event(MemberLost{session(shard), unavailable("killed")});
    closed[session(shard)] = unavailable("killed");
    to_prepare.erase(session(shard));
  }
  void load(uint64_t shard, std::vector<ExpertLoad::Entry> entries) {
    event(MemberMessage{session(shard), ExpertLoad{std::move(entries)}});
  }
  // Time passes; everybody keeps their leases.
  void pass(Nanos time) {
    for (Nanos t = 0; t < time; t += 200 * kMillisecond) {
      advance(200 * kMillisecond);
      heartbeat_all();
    }
  }
  MemberSnapshot member(uint64_t incarnation) {
    for (const MemberSnapshot& m : core.status().members) {
      if (m.incarnation == Incarnation(incarnation)) return m;
    }
    return {};
  }
  static bool names(const PlacementTable& table, uint64_t shard) {
    return table.find_shard(Incarnation(shard)) >= 0;
  }
};

TEST(PlacementChange, TheFirstPlacementServesWithOneHomeEachAndReplicasFollow) {
  PlacementHarness h;
  const SessionId a = h.join(Harness::member_hello(Role::kExpert, 201));
  const SessionId b = h.join(Harness::member_hello(Role::kExpert, 202));
  h.advance(h.options.placement_settle_ms * kMillisecond);
  ASSERT_EQ(h.to_prepare.size(), 2u);
  h.ready_once();
  EXPECT_TRUE(h.gateways[h.gateway].fleet.ready);
  EXPECT_EQ(h.homes(201), kPairs / 2);
  EXPECT_EQ(h.homes(202), kPairs / 2);
  EXPECT_EQ(h.core.metrics().experts_short, kPairs);
  EXPECT_EQ(h.released[a].epoch(), h.table().epoch()) << "the worker uses it";
  ASSERT_EQ(h.to_prepare.size(), 2u) << "replicas";
  h.ready_once();
  EXPECT_EQ(h.least(), 2u);
  EXPECT_EQ(h.core.metrics().experts_short, 0u);
  EXPECT_TRUE(h.to_prepare.empty()) << "and that is all";
  EXPECT_EQ(h.released[b].epoch(), h.table().epoch());
  EXPECT_EQ(h.core.metrics().homes_added, 2 * kPairs);
}

TEST(PlacementChange, NothingIsLetGoBeforeEveryWorkerUsesTheNewPlacement) {
  SchedulerOptions options;
  options.min_replicas = 1;
  PlacementHarness h(options);
  const SessionId other = h.join_worker(102);
  h.join_shard(201);
  const Epoch first = h.table().epoch();
  h.workers_confirm = false;
  h.confirms.clear();
  const SessionId b = h.join_shard(202);
  const Epoch second = h.table().epoch();
  ASSERT_GT(second, first);
  EXPECT_EQ(h.released[h.session(201)].epoch(), first);
  h.event(MemberMessage{h.worker, Heartbeat{second}});
  h.event(MemberMessage{other, Heartbeat{first}});
  h.event(MemberMessage{other, Heartbeat{}});  // says nothing of a placement
  EXPECT_EQ(h.released[h.session(201)].epoch(), first);
  // No other change begins meanwhile.
  h.join(Harness::member_hello(Role::kExpert, 203));
  h.pass(kSecond);
  EXPECT_TRUE(h.to_prepare.empty());
  h.event(MemberMessage{other, Heartbeat{second}});
  EXPECT_EQ(h.released[h.session(201)].epoch(), second);
  EXPECT_EQ(h.released[b].epoch(), second);
  EXPECT_FALSE(h.to_prepare.empty()) << "the join that waited";
}

TEST(PlacementChange, AWorkerThatIsLostOrJoinsDoesNotHoldReleasesUp) {
  SchedulerOptions options;
  options.min_replicas = 1;
  PlacementHarness h(options);
  const SessionId other = h.join_worker(102);
  h.join_shard(201);
  h.workers_confirm = false;
  h.join_shard(202);
  h.event(MemberMessage{h.worker, Heartbeat{h.table().epoch()}});
  EXPECT_NE(h.released[h.session(201)].epoch(), h.table().epoch());
  h.event(MemberLost{other, unavailable("killed")});
  EXPECT_EQ(h.released[h.session(201)].epoch(), h.table().epoch());
}

TEST(PlacementChange, WithoutAnyWorkerChangesGoOn) {
  Harness h;
  h.join_shard(201);
  h.join_shard(202);
  h.join_shard(203);
  const SessionId worker = h.join_worker(101);
  EXPECT_TRUE(h.workers[worker].placement.complete());
  EXPECT_EQ(h.workers[worker].placement.shards().size(), 3u);
  EXPECT_FALSE(h.released.empty());
}

TEST(PlacementChange, AJoinTakesItsShareAndOnlyThat) {
  PlacementHarness h;
  h.join_shard(201);
  h.join_shard(202);
  const uint64_t before = h.core.metrics().homes_added;
  h.join_shard(203);
  EXPECT_EQ(h.least(), 2u);
  const uint64_t moved = h.core.metrics().homes_added - before;
  EXPECT_EQ(moved, h.homes(203)) << "nothing moved between the others";
  EXPECT_GE(h.homes(203), 2 * kPairs / 3 - 2);
  EXPECT_LE(h.homes(203), 2 * kPairs / 3 + 2);
}

TEST(PlacementChange, WithReplicasALossStopsNothingAndReplicasAreMadeAgain) {
  PlacementHarness h;
  h.join_shard(201);
  h.join_shard(202);
  h.join_shard(203);
  const AcceptedRequest r = Harness::request(1, 8, 30);
  h.submit(r);
  h.lose(202);
  EXPECT_TRUE(h.table().complete());
  EXPECT_FALSE(PlacementHarness::names(h.table(), 202));
  EXPECT_TRUE(h.gateways[h.gateway].fleet.ready);
  EXPECT_EQ(h.least(), 1u);
  ASSERT_EQ(h.to_prepare.size(), 2u) << "at once";
  h.step(h.worker);
  EXPECT_FALSE(h.workers[h.worker].plans.empty()) << "steps go on";
  h.ready_all();
  EXPECT_EQ(h.least(), 2u);
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r.prompt, r.sampling));
}

TEST(PlacementChange, ALossDuringAChangeOvertakesIt) {
  SchedulerOptions options;
  options.min_replicas = 1;
  PlacementHarness h(options);
  h.join_shard(201);
  h.join_shard(202);
  const SessionId c = h.join(Harness::member_hello(Role::kExpert, 203));
  h.advance(h.options.placement_settle_ms * kMillisecond);
  const Epoch overtaken = h.to_prepare.at(c).epoch();
  h.lose(202);
  EXPECT_FALSE(h.table().complete());
  const Epoch aid = h.to_prepare.at(c).epoch();
  ASSERT_GT(aid, overtaken);
  EXPECT_FALSE(PlacementHarness::names(h.to_prepare.at(c), 202));
  EXPECT_TRUE(h.to_prepare.at(c).complete());
  h.event(MemberMessage{c, PlacementReady{overtaken}});  // late
  h.event(MemberMessage{h.session(201), PlacementReady{overtaken}});
  EXPECT_FALSE(h.table().complete());
  h.ready_all();
  EXPECT_TRUE(h.table().complete());
  EXPECT_GE(h.table().epoch(), aid);
  EXPECT_GT(h.homes(203), 0u);
}

// A scheduler that was started anew hears of it from the shard.
TEST(PlacementDrain, AShardThatAnotherSchedulerDrainedGetsNothing) {
  PlacementHarness h;
  for (const uint64_t shard : {201, 202, 203}) {
    Hello hello = Harness::member_hello(Role::kExpert, shard);
    hello.drained = shard == 202;
    h.join(hello);
  }
  h.advance(h.options.placement_settle_ms * kMillisecond);
  h.ready_all();
  EXPECT_FALSE(PlacementHarness::names(h.table(), 202));
  EXPECT_EQ(h.least(), 2u);
  EXPECT_EQ(h.member(202).state, "drained");
  EXPECT_EQ(h.drained[h.session(202)], 1);
}

TEST(PlacementDrain, NothingIsBalancedOverShardsThatAreAllDrained) {
  PlacementHarness h;
  for (const uint64_t shard : {201, 202}) h.join_shard(shard);
  for (const uint64_t shard : {201, 202}) {
    h.event(DrainMember{shard, Incarnation(shard)});
    h.ready_all();
  }
  for (const bool dry : {true, false}) {
    h.event(Rebalance{1, dry});
    EXPECT_EQ(h.rebalance_replies.at(1).status().code(), StatusCode::kFailedPrecondition);
  }
  EXPECT_TRUE(h.to_prepare.empty());
}

Hello limited_hello(uint64_t shard, uint64_t slots, bool drained) {
  Hello hello = Harness::member_hello(Role::kExpert, shard);
  hello.expert_bytes = 100;
  hello.capacity_bytes = 100 * slots;
  hello.drained = drained;
  return hello;
}

// What was told that it is drained may be stopped at any time.
TEST(PlacementDrain, ADrainedShardGetsNothingWhereTheOthersLackRoom) {
  PlacementHarness h;
  for (const uint64_t shard : {201, 202, 203}) h.join(limited_hello(shard, 10, false));
  h.advance(h.options.placement_settle_ms * kMillisecond);
  h.ready_all();
  h.event(DrainMember{7, Incarnation(202)});
  h.ready_all();
  h.pass(kSecond);
  h.ready_all();
  EXPECT_EQ(h.member(202).state, "drained");
  EXPECT_FALSE(PlacementHarness::names(h.table(), 202));
  h.lose(203);
  h.pass(kSecond);
  h.ready_all();
  EXPECT_FALSE(PlacementHarness::names(h.table(), 202)) << "homes " << h.homes(202) << " state " << h.member(202).state;
}

TEST(PlacementDrain, ADrainedShardGetsNothingWhileOthersJoinAnotherScheduler) {
  PlacementHarness h;
  h.join(limited_hello(201, 10, false));
  h.join(limited_hello(202, 10, true));
  h.pass(kSecond);
  h.ready_all();
  EXPECT_FALSE(PlacementHarness::names(h.table(), 202)) << "homes " << h.homes(202) << " state " << h.member(202).state;
  h.join(limited_hello(203, 10, false));
  h.pass(kSecond);
  h.ready_all();
  EXPECT_FALSE(PlacementHarness::names(h.table(), 202)) << "homes " << h.homes(202) << " state " << h.member(202).state;
}

// What the drain prepares is without the one that is lost anyway; it goes on, at full speed if need be.
TEST(PlacementChange, ALeavingShardThatIsLostLeavesTheChangeThatReplacesItInPlace) {
  PlacementHarness h;
  for (const uint64_t shard : {201, 202, 203}) h.join_shard(shard);
  h.event(DrainMember{1, Incarnation(202)});
  ASSERT_FALSE(h.to_prepare.empty());
  const Epoch epoch = h.to_prepare.begin()->second.epoch();
  h.lose(202);
  EXPECT_TRUE(h.table().complete());
  EXPECT_EQ(h.to_prepare.begin()->second.epoch(), epoch);
  h.ready_all();
  EXPECT_EQ(h.least(), 2u);
}

TEST(PlacementChange, AJoinWhileNothingServesIsTakenIntoThePreparation) {
  PlacementHarness h;
  const SessionId a = h.join(Harness::member_hello(Role::kExpert, 201));
  h.advance(h.options.placement_settle_ms * kMillisecond);
  const Epoch alone = h.to_prepare.at(a).epoch();
  h.join(Harness::member_hello(Role::kExpert, 202));
  h.advance(h.options.placement_settle_ms * kMillisecond);
  EXPECT_GT(h.to_prepare.at(a).epoch(), alone);
  EXPECT_EQ(h.to_prepare.at(a).shards().size(), 2u);
}

TEST(PlacementDrain, AShardIsDrainedWhenNoWorkerUsesItAnyMore) {
  PlacementHarness h;
  for (const uint64_t shard : {201, 202, 203}) h.join_shard(shard);
  const AcceptedRequest r = Harness::request(1, 8, 30);
  h.submit(r);
  h.step(h.worker);
  h.event(DrainMember{7, Incarnation(202)});
  EXPECT_TRUE(h.drain_replies.at(7).ok());
  EXPECT_EQ(h.member(202).state, "draining");
  EXPECT_EQ(h.drained[h.session(202)], 0);
  h.workers_confirm = false;
  h.ready_all();
  EXPECT_FALSE(PlacementHarness::names(h.table(), 202));
  EXPECT_EQ(h.least(), 2u);
  EXPECT_EQ(h.drained[h.session(202)], 0) << "the worker may still ask it";
  h.workers_confirm = true;
  h.confirm();
  EXPECT_EQ(h.drained[h.session(202)], 1);
  EXPECT_EQ(h.member(202).state, "drained");
  EXPECT_EQ(h.released[h.session(202)].epoch(), h.table().epoch()) << "it lets go of all";
  EXPECT_THAT(h.notes, Contains("draining: expert-202"));
  EXPECT_THAT(h.notes, Contains("drained: expert-202"));
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r.prompt, r.sampling));
  // It gets nothing again as long as it is a member, and its end changes nothing.
  h.join_shard(204);
  EXPECT_FALSE(PlacementHarness::names(h.table(), 202));
  const Epoch epoch = h.table().epoch();
  h.lose(202);
  EXPECT_EQ(h.table().epoch(), epoch);
}

TEST(PlacementDrain, TheLastShardGoesAtOnceAndSoDoAllTogether) {
  PlacementHarness h;
  h.join_shard(201);
  h.event(MemberMessage{h.session(201), Leaving{}});
  EXPECT_EQ(h.drained[h.session(201)], 1);
  EXPECT_THAT(h.notes, Contains(HasSubstr("no shard is left that could take over")));
  EXPECT_TRUE(h.table().complete()) << "it serves until it is gone";

  PlacementHarness both;
  both.join_shard(201);
  both.join_shard(202);
  both.event(MemberMessage{both.session(201), Leaving{}});
  EXPECT_EQ(both.drained[both.session(201)], 0);
  both.event(MemberMessage{both.session(202), Leaving{}});
  EXPECT_EQ(both.drained[both.session(201)], 1);
  EXPECT_EQ(both.drained[both.session(202)], 1);
}

TEST(PlacementDrain, WithoutRoomElsewhereItWaitsForAShardThatHasSome) {
  SchedulerOptions options;
  PlacementHarness h(options);
  const auto limited = [&](uint64_t incarnation, uint64_t slots) {
    Hello hello = Harness::member_hello(Role::kExpert, incarnation);
    hello.expert_bytes = 100;
    hello.capacity_bytes = 100 * slots + 99;
    h.join(hello);
    h.advance(h.options.placement_settle_ms * kMillisecond);
    h.ready_all();
  };
  limited(201, 10);
  EXPECT_THAT(h.gateways[h.gateway].fleet.not_ready, HasSubstr("room for 10 of 16 experts"));
  limited(202, 10);
  ASSERT_TRUE(h.gateways[h.gateway].fleet.ready);
  EXPECT_LE(h.homes(201), 10u);
  EXPECT_LE(h.homes(202), 10u);
  EXPECT_EQ(h.member(201).shard.slots, 10u);
  h.event(DrainMember{1, Incarnation(201)});
  h.ready_all();
  EXPECT_TRUE(h.table().complete());
  EXPECT_EQ(h.drained[h.session(201)], 0);
  EXPECT_EQ(h.member(201).state, "draining");
  limited(203, 8);
  EXPECT_TRUE(h.table().complete());
  EXPECT_EQ(h.drained[h.session(201)], 1);
}

TEST(PlacementDrain, AShardThatWasNeverPlacedGoesAtOnce) {
  PlacementHarness h;
  h.join_shard(201);
  const SessionId b = h.join(Harness::member_hello(Role::kExpert, 202));
  h.event(DrainMember{1, Incarnation(202)});
  EXPECT_EQ(h.drained[b], 1);
  h.pass(kSecond);
  EXPECT_TRUE(h.to_prepare.empty());
}

TEST(PlacementLoad, IsMeasuredWeightedAndShown) {
  SchedulerOptions options;
  options.rebalance_interval_s = 0;
  PlacementHarness h(options);
  h.join_shard(201);
  h.join_shard(202);
  EXPECT_EQ(h.core.status().busiest, 0);
  for (int i = 0; i < 600; ++i) {
    h.load(201, {{3, 50}, {8, 10}});
    h.load(202, {{3, 50}});
    h.pass(kSecond);
  }
  const auto all = h.core.experts(std::nullopt);
  ASSERT_TRUE(all.ok());
  ASSERT_EQ(all->load.size(), kPairs);
  EXPECT_NEAR(all->load[3], 100, 3);
  EXPECT_NEAR(all->load[8], 10, 0.3);
  EXPECT_EQ(all->load[0], 0);
  const auto second = h.core.experts(1);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->first_layer, 1u);
  ASSERT_EQ(second->homes.size(), kPairs / 2);
  EXPECT_NEAR(second->load[0], 10, 0.3);
  EXPECT_EQ(second->homes[0].size(), 2u);
  EXPECT_EQ(field_of(h.core.experts(2).status()), "layer");
  EXPECT_NEAR(h.member(201).shard.load, 60, 2);
  EXPECT_NEAR(h.member(202).shard.assigned_load, 55, 2);
  EXPECT_EQ(h.member(202).shard.homes, kPairs);
  EXPECT_NEAR(h.core.status().busiest, 1, 1e-9);
  // A half-life later it counts half.
  h.pass(options.load_half_life_s * kSecond);
  h.load(201, {{1, 1}});
  EXPECT_NEAR(h.core.experts(0)->load[3], 50, 2);
  EXPECT_EQ(h.core.metrics().shard_gauges->size(), 2u);
}

TEST(PlacementLoad, WhatMakesNoSenseEndsTheMembership) {
  PlacementHarness h;
  h.join_shard(201);
  h.load(201, {{kPairs, 1}});
  EXPECT_THAT(h.refusals[h.session(201)], HasSubstr("not there"));
  h.event(MemberMessage{h.worker, ExpertLoad{}});
  EXPECT_TRUE(h.closed.contains(h.worker));
}

struct SkewedHarness : PlacementHarness {
  explicit SkewedHarness(SchedulerOptions o = one_home()) : PlacementHarness(o) {
    for (const uint64_t shard : {201, 202}) join_shard(shard);
  }
  static SchedulerOptions one_home() {
    SchedulerOptions options;
    options.min_replicas = 1;
    options.max_replicas = 1;
    return options;
  }
  // The experts of the first shard are asked for `skew` times as much.
  void skew(double times) {
    for (uint64_t shard = 201; shard <= 202; ++shard) {
      std::vector<ExpertLoad::Entry> entries;
      for (uint32_t i = 0; i < kPairs; ++i) {
        const auto& homes = table().homes(i / 8, i % 8);
        if (table().shards()[homes[0]].shard != Incarnation(shard)) continue;
        entries.push_back({i, static_cast<uint64_t>(100 * (shard == 201 ? times : 1))});
      }
      load(shard, entries);
    }
  }
};

TEST(PlacementRebalance, HappensByItselfBeyondTheRatioAndNotBelow) {
  SkewedHarness h;
  const Epoch before = h.table().epoch();
  h.skew(1.1);  // the busier one has 1.05 times the mean
  h.pass(40 * kSecond);
  EXPECT_TRUE(h.to_prepare.empty());
  EXPECT_EQ(h.table().epoch(), before);
  for (int i = 0; i < 10; ++i) h.skew(5);
  const double skewed = h.core.status().busiest;
  EXPECT_GT(skewed, 1.4);
  EXPECT_TRUE(h.to_prepare.empty()) << "not before its time";
  h.pass(40 * kSecond);
  ASSERT_FALSE(h.to_prepare.empty());
  EXPECT_THAT(h.notes.back(), HasSubstr("balance"));
  h.ready_all();
  EXPECT_GT(h.table().epoch(), before);
  EXPECT_LT(h.core.status().busiest, 1.15);
  const Epoch balanced = h.table().epoch();
  h.pass(120 * kSecond);
  EXPECT_EQ(h.table().epoch(), balanced) << "no churn";
}

TEST(PlacementRebalance, NeverWhereItIsOff) {
  SchedulerOptions options = SkewedHarness::one_home();
  options.rebalance_interval_s = 0;
  SkewedHarness h(options);
  h.skew(5);
  h.pass(120 * kSecond);
  EXPECT_TRUE(h.to_prepare.empty());
  EXPECT_EQ(h.core.metrics().placement_changes, 2u);
}

TEST(PlacementRebalance, OnDemandAndDry) {
  SchedulerOptions options = SkewedHarness::one_home();
  options.rebalance_interval_s = 0;
  SkewedHarness h(options);
  h.skew(5);
  h.event(Rebalance{1, true});
  ASSERT_TRUE(h.rebalance_replies.at(1).ok());
  const RebalanceSummary dry = *h.rebalance_replies.at(1);
  EXPECT_GT(dry.added, 0u);
  EXPECT_EQ(dry.added, dry.removed);
  EXPECT_LT(dry.busiest_after, dry.busiest_before);
  EXPECT_FALSE(dry.epoch);
  EXPECT_TRUE(h.to_prepare.empty());
  h.event(Rebalance{2, false});
  ASSERT_TRUE(h.rebalance_replies.at(2).ok());
  EXPECT_EQ(h.rebalance_replies.at(2)->added, dry.added);
  EXPECT_TRUE(h.rebalance_replies.at(2)->epoch);
  EXPECT_FALSE(h.to_prepare.empty());
  h.event(Rebalance{3, false});
  EXPECT_EQ(h.rebalance_replies.at(3).status().code(), StatusCode::kFailedPrecondition);
  h.ready_all();
  EXPECT_EQ(h.table().epoch(), h.rebalance_replies.at(2)->epoch);
  h.event(Rebalance{4, false});
  ASSERT_TRUE(h.rebalance_replies.at(4).ok());
  EXPECT_EQ(h.rebalance_replies.at(4)->added, 0u) << "nothing is left to do";

  Harness empty;
  empty.event(Rebalance{5, true});
  EXPECT_EQ(empty.rebalance_replies.at(5).status().code(), StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace conclave::scheduler
