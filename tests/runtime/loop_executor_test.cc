#include "libs/runtime/loop_executor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace conclave {
namespace {

Nanos process_cpu() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec * kSecond + t.tv_nsec;
}

TEST(LoopExecutor, RunsPostsInOrder) {
  LoopExecutor loop;
  std::vector<int> seen;
  loop.post([&] {
    seen.push_back(1);
    loop.post([&] {
      seen.push_back(3);
      loop.stop();
    });
  });
  loop.post([&] { seen.push_back(2); });
  EXPECT_EQ(loop.depth(), 2u);
  loop.run();
  EXPECT_EQ(seen, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(loop.depth(), 0u);
}

TEST(LoopExecutor, StopKeepsTheRestQueuedInOrder) {
  LoopExecutor loop;
  std::vector<int> seen;
  loop.post([&] { loop.stop(); });
  loop.post([&] { seen.push_back(1); });
  loop.post([&] { seen.push_back(2); });
  loop.run();
  EXPECT_TRUE(seen.empty());
  EXPECT_EQ(loop.depth(), 2u);
  loop.post([&] { loop.stop(); });
  loop.run();
  EXPECT_EQ(seen, (std::vector<int>{1, 2}));
}

TEST(LoopExecutor, TimersFireInTimeOrderAndCancelWorks) {
  LoopExecutor loop;
  std::vector<int> seen;
  const TimePoint start = loop.now();
  loop.post_at(start + 20 * kMillisecond, [&] { seen.push_back(2); });
  loop.post_at(start + 10 * kMillisecond, [&] { seen.push_back(1); });
  TimerId dropped = loop.post_at(start + 15 * kMillisecond, [&] { seen.push_back(9); });
  TimerId later = loop.post_at(start + 25 * kMillisecond, [&] { seen.push_back(8); });
  loop.post_at(start + 5 * kMillisecond, [&] { loop.cancel(later); });
  loop.post_at(start + 30 * kMillisecond, [&] { loop.stop(); });
  loop.cancel(dropped);
  loop.cancel(dropped);
  loop.run();
  EXPECT_EQ(seen, (std::vector<int>{1, 2}));
  EXPECT_GE(loop.now() - start, 30 * kMillisecond);
}

TEST(LoopExecutor, ATimerThatRearmsItselfAtOnceDoesNotStarvePosts) {
  LoopExecutor loop;
  int ticks = 0;
  std::function<void()> again = [&] {
    ++ticks;
    loop.post_at(loop.now(), again);
  };
  loop.post_at(loop.now(), again);
  loop.post([&] { loop.post([&] { loop.post([&] { loop.stop(); }); }); });
  loop.run();
  EXPECT_LE(ticks, 10);
  EXPECT_GE(ticks, 1);
}

TEST(LoopExecutor, ManyThreadsPostAndEachKeepsItsOrder) {
  LoopThread thread;
  constexpr int kThreads = 4, kEach = 5000;
  std::vector<int> last(kThreads, -1);  // loop thread only
  bool ordered = true;
  std::atomic<int> left{kThreads * kEach};
  std::vector<std::thread> posters;
  for (int p = 0; p < kThreads; ++p) {
    posters.emplace_back([&, p] {
      for (int i = 0; i < kEach; ++i) {
        thread.loop().post([&, p, i] {
          ordered = ordered && last[p] == i - 1;
          last[p] = i;
          left.fetch_sub(1);
        });
        if (i % 512 == 0) std::this_thread::yield();
      }
    });
  }
  for (auto& t : posters) t.join();
  thread.loop().call([&] { EXPECT_EQ(left.load(), 0); });  // posted after all others
  thread.loop().call([&] { EXPECT_TRUE(ordered); });
}

// A wake-up lost between "queue empty" and "asleep" would hang here.
TEST(LoopExecutor, NoLostWakeups) {
  for (Nanos spin : {Nanos{0}, 5 * kMicrosecond}) {
    LoopThread a(LoopExecutor::Options{.spin_ns = spin});
    LoopThread b(LoopExecutor::Options{.spin_ns = spin});
    std::atomic<int> rounds{0};
    std::atomic<bool> done{false};
    std::function<void()> ping, pong;
    ping = [&] { b.loop().post(pong); };
    pong = [&] {
      if (rounds.fetch_add(1) + 1 == 3000) {
        done = true;
        done.notify_one();
      } else {
        a.loop().post(ping);
      }
    };
    a.loop().post(ping);
    done.wait(false);
    EXPECT_EQ(rounds.load(), 3000);
    a.stop();
    b.stop();
  }
}

TEST(LoopExecutor, IdleUsesNoCpu) {
  LoopThread thread;
  thread.loop().call([] {});
  // Ticks every 10 ms, as a heartbeat would.
  std::function<void()> tick = [&] { thread.loop().post_at(thread.loop().now() + 10 * kMillisecond, tick); };
  thread.loop().post(tick);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const Nanos before = process_cpu();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const Nanos used = process_cpu() - before;
  EXPECT_LT(used, 10 * kMillisecond) << "2% of the time";
  EXPECT_GT(thread.loop().sleeps(), 10u);
  thread.stop();
}

// A poller over a pipe: progress reads one byte; arm refuses while bytes are there.
class PipePoller : public Poller {
 public:
  PipePoller() { EXPECT_EQ(::pipe2(fds_, O_NONBLOCK | O_CLOEXEC), 0); }
  ~PipePoller() override {
    ::close(fds_[0]);
    ::close(fds_[1]);
  }
  bool progress() override {
    char c;
    if (::read(fds_[0], &c, 1) != 1) return false;
    if (on_byte) on_byte(c);
    return true;
  }
  int fd() override { return fds_[0]; }
  bool arm() override {
    ++arms;
    if (refuse > 0) {
      --refuse;
      return false;
    }
    return true;
  }
  void send(char c) { ASSERT_EQ(::write(fds_[1], &c, 1), 1); }

  std::function<void(char)> on_byte;
  int arms = 0;
  int refuse = 0;

 private:
  int fds_[2];
};

TEST(LoopExecutor, APollerWakesTheSleepingLoop) {
  LoopExecutor loop(LoopExecutor::Options{.spin_ns = 0});
  PipePoller poller;
  poller.refuse = 3;
  std::string got;
  poller.on_byte = [&](char c) {
    got += c;
    if (got.size() == 3) loop.stop();
  };
  loop.add_poller(&poller);
  std::thread sender([&] {
    for (char c : {'a', 'b', 'c'}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      poller.send(c);
    }
  });
  loop.run();
  sender.join();
  EXPECT_EQ(got, "abc");
  EXPECT_GT(poller.arms, 3) << "armed again after it refused";
  loop.remove_poller(&poller);
  loop.post([&] { loop.stop(); });
  loop.run();
}

TEST(LoopExecutor, RunUntilEndsAtItsLimitOrWhenDone) {
  LoopExecutor loop;
  const TimePoint start = loop.now();
  EXPECT_FALSE(loop.run_until([] { return false; }, 20 * kMillisecond));
  EXPECT_GE(loop.now() - start, 20 * kMillisecond);
  bool done = false;
  loop.post([&] { done = true; });
  EXPECT_TRUE(loop.run_until([&] { return done; }, kSecond));
}

TEST(LoopExecutor, DestroysTasksThatNeverRan) {
  auto token = std::make_shared<int>(1);
  {
    LoopExecutor loop;
    loop.post([token] {});
    loop.post_at(loop.now() + kSecond, [token] {});
    EXPECT_EQ(token.use_count(), 3);
  }
  EXPECT_EQ(token.use_count(), 1);
}

}  // namespace
}  // namespace conclave
