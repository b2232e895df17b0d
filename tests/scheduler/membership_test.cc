// Hellos, fences, leases and placements of the scheduler core.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

using ::testing::HasSubstr;

TEST(Hello, AMemberThatDiffersFromTheFleetIsRefusedByName) {
  SchedulerOptions options;
  options.max_kv_blocks_per_worker = 1000;
  Harness h(options);
  h.make_ready();
  const auto refused = [&](void (*change)(Hello&)) {
    static uint64_t next = 300;
    Hello hello = Harness::member_hello(Role::kExpert, next++);
    change(hello);
    const SessionId session = h.join(hello);
    EXPECT_TRUE(h.closed.contains(session));
    EXPECT_FALSE(h.welcomes.contains(session));
    return h.refusals[session];
  };
  EXPECT_THAT(refused([](Hello& x) { x.numerics_id = "k2-cpu"; }),
              HasSubstr("numerics_id k2-cpu, this fleet has k1-cpu"));
  EXPECT_THAT(refused([](Hello& x) { x.model_fingerprint = "def"; }), HasSubstr("model_fingerprint"));
  EXPECT_THAT(refused([](Hello& x) { x.num_layers = 3; }), HasSubstr("num_layers 3, this fleet has 2"));
  EXPECT_THAT(refused([](Hello& x) { x.protocol_min = x.protocol_max = 9; }), HasSubstr("versions"));
  EXPECT_THAT(refused([](Hello& x) { x.role = Role::kRouter; }), HasSubstr("gateway session"));
  EXPECT_THAT(refused([](Hello& x) { x.transport_address.clear(); }), HasSubstr("needs one"));
  EXPECT_THAT(refused([](Hello& x) { x.role = Role::kAttention; }), HasSubstr("page"));
  EXPECT_THAT(refused([](Hello& x) { x.incarnation = Incarnation(201); }), HasSubstr("new one"));
  EXPECT_THAT(refused([](Hello& x) { x.num_layers = x.num_experts = 65535; }),
              HasSubstr("experts in all layers"));
  EXPECT_THAT(refused([](Hello& x) { x.role = Role::kAttention, x.kv_blocks = 1001; }),
              HasSubstr("max_kv_blocks_per_worker"));
  EXPECT_THAT(refused([](Hello& x) { x.name.assign(5000, 'x'); }), HasSubstr("too long"));
  EXPECT_EQ(h.core.metrics().members_refused, 11u);
}

TEST(Hello, TheFirstMessageMustBeOne) {
  Harness h;
  h.event(MemberMessage{SessionId(50), Heartbeat{}});
  EXPECT_TRUE(h.closed.contains(SessionId(50)));
}

TEST(Hello, ARouterWithAnotherModelIsTurnedAway) {
  Harness h;
  h.make_ready();
  Hello hello;
  hello.name = "router";
  hello.numerics_id = "other";
  h.event(GatewayJoined{SessionId(77), hello});
  EXPECT_EQ(h.gateways[SessionId(77)].closed.code(), StatusCode::kFailedPrecondition);
  h.event(Submit{SessionId(77), Harness::request(1, 3, 3)});
  EXPECT_EQ(h.core.metrics().requests_accepted, 0u);
}

TEST(Fence, ALostIncarnationIsRefusedForEver) {
  Harness h;
  h.make_ready();
  h.event(MemberLost{h.worker, unavailable("reset")});
  const SessionId again = h.join_worker(101);
  EXPECT_THAT(h.refusals[again], HasSubstr("join again under a new one"));
  EXPECT_TRUE(h.welcomes.contains(h.join_worker(102)));
}

TEST(Fence, MemoryIsBoundedAndTheOldStayOut) {
  SchedulerOptions options;
  options.max_fenced_incarnations = 4;
  Harness h(options);
  h.make_ready();
  for (uint64_t i = 1000; i < 1020; ++i) {
    const SessionId session = h.join_worker(i);
    ASSERT_TRUE(h.welcomes.contains(session));
    h.event(MemberLost{session, unavailable("reset")});
  }
  EXPECT_TRUE(h.core.audit().ok());
  EXPECT_TRUE(h.refusals.contains(h.join_worker(1000)));
  EXPECT_TRUE(h.refusals.contains(h.join_worker(1019)));
  EXPECT_FALSE(h.refusals.contains(h.join_worker(1020)));
  EXPECT_FALSE(h.closed.contains(h.worker));  // a live member is not touched by the floor
}

