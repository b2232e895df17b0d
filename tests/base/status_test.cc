// A status may be copied and dropped by any thread; the last one to drop it frees it. Under ThreadSanitizer this also
// shows that the sanitizer sees the library's reference counts (libs/base/status_tsan.cc).
#include "libs/base/status.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace conclave {
namespace {

TEST(Status, CopiesAreReadAndDroppedByManyThreads) {
  constexpr int kThreads = 4, kRounds = 500;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<Status> copies(kThreads, internal_error("a message that is long enough to be on the heap"));
    std::atomic<int> waiting = kThreads;
    std::atomic<size_t> read = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, mine = std::move(copies[i])]() mutable {
        waiting.fetch_sub(1, std::memory_order_relaxed);
        while (waiting.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
        read.fetch_add(mine.message().size(), std::memory_order_relaxed);
        mine = OkStatus();
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(read.load(), size_t{kThreads} * 47);
  }
}

}  // namespace
}  // namespace conclave
