// What stands still is found after the limit and not before, is forgotten when it goes on, and fails the
// health checks that it should.
#include "libs/telemetry/progress_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <future>

#include "libs/telemetry/ops_server.h"
#include "tests/router/raw_http.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Time by hand: a look each second of a limit of 8.
struct Hand {
  void pass(int seconds) {
    for (int i = 0; i < seconds; ++i) watch.look(now += kSecond);
  }
  ProgressWatch watch{8 * kSecond};
  TimePoint now = 100 * kSecond;
};

TEST(ProgressWatch, AnExecutorThatRunsNothingIsFoundAndForgotten) {
  Hand hand;
  std::deque<std::function<void()>> tasks;
  bool stuck = false;
  const auto guard = hand.watch.executor("the loop", [&](std::function<void()> task) {
    tasks.push_back(std::move(task));
    if (!stuck) {
      tasks.front()();
      tasks.pop_front();
    }
  });
  hand.pass(100);
  EXPECT_THAT(hand.watch.stalls(), IsEmpty());
  stuck = true;
  hand.pass(8);
  EXPECT_THAT(hand.watch.stalls(), IsEmpty());
  hand.pass(1);
  ASSERT_THAT(hand.watch.stalls(), SizeIs(1));
  EXPECT_TRUE(hand.watch.stalls()[0].executor);
  EXPECT_THAT(ProgressWatch::text(hand.watch.stalls()[0]),
              HasSubstr("the loop has made no progress for 8 s"));
  EXPECT_THAT(tasks, SizeIs(1));  // it is asked once, not again and again
  hand.pass(10);
  EXPECT_THAT(tasks, SizeIs(1));
  tasks.front()();
  tasks.clear();
  stuck = false;
  hand.pass(1);
  EXPECT_THAT(hand.watch.stalls(), IsEmpty());
}

TEST(ProgressWatch, WorkStandsStillOnlyWhileThereIsSome) {
  Hand hand;
  ProgressWatch::Work work;
  const auto guard = hand.watch.work("the step", [&] { return work; });
  hand.pass(100);  // idle
  work.busy = true;
  for (int i = 0; i < 100; ++i) {
    ++work.done;
    hand.pass(5);  // slow
  }
  EXPECT_THAT(hand.watch.stalls(), IsEmpty());
  work.detail = "shard 3";
  hand.pass(9);
  ASSERT_THAT(hand.watch.stalls(), SizeIs(1));
  EXPECT_FALSE(hand.watch.stalls()[0].executor);
  EXPECT_THAT(ProgressWatch::text(hand.watch.stalls()[0]), HasSubstr(": shard 3"));
  work.busy = false;
  hand.pass(1);
  EXPECT_THAT(hand.watch.stalls(), IsEmpty());
  // New work has the whole limit, whatever was before.
  work.busy = true;
  hand.pass(7);
  EXPECT_THAT(hand.watch.stalls(), IsEmpty());
}

TEST(ProgressWatch, AProcessThatWasStoppedBlamesNobody) {
  Hand hand;
  ProgressWatch::Work work{true, 1, ""};
  const auto guard = hand.watch.work("the step", [&] { return work; });
  hand.pass(4);
  hand.now += 3600 * kSecond;
  hand.pass(3);
  EXPECT_THAT(hand.watch.stalls(), IsEmpty());
  hand.pass(6);
  EXPECT_THAT(hand.watch.stalls(), SizeIs(1));
}

TEST(ProgressWatch, NothingIsAskedBehindItsGuard) {
  Hand hand;
  int asked = 0;
  auto guard = hand.watch.work("gone", [&] {
    ++asked;
    return ProgressWatch::Work{true, 1, ""};
  });
  hand.pass(20);
  EXPECT_THAT(hand.watch.stalls(), SizeIs(1));
  guard.reset();
  const int before = asked;
  hand.pass(2);
  EXPECT_EQ(asked, before);
  EXPECT_THAT(hand.watch.stalls(), IsEmpty());
}

TEST(ProgressWatch, HealthChecksFailWhileItStandsStill) {
  MetricsRegistry metrics;
  ProgressWatch watch(100 * kMillisecond);
  std::promise<void> found;
  OpsServer::Hooks hooks;
  hooks.metrics = &metrics;
  hooks.liveness = [&] {
    Readiness out;
    for (const auto& stall : watch.stalls())
      if (stall.executor) out.reasons.push_back(ProgressWatch::text(stall));
    return out;
  };
  auto ops = OpsServer::start("127.0.0.1:0", std::move(hooks));
  ASSERT_TRUE(ops.ok()) << ops.status();
  const auto livez = [&] { return testing::http_call((*ops)->port(), "GET", "/livez"); };
  EXPECT_EQ(livez().status, 200);
  EXPECT_EQ(livez().body, "{\"live\":true}\n");
  std::mutex mutex;
  std::function<void()> held;
  auto guard = watch.executor("the loop", [&](std::function<void()> task) {
    std::lock_guard lock(mutex);
    held = std::move(task);
  });
  watch.start(metrics);
  const auto eventually = [](const std::function<bool()>& reached) {
    for (int i = 0; i < 30'000 && !reached(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return reached();
  };
  ASSERT_TRUE(eventually([&] { return livez().status == 503; }));
  EXPECT_THAT(livez().body, HasSubstr("the loop has made no progress"));
  EXPECT_THAT(metrics.expose(), HasSubstr("conclave_stalled_parts{kind=\"executor\"} 1"));
  // From here on it runs what it is given.
  ASSERT_TRUE(eventually([&] {
    std::lock_guard lock(mutex);
    if (held) held();
    return watch.stalls().empty();
  }));
}

}  // namespace
}  // namespace conclave