TEST(Fence, TheSameIncarnationOnANewConnectionEndsTheOldMembership) {
  Harness h;
  h.make_ready();
  const SessionId again = h.join_worker(101);
  EXPECT_TRUE(h.closed.contains(h.worker));
  EXPECT_TRUE(h.refusals.contains(again));
}

TEST(Lease, ASilentWorkerIsSuspectThenDeadAndAHeartbeatLiftsSuspicion) {
  Harness h;
  h.make_ready();
  const auto beat_others = [&] { h.event(MemberMessage{h.sessions[Incarnation(201)], Heartbeat{}}); };
  h.advance(400 * kMillisecond);
  beat_others();
  h.advance(200 * kMillisecond);
  beat_others();
  const auto state = [&] {
    for (const MemberSnapshot& m : h.core.status().members) {
      if (m.incarnation == Incarnation(101)) return m.state;
    }
    return std::string("gone");
  };
  EXPECT_EQ(state(), "suspect");
  h.submit(Harness::request(1, 4, 4));
  EXPECT_TRUE(h.workers[h.worker].plans.empty());  // no new work for a suspect
  h.event(MemberMessage{h.worker, Heartbeat{}});
  EXPECT_EQ(state(), "ready");
  EXPECT_FALSE(h.workers[h.worker].plans.empty());
  for (int i = 0; i < 20; ++i) {
    h.advance(300 * kMillisecond);
    beat_others();
  }
  EXPECT_EQ(state(), "gone");
  EXPECT_THAT(h.refusals[h.worker], HasSubstr("not heard"));
  EXPECT_EQ(h.core.metrics().requests_waiting, 1u);  // nothing is lost
}

TEST(Lease, TheSchedulersOwnStallIsNobodysFault) {
  Harness h;
  h.make_ready();
  h.now += 60 * kSecond;  // it did not run for a minute
  h.event(Tick{});
  EXPECT_FALSE(h.closed.contains(h.worker));
  EXPECT_EQ(h.core.metrics().stalls_forgiven, 1u);
  EXPECT_EQ(h.core.metrics().members_lost, 0u);
}

TEST(Trouble, AComplaintAndSilenceTogetherAreDeathSooner) {
  Harness h;
  h.make_ready();
  const SessionId shard = h.sessions[Incarnation(201)];
  h.event(MemberMessage{h.worker, PeerTrouble{Incarnation(201), "endpoint reset"}});
  EXPECT_FALSE(h.closed.contains(shard));
  for (int i = 0; i < 6; ++i) {
    h.advance(400 * kMillisecond);
    h.event(MemberMessage{h.worker, Heartbeat{}});
  }
  EXPECT_TRUE(h.closed.contains(shard));
  EXPECT_THAT(h.refusals[shard], HasSubstr("endpoint reset"));
}

TEST(Trouble, AShardThatIsHeardButFailsItsWorkersAgainAndAgainIsDead) {
  Harness h;
  h.make_ready();
  const SessionId shard = h.sessions[Incarnation(201)];
  for (uint32_t i = 0; i < h.options.max_peer_troubles; ++i) {
    EXPECT_FALSE(h.closed.contains(shard));
    h.event(MemberMessage{h.worker, PeerTrouble{Incarnation(201), "connection refused"}});
    h.event(MemberMessage{shard, Heartbeat{}});
  }
  h.advance(1);
  EXPECT_TRUE(h.closed.contains(shard));
  h.event(MemberMessage{h.worker, PeerTrouble{Incarnation(201), "late"}});  // about one who is gone
  EXPECT_EQ(h.core.metrics().members_lost, 1u);
}

