#include "libs/base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace conclave {
namespace {

struct Shape {
  unsigned threads;
  Nanos spin;
};

class ThreadPoolTest : public testing::TestWithParam<Shape> {};

// With no spin every wait parks, with a long one none does; both ways of waiting must lose no call.
INSTANTIATE_TEST_SUITE_P(Shapes, ThreadPoolTest,
                         testing::Values(Shape{1, 0}, Shape{2, 0}, Shape{2, ThreadPool::kSpin},
                                         Shape{2, kSecond}, Shape{5, 0}, Shape{5, ThreadPool::kSpin}));

TEST_P(ThreadPoolTest, EveryIndexRunsOnceInEveryLoop) {
  ThreadPool pool(GetParam().threads, GetParam().spin);
  ASSERT_EQ(pool.threads(), GetParam().threads);
  std::vector<std::atomic<uint32_t>> calls(300);
  for (uint32_t loop = 0; loop < 3000; ++loop) {
    const uint32_t count = loop * 7919 % 11 == 0 ? 300 : loop % 6;
    for (auto& c : calls) c.store(0, std::memory_order_relaxed);
    uint32_t plain[300] = {};  // written by the bodies, read after the loop: the loop's end orders them
    pool.parallel_for(count, [&](uint32_t i) {
      calls[i].fetch_add(1, std::memory_order_relaxed);
      plain[i] = loop;
    });
    for (uint32_t i = 0; i < calls.size(); ++i) {
      ASSERT_EQ(calls[i].load(), i < count ? 1u : 0u) << "loop " << loop << " index " << i;
      if (i < count) {
        ASSERT_EQ(plain[i], loop);
      }
    }
  }
}

TEST(ThreadPoolParkTest, ParkedThreadsWakeForALoop) {
  ThreadPool pool(2, 0);
  for (int round = 0; round < 200; ++round) {
    // Each body waits for the other: ends only when two threads are in the loop.
    std::atomic<int> inside{0};
    pool.parallel_for(2, [&](uint32_t) {
      inside.fetch_add(1);
      while (inside.load() < 2) std::this_thread::yield();
    });
    ASSERT_EQ(inside.load(), 2);
  }
}

TEST(ThreadPoolParkTest, APoolThatNeverRanEnds) {
  ThreadPool idle(3);
  ThreadPool parked(3, 0);
}

}  // namespace
}  // namespace conclave
