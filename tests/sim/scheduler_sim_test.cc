#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "tests/sim/scheduler_sim.h"

namespace conclave::scheduler {
namespace {

// A failing seed runs alone with CONCLAVE_SIM_SEED=<seed>; CONCLAVE_SIM_SEEDS=<n> runs more of them: a
// million take about three hours.
uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Sanitizers take some twenty times as long and look for other things than rare orders of events.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kSeeds = 60;
constexpr uint64_t kFloodSeeds = 5;
#else
constexpr uint64_t kSeeds = 2000;
constexpr uint64_t kFloodSeeds = 100;
#endif

TEST(SchedulerSim, HoldsItsRulesUnderFaults) {
  const uint64_t only = from_environment("CONCLAVE_SIM_SEED", 0);
  const uint64_t first = only != 0 ? only : 1;
  const uint64_t last = only != 0 ? only : from_environment("CONCLAVE_SIM_SEEDS", kSeeds);
  std::map<std::string, uint64_t> coverage;
  uint64_t events = 0;
  for (uint64_t seed = first; seed <= last; ++seed) {
    SimConfig config;
    config.seed = seed;
    const SimOutcome outcome = SchedulerSim(config).run();
    ASSERT_EQ(outcome.violation, "") << "run again with CONCLAVE_SIM_SEED=" << seed;
    EXPECT_GE(outcome.events, 1000u);
    config.checks = false;
    const SimOutcome again = SchedulerSim(config).run();
    ASSERT_EQ(again.trace_hash, outcome.trace_hash) << "seed " << seed << " is not one run";
    ASSERT_EQ(again.events, outcome.events);
    events += outcome.events;
    for (const auto& [what, count] : outcome.coverage) coverage[what] += count;
  }
  std::string counts;
  for (const auto& [what, count] : coverage) counts += what + "=" + std::to_string(count) + " ";
  std::printf("%llu seeds, %llu events: %s\n", static_cast<unsigned long long>(last - first + 1),
              static_cast<unsigned long long>(events), counts.c_str());
  if (only != 0) return;
  for (const char* what : {"client ended",
                           "client refused",
                           "gateway dropped",
                           "hung",
                           "members_lost",
                           "members_refused",
                           "members_suspected",
                           "peer_troubles",
                           "placements_published",
                           "prompt_tokens_cached",
                           "kv_evictions",
                           "requests_abandoned",
                           "requests_accepted",
                           "requests_cancelled",
                           "requests_deadline",
                           "requests_finished_length",
                           "requests_finished_stop",
                           "requests_reattached",
                           "requests_refused_full",
                           "requests_refused_invalid",
                           "requests_refused_unready",
                           "resubmitted",
                           "scheduler restarted",
                           "scheduler stalled",
                           "sequences_moved",
                           "sequences_preempted",
                           "pages copied",
                           "sequences_replayed",
                           "drain refused",
                           "drain taken",
                           "shard drained",
                           "experts released",
                           "preparing a placement",
                           "worker drained",
                           "shard crashed",
                           "silent crash",
                           "stalls_forgiven",
                           "tokens_discarded",
                           "welcomed",
                           "worker crashed",
                           "many choices ended",
                           "choice cancelled",
                           "pages released early",
                           "prompt pieces"}) {
    EXPECT_GT(coverage[what], 0u) << what << " never happened";
  }
}

TEST(SchedulerSim, SeedsDiffer) {
  std::set<uint64_t> traces;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SimConfig config;
    config.seed = seed;
    traces.insert(SchedulerSim(config).run().trace_hash);
  }
  EXPECT_EQ(traces.size(), 10u);
}

TEST(SchedulerSim, AFloodTakesNothingFromAModestTenant) {
  std::map<std::string, uint64_t> coverage;
  for (uint64_t seed = 1; seed <= kFloodSeeds; ++seed) {
    SimConfig config;
    config.seed = seed;
    config.flood = true;
    const SimOutcome outcome = SchedulerSim(config).run();
    ASSERT_EQ(outcome.violation, "") << "seed " << seed;
    for (const auto& [what, count] : outcome.coverage) coverage[what] += count;
  }
  EXPECT_GT(coverage["modest started"], 5 * kFloodSeeds);
  EXPECT_GT(coverage["requests_refused_full"], 50 * kFloodSeeds);
}

// Every checker is shown to see what it is there for.
struct Planted {
  const char* name;
  void (*plant)(SimConfig&);
  const char* seen_as;
};
class PlantedFault : public ::testing::TestWithParam<Planted> {};

TEST_P(PlantedFault, IsSeen) {
  std::string violation;
  for (uint64_t seed = 1; seed <= 20 && violation.empty(); ++seed) {
    SimConfig config;
    config.seed = seed;
    GetParam().plant(config);
    violation = SchedulerSim(config).run().violation;
  }
  EXPECT_THAT(violation, ::testing::ContainsRegex(GetParam().seen_as));
}

INSTANTIATE_TEST_SUITE_P(
    Scheduler, PlantedFault,
    ::testing::Values(
        Planted{"LeakedBlock", [](SimConfig& c) { c.faults.leak_block = true; },
                "own .* blocks, the pool counts"},
        Planted{"BlockReusedEarly", [](SimConfig& c) { c.faults.free_before_retire = true; }, "is given to"},
        Planted{"ChunkOffByOne", [](SimConfig& c) { c.faults.short_chunk = true; }, "does not continue"},
        Planted{"LostWorkerForgotten", [](SimConfig& c) { c.faults.forget_lost_worker = true; },
                "other sequences"},
        Planted{"ReplayForgetsTokens", [](SimConfig& c) { c.faults.replay_prompt_only = true; },
                "told tokens again"},
        Planted{"WrongPageShared", [](SimConfig& c) { c.faults.share_by_tokens = true; },
                "holds another prefix"},
        Planted{"CopyOnWriteWithoutCopy", [](SimConfig& c) { c.faults.copy_nothing = true; },
                "holds another prefix"},
        Planted{"StarvedTenant",
                [](SimConfig& c) {
                  c.flood = true;
                  c.faults.starve_tenant = true;
                },
                "a tenant waits while"},
        Planted{"EndedTwice", [](SimConfig& c) { c.faults.end_twice = true; }, "after its end"},
        Planted{"TokenEventLost", [](SimConfig& c) { c.lose_a_token_event = true; }, "got index"}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(SchedulerSim, ALostStepResultIsNoticedByTheCoreAndCostsNothing) {
  uint64_t noticed = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SimConfig config;
    config.seed = seed;
    config.lose_a_step_result = true;
    SimOutcome outcome = SchedulerSim(config).run();
    EXPECT_EQ(outcome.violation, "");
    noticed += outcome.coverage["protocol_violations"];
  }
  EXPECT_GT(noticed, 10u);
}

}  // namespace
}  // namespace conclave::scheduler