TEST(Placement, WorkersSwitchWhenEveryShardIsReady) {
  Harness h;
  const SessionId worker = h.join_worker(101);
  h.gateway = h.join_gateway();
  EXPECT_FALSE(h.gateways[h.gateway].fleet.ready);
  EXPECT_THAT(h.gateways[h.gateway].fleet.not_ready, HasSubstr("no expert shard"));
  const SessionId a = h.join(Harness::member_hello(Role::kExpert, 201));
  const SessionId b = h.join(Harness::member_hello(Role::kExpert, 202));
  EXPECT_TRUE(h.to_prepare.empty());  // shards that come together are placed together
  h.advance(h.options.placement_settle_ms * kMillisecond);
  ASSERT_EQ(h.to_prepare.size(), 2u);
  const Epoch epoch = h.to_prepare[a].epoch();
  EXPECT_EQ(h.to_prepare[a].homes(0, 0), std::vector<uint16_t>{0});
  EXPECT_EQ(h.to_prepare[a].homes(0, 7), std::vector<uint16_t>{1});
  h.event(MemberMessage{a, PlacementReady{epoch}});
  EXPECT_FALSE(h.workers[worker].placement.epoch());
  EXPECT_THAT(h.gateways[h.gateway].fleet.not_ready, HasSubstr("preparing"));
  h.event(MemberMessage{b, PlacementReady{Epoch(epoch.value + 5)}});  // not this one
  EXPECT_FALSE(h.workers[worker].placement.epoch());
  h.event(MemberMessage{b, PlacementReady{epoch}});
  EXPECT_EQ(h.workers[worker].placement.epoch(), epoch);
  EXPECT_TRUE(h.gateways[h.gateway].fleet.ready);
  // A later worker gets it at once.
  const SessionId late = h.join_worker(102);
  EXPECT_EQ(h.workers[late].placement.epoch(), epoch);
}

// Requests that name no length get what the fleet can hold, and no more is promised to them.
TEST(Fleet, TheContextIsWhatTheLargestWorkerHolds) {
  Harness h;
  h.gateway = h.join_gateway();
  const auto context = [&] { return h.gateways[h.gateway].fleet.max_positions; };
  h.join_worker(101, 20);
  EXPECT_EQ(context(), 20 * kBlockTokens);
  h.join_worker(102, 30);
  EXPECT_EQ(context(), 30 * kBlockTokens);
  h.join_worker(103, 10000);
  EXPECT_EQ(context(), 4096u) << "the model's own";
}

TEST(Fleet, GatewaysHearHowMuchOfTheWeightsIsRead) {
  Harness h;
  h.gateway = h.join_gateway();
  const FleetInfo& fleet = h.gateways[h.gateway].fleet;
  EXPECT_EQ(fleet.loaded_permille, 0u);
  EXPECT_EQ(fleet.shard_set, 0u);
  const auto beat = [&](SessionId session, std::optional<uint32_t> loaded) {
    h.event(MemberMessage{session, Heartbeat{Epoch(), loaded}});
  };
  const SessionId worker = h.join_worker(101);
  beat(worker, 500);
  EXPECT_EQ(fleet.loaded_permille, 250u) << "no shard is there";
  const SessionId a = h.join(Harness::member_hello(Role::kExpert, 201));
  const SessionId b = h.join(Harness::member_hello(Role::kExpert, 202));
  beat(worker, 1000);
  beat(a, 400);
  EXPECT_EQ(fleet.loaded_permille, 600u);
  beat(a, 410);
  EXPECT_EQ(fleet.loaded_permille, 600u) << "not for every page";
  beat(a, std::nullopt);
  beat(b, 500);
  EXPECT_EQ(fleet.loaded_permille, 727u);
  h.advance(h.options.placement_settle_ms * kMillisecond);
  const Epoch epoch = h.to_prepare[a].epoch();
  h.event(MemberMessage{a, PlacementReady{epoch}});
  h.workers_confirm = false;
  h.event(MemberMessage{b, PlacementReady{epoch}});
  EXPECT_EQ(fleet.loaded_permille, 1000u);
  EXPECT_TRUE(fleet.ready);
  EXPECT_EQ(fleet.shard_set, 0u) << "the worker has not turned to it yet";
  const auto turn = [&](SessionId session) {
    h.event(MemberMessage{session, Heartbeat{h.workers[session].placement.epoch()}});
  };
  turn(worker);
  const uint64_t two = fleet.shard_set;
  EXPECT_GT(two, 0u);
  const SessionId other = h.join_worker(102);
  EXPECT_EQ(fleet.shard_set, two) << "one that has no placement yet is not waited for";
  turn(other);
  EXPECT_EQ(fleet.shard_set, two);
  h.workers_confirm = true;
  h.join_shard(203);
  EXPECT_GT(fleet.shard_set, two) << "another shard";
}

