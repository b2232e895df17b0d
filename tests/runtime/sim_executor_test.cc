#include "libs/runtime/sim_executor.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace conclave {
namespace {

// Processes that post and set timers at each other at random for a while.
uint64_t chatter(uint64_t seed, std::string* order = nullptr) {
  SimWorld world(seed, {.post_jitter = 50 * kMicrosecond});
  std::vector<SimExecutor*> p;
  for (int i = 0; i < 4; ++i) p.push_back(&world.add_process("p" + std::to_string(i)));
  int left = 2000;
  std::function<void(int)> act = [&](int self) {
    if (order) *order += static_cast<char>('0' + self);
    if (--left <= 0) return;
    const int to = static_cast<int>(world.random().below(4));
    p[to]->post([&act, to] { act(to); });
    if (world.random().chance(0.3)) {
      p[self]->post_at(world.now() + static_cast<Nanos>(world.random().below(kMillisecond)),
                       [&act, self] { act(self); });
    }
  };
  p[0]->post([&] { act(0); });
  while (world.step()) {
  }
  return world.trace_hash();
}

TEST(SimWorld, TheSameSeedGivesTheSameRunAndAnotherSeedAnother) {
  std::string a, b, c;
  EXPECT_EQ(chatter(7, &a), chatter(7, &b));
  EXPECT_EQ(a, b);
  EXPECT_NE(chatter(8, &c), chatter(7));
  EXPECT_NE(a, c);
}

TEST(SimWorld, PostsToOneProcessKeepTheirOrderUnderJitter) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SimWorld world(seed, {.post_jitter = kMillisecond});
    SimExecutor& p = world.add_process("p");
    std::vector<int> seen;
    for (int i = 0; i < 20; ++i) p.post([&seen, i] { seen.push_back(i); });
    while (world.step()) {
    }
    for (int i = 0; i < 20; ++i) ASSERT_EQ(seen[i], i) << "seed " << seed;
  }
}

TEST(SimWorld, ProcessesInterleaveDifferentlyBySeed) {
  std::set<std::string> orders;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SimWorld world(seed);
    SimExecutor& a = world.add_process("a");
    SimExecutor& b = world.add_process("b");
    std::string order;
    for (int i = 0; i < 2; ++i) {
      a.post([&] { order += 'a'; });
      b.post([&] { order += 'b'; });
    }
    while (world.step()) {
    }
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 6u);  // every interleaving of aa and bb
}

TEST(SimWorld, TimeIsVirtualAndExact) {
  SimWorld world(1, {.start = 5});
  SimExecutor& p = world.add_process("p");
  std::vector<TimePoint> at;
  p.post_at(1000 * kSecond, [&] { at.push_back(p.now()); });
  TimerId dropped = p.post_at(10, [&] { at.push_back(-1); });
  p.post_at(7, [&] { at.push_back(p.now()); });
  p.post_at(3, [&] { at.push_back(p.now()); });  // the past means now
  p.cancel(dropped);
  world.run_until(8);
  EXPECT_EQ(at, (std::vector<TimePoint>{5, 7}));
  EXPECT_EQ(world.now(), 8);
  EXPECT_TRUE(world.run_until([&] { return at.size() == 3; }));
  EXPECT_EQ(at.back(), 1000 * kSecond);
  EXPECT_FALSE(world.run_until([] { return false; }));
}

TEST(SimWorld, CancelledTimersDoNotCarryARunPastItsEnd) {
  SimWorld world(1, {.start = 0});
  SimExecutor& p = world.add_process("p");
  bool late = false;
  TimerId dropped = p.post_at(5, [] {});
  p.post_at(50, [&] { late = true; });
  p.cancel(dropped);
  world.run_until(10);
  EXPECT_EQ(world.now(), 10);
  EXPECT_FALSE(late);
  EXPECT_FALSE(world.run_until([&] { return late; }, 20));
  EXPECT_TRUE(world.run_until([&] { return late; }, 50));
  EXPECT_EQ(world.now(), 50);
}

TEST(SimWorld, KillDropsEverythingForEver) {
  SimWorld world(3);
  SimExecutor& a = world.add_process("a");
  SimExecutor& b = world.add_process("b");
  auto token = std::make_shared<int>(0);
  int ran = 0;
  a.post([&, token] { ++ran; });
  a.post_at(world.now() + 5, [&, token] { ++ran; });
  b.post([&] { world.kill(a); });
  b.post_at(world.now() + 3, [&, token] {
    a.post([&, token] { ran += 100; });
    EXPECT_FALSE(a.post_at(world.now(), [&] { ran += 100; }));
  });
  while (world.step()) {
  }
  EXPECT_LE(ran, 1);
  EXPECT_FALSE(a.alive());
  EXPECT_EQ(token.use_count(), 1) << "captures of a killed process are destroyed";
  // A process may kill itself from its own task.
  SimExecutor& c = world.add_process("c");
  bool after = false;
  c.post([&] {
    c.post([&] { after = true; });
    world.kill(c);
  });
  while (world.step()) {
  }
  EXPECT_FALSE(after);
}

TEST(SimWorld, APausedProcessCatchesUpInOrder) {
  SimWorld world(4, {.start = 0});
  SimExecutor& p = world.add_process("p");
  std::vector<int> seen;
  std::vector<TimePoint> at;
  world.pause(p, 100);
  for (int i = 0; i < 10; ++i) {
    p.post([&, i] {
      seen.push_back(i);
      at.push_back(world.now());
    });
  }
  while (world.step()) {
  }
  for (int i = 0; i < 10; ++i) EXPECT_EQ(seen[i], i);
  EXPECT_EQ(at.front(), 100);
}

TEST(SimWorld, StepLimitEndsARunawayRun) {
  SimWorld world(5, {.max_steps = 1000});
  SimExecutor& p = world.add_process("p");
  std::function<void()> again = [&] { p.post(again); };
  p.post(again);
  EXPECT_FALSE(world.run_until([] { return false; }));
  EXPECT_TRUE(world.exhausted());
  EXPECT_EQ(world.steps(), 1000u);
}

TEST(SimWorld, CheckersRunAfterEachEvent) {
  SimWorld world(6);
  SimExecutor& p = world.add_process("p");
  uint64_t checks = 0;
  world.set_after_step([&] { ++checks; });
  for (int i = 0; i < 5; ++i) p.post([] {});
  while (world.step()) {
  }
  EXPECT_EQ(checks, 5u);
  const uint64_t before = world.trace_hash();
  world.note(1);
  EXPECT_NE(world.trace_hash(), before);
}

}  // namespace
}  // namespace conclave
