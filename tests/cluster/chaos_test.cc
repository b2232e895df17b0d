// A minute of requests while processes are killed at random: every request ends, with the tokens of an
// undisturbed run.
#include <gtest/gtest.h>
#include <signal.h>

#include <deque>
#include <iostream>

#include "libs/base/random.h"
#include "tests/cluster/cluster.h"

namespace conclave {
namespace {

constexpr uint32_t kKinds = 24, kTokens = 64, kConcurrency = 16;
constexpr Nanos kDuration = 60 * kSecond;
constexpr Nanos kBetweenKills = 1500 * kMillisecond;
constexpr Nanos kLimit = 180 * kSecond;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

TEST(ChaosTest, RandomKillsInTrafficLoseNothing) {
  const uint64_t seed = system_random_u64();
  std::cout << "seed " << seed << "\n";
  SplitMix64 random(seed);
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  const auto expected = undisturbed(kKinds, kTokens);
  std::deque<std::pair<uint32_t, std::shared_ptr<PendingCompletion>>> open;
  uint32_t sent = 0, done = 0, kills = 0, aborts = 0;
  const TimePoint end = steady_now() + kDuration;
  TimePoint next_kill = steady_now() + kBetweenKills;
  const auto revive = [&](bool killed, Process& process, const std::function<void()>& start) {
    if (process.running()) return;
    // UCX builds with assertions may take a survivor down with its peer: its supervisor recovers from that
    // too.
    if (!killed) {
      ++aborts;
      std::cout << "ended by itself with " << process.wait(0).value_or(-1) << "\n"
                << process.log().substr(0, 2000);
    }
    start();
  };
  while (steady_now() < end || !open.empty()) {
    while (steady_now() < end && open.size() < kConcurrency) {
      open.emplace_back(sent, cluster.submit(numbered_request(sent % kKinds, kTokens)));
      ++sent;
    }
    auto [number, pending] = open.front();
    auto answer = pending->wait(100 * kMillisecond);
    if (answer.ok() || answer.status().code() != StatusCode::kDeadlineExceeded) {
      ASSERT_TRUE(answer.ok()) << "request " << number << ": " << answer.status();
      ASSERT_EQ(answer->finish, FinishReason::kLength) << "request " << number << ": " << answer->error;
      ASSERT_EQ(answer->tokens, expected[number % kKinds]) << "request " << number;
      open.pop_front();
      ++done;
    }
    ASSERT_LT(steady_now(), end + kLimit) << open.size() << " requests hang\n--- scheduler\n"
                                          << cluster.scheduler.log() << "\n--- worker\n"
                                          << cluster.worker.log();
    bool killed = false;
    if (steady_now() >= next_kill && steady_now() < end) {
      next_kill = steady_now() + kBetweenKills / 2 + static_cast<Nanos>(random.below(kBetweenKills));
      Process* const victims[] = {&cluster.shards[0], &cluster.shards[1], &cluster.shards[0],
                                  &cluster.shards[1], &cluster.worker,    &cluster.scheduler};
      victims[random.below(6)]->kill();
      killed = true;
      ++kills;
    }
    revive(killed, cluster.scheduler, [&] { cluster.start_scheduler(); });
    for (size_t i = 0; i < cluster.shards.size(); ++i) {
      revive(killed, cluster.shards[i], [&] { cluster.start_shard(i); });
    }
    revive(killed, cluster.worker, [&] { cluster.start_worker(); });
  }
  std::cout << done << " requests, " << kills << " kills, " << aborts << " survivors ended by themselves\n";
  EXPECT_EQ(done, sent);
  EXPECT_GE(kills, 10u);
}

}  // namespace
}  // namespace conclave