TEST(Placement, ALostShardsExpertsMoveToTheSurvivors) {
  SchedulerOptions options;
  options.min_replicas = 1;
  Harness h(options);
  h.make_ready();
  h.join_shard(202);
  ASSERT_TRUE(h.workers[h.worker].placement.complete());
  const AcceptedRequest r = Harness::request(1, 8, 30);
  h.submit(r);
  h.event(MemberLost{h.sessions[Incarnation(202)], unavailable("killed")});
  h.closed[h.sessions[Incarnation(202)]] = unavailable("killed");
  EXPECT_FALSE(h.workers[h.worker].placement.complete());  // at once: nothing goes to the dead one any more
  EXPECT_EQ(h.workers[h.worker].placement.find_shard(Incarnation(202)), -1);
  uint32_t homes = 0;
  for (uint32_t e = 0; e < 8; ++e) homes += h.workers[h.worker].placement.homes(0, e).size();
  EXPECT_EQ(homes, 4u) << "those of the survivor";
  const size_t held = h.workers[h.worker].plans.size();
  h.step(h.worker);
  EXPECT_EQ(h.workers[h.worker].plans.size(), held - 1);  // no further step without homes
  h.ready_all();
  EXPECT_TRUE(h.workers[h.worker].placement.complete());
  EXPECT_EQ(h.workers[h.worker].placement.shards().size(), 1u);
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r.prompt, r.sampling));
}

TEST(Placement, TheLastShardsReturnBringsServiceBack) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = Harness::request(1, 8, 30);
  h.submit(r);
  h.event(MemberLost{h.sessions[Incarnation(201)], unavailable("killed")});
  EXPECT_THAT(h.gateways[h.gateway].fleet.not_ready, HasSubstr("no expert shard"));
  EXPECT_TRUE(h.workers[h.worker].placement.shards().empty());
  h.join_shard(203);
  EXPECT_TRUE(h.gateways[h.gateway].fleet.ready);
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r.prompt, r.sampling));
}

TEST(Placement, AShardThatNeverGetsReadyIsDeclaredDead) {
  SchedulerOptions options;
  options.placement_ready_timeout_ms = 1000;
  Harness h(options);
  h.worker = h.join_worker(101);
  const SessionId a = h.join(Harness::member_hello(Role::kExpert, 201));
  const SessionId b = h.join(Harness::member_hello(Role::kExpert, 202));
  h.advance(h.options.placement_settle_ms * kMillisecond);
  h.event(MemberMessage{a, PlacementReady{h.to_prepare[a].epoch()}});
  h.to_prepare.clear();
  for (int i = 0; i < 4; ++i) {
    h.advance(300 * kMillisecond);
    h.heartbeat_all();
  }
  EXPECT_THAT(h.refusals[b], HasSubstr("did not get ready"));
  h.ready_all();
  EXPECT_TRUE(h.workers[h.worker].placement.complete());
}

TEST(Lease, AWorkerThatNeverFinishesAStepIsDeadHoweverWellItsLeaseIsKept) {
  SchedulerOptions options;
  options.step_timeout_ms = 2000;
  Harness h(options);
  h.make_ready();
  const AcceptedRequest r = Harness::request(1, 8, 30);
  h.submit(r);
  h.step(h.worker);
  const auto pass = [&](Nanos time) {
    for (Nanos t = 0; t < time; t += 200 * kMillisecond) {
      h.advance(200 * kMillisecond);
      h.heartbeat_all();
    }
  };
  // Steps that wait for a home of their experts are no fault of the worker.
  const SessionId shard = h.sessions[Incarnation(201)];
  h.event(MemberLost{shard, unavailable("killed")});
  h.closed[shard] = unavailable("killed");
  pass(5 * kSecond);
  EXPECT_FALSE(h.closed.contains(h.worker));
  h.join_shard(202);
  pass(1800 * kMillisecond);
  EXPECT_FALSE(h.closed.contains(h.worker));
  pass(400 * kMillisecond);
  EXPECT_TRUE(h.closed.contains(h.worker));
  EXPECT_THAT(h.refusals[h.worker], HasSubstr("did not finish a step in 2000 ms"));
  h.join_worker(102);
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r.prompt, r.sampling));
}

struct BadResult {
  const char* name;
  void (*change)(StepResult&);
};
class Violation : public ::testing::TestWithParam<BadResult> {};

TEST_P(Violation, EndsTheMembershipAndNotTheRequest) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = Harness::request(1, 4, 6);
  h.submit(r);
  auto& side = h.workers[h.worker];
  StepResult result = side.model.run(side.plans.front());
  side.plans.pop_front();
  GetParam().change(result);
  h.event(MemberMessage{h.worker, result});
  EXPECT_TRUE(h.closed.contains(h.worker));
  EXPECT_THAT(h.refusals[h.worker], HasSubstr("broke the protocol"));
  EXPECT_EQ(h.core.metrics().protocol_violations, 1u);
  EXPECT_TRUE(h.core.audit().ok());
  h.join_worker(102);
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r.prompt, r.sampling));
}

INSTANTIATE_TEST_SUITE_P(
    Results, Violation,
    ::testing::Values(BadResult{"step", [](StepResult& r) { r.step.value += 1; }},
                      BadResult{"position", [](StepResult& r) { r.sampled[0].position += 1; }},
                      BadResult{"token", [](StepResult& r) { r.sampled[0].token = kOracleVocab; }},
                      BadResult{"unknown", [](StepResult& r) { r.sampled[0].seq.value += 9; }},
                      BadResult{"twice", [](StepResult& r) { r.sampled.push_back(r.sampled[0]); }},
                      BadResult{"missing", [](StepResult& r) { r.sampled.clear(); }},
                      BadResult{"finish",
                                [](StepResult& r) { r.sampled[0].finish = FinishReason::kCancelled; }},
                      BadResult{"failure",
                                [](StepResult& r) {
                                  r.failures.push_back({SeqId(99), "of another"});
                                }}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(Violation, MessagesOfTheWrongRole) {
  Harness h;
  h.make_ready();
  const SessionId shard = h.sessions[Incarnation(201)];
  h.event(MemberMessage{shard, StepResult{}});
  EXPECT_TRUE(h.closed.contains(shard));
  h.event(MemberMessage{h.worker, PlacementReady{}});
  EXPECT_TRUE(h.closed.contains(h.worker));
}

TEST(Options, WhatMayNotBeCombined) {
  SchedulerOptions options;
  EXPECT_TRUE(options.validate().ok());
  options.max_batch_sequences = options.step_token_budget + 1;
  EXPECT_EQ(field_of(options.validate()), "max_batch_sequences");
  options = {};
  options.steps_in_flight = 0;
  EXPECT_EQ(field_of(options.validate()), "steps_in_flight");
  options = {};
  options.dead_after_ms = options.lease_ms - 1;
  EXPECT_EQ(field_of(options.validate()), "dead_after_ms");
}

TEST(Drain, MovesWhatRunsToAnotherWorkerAndTellsWhenItIsDone) {
  Harness h;
  h.make_ready();
  const SessionId other = h.join_worker(102);
  for (uint64_t id = 1; id <= 4; ++id) h.submit(Harness::request(id, 20, 30));
  for (int i = 0; i < 3; ++i) h.step(h.worker), h.step(other);
  ASSERT_GT(h.workers[h.worker].model.sequences(), 0u);
  h.event(DrainMember{7, Incarnation(101)});
  EXPECT_TRUE(h.drain_replies.at(7).ok());
  EXPECT_EQ(h.drained[h.worker], 0) << "its pages are still in use";
  h.run_all();
  EXPECT_EQ(h.drained[h.worker], 1);
  EXPECT_EQ(h.workers[h.worker].model.sequences(), 0u);
  EXPECT_GT(h.core.metrics().sequences_moved, 0u);
  h.submit(Harness::request(5, 20, 30));
  h.run_all();
  EXPECT_EQ(h.workers[h.worker].model.sequences(), 0u);
  for (uint64_t id = 1; id <= 5; ++id) {
    const AcceptedRequest r = Harness::request(id, 20, 30);
    EXPECT_EQ(h.tokens(id), oracle_answer(r.prompt, r.sampling));
  }
  EXPECT_TRUE(h.workers[h.worker].plans.empty());
  const auto members = h.core.status().members;
  EXPECT_TRUE(
      std::any_of(members.begin(), members.end(), [](const auto& m) { return m.state == "drained"; }));
  h.event(MemberLost{h.worker, unavailable("it ended")});
  EXPECT_EQ(h.core.metrics().members_lost, 0u) << "it was told that it may";
  h.event(MemberLost{other, unavailable("it ended")});
  EXPECT_EQ(h.core.metrics().members_lost, 1u);
}

TEST(Drain, WithoutAnotherWorkerWhatRunsEndsThereAndNewWorkWaitsForOne) {
  Harness h;
  h.make_ready();
  h.submit(Harness::request(1, 20, 30));
  h.step(h.worker);
  h.event(MemberMessage{h.worker, Leaving{}});
  EXPECT_FALSE(h.gateways[h.gateway].fleet.ready);
  EXPECT_THAT(h.gateways[h.gateway].fleet.not_ready, HasSubstr("draining"));
  h.submit(Harness::request(2, 20, 30));
  h.run_all();
  EXPECT_EQ(h.finish(1), FinishReason::kLength);
  EXPECT_EQ(h.drained[h.worker], 1);
  EXPECT_EQ(h.core.metrics().requests_waiting, 1u);
  h.join_worker(102);
  h.run_all();
  EXPECT_EQ(h.finish(2), FinishReason::kLength);
}

// A worker that joins while another drains takes over what could not move before.
TEST(Drain, AWorkerThatJoinsLaterTakesOver) {
  Harness h;
  h.make_ready();
  h.submit(Harness::request(1, 20, 30));
  h.step(h.worker);
  h.event(DrainMember{1, Incarnation(101)});
  h.step(h.worker);
  EXPECT_EQ(h.core.metrics().sequences_moved, 0u);
  h.join_worker(102);
  EXPECT_EQ(h.core.metrics().sequences_moved, 1u);
  h.run_all();
  const AcceptedRequest r = Harness::request(1, 20, 30);
  EXPECT_EQ(h.tokens(1), oracle_answer(r.prompt, r.sampling));
}

TEST(Drain, AWorkerThatAnotherSchedulerDrainedGetsNothing) {
  Harness h;
  h.make_ready();
  Hello hello = Harness::member_hello(Role::kAttention, 102);
  hello.drained = true;
  const SessionId session = h.join(hello);
  EXPECT_TRUE(h.welcomes.contains(session));
  for (uint64_t i = 1; i <= 4; ++i) h.submit(Harness::request(i, 20, 4));
  EXPECT_TRUE(h.workers[session].plans.empty());
  EXPECT_FALSE(h.workers[h.worker].plans.empty());
  h.run_all();
  for (uint64_t i = 1; i <= 4; ++i) EXPECT_EQ(h.finish(i), FinishReason::kLength);
  EXPECT_EQ(h.drained[session], 1);
}

TEST(Drain, OnlyMembersThatAreThere) {
  Harness h;
  h.make_ready();
  h.event(DrainMember{1, Incarnation(999)});
  EXPECT_EQ(h.drain_replies.at(1).code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace conclave::scheduler
