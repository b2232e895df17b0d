#include "libs/base/cpu_set.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <thread>

#include "libs/base/thread_pool.h"

namespace conclave {
namespace {

TEST(CpuSet, ListsAreReadAsTheKernelWritesThem) {
  EXPECT_EQ(*parse_cpus("0", "k"), (std::vector<uint32_t>{0}));
  EXPECT_EQ(*parse_cpus("0-3,8", "k"), (std::vector<uint32_t>{0, 1, 2, 3, 8}));
  EXPECT_EQ(*parse_cpus("5,1-2,2", "k"), (std::vector<uint32_t>{1, 2, 5}));
  const auto node = parse_cpus("numa:0", "k");
  if (node.ok()) {
    EXPECT_FALSE(node->empty());
  }
}

TEST(CpuSet, AnythingElseIsRefusedByItsKey) {
  for (const char* text : {"", ",", "a", "1-", "-1", "3-1", "1.5", "0-99999999999", "4096", "1,,2", " 1",
                           "0x1", "numa:", "numa:x", "numa:-1", "numa:65000", "numa:1/../node0"}) {
    const auto cpus = parse_cpus(text, "experts.cpus");
    ASSERT_FALSE(cpus.ok()) << "'" << text << "'";
    EXPECT_EQ(field_of(cpus.status()), "experts.cpus") << text;
  }
}

TEST(CpuSet, AThreadAndThoseItStartsKeepToIt) {
  std::thread([] {
    const uint32_t cpu = allowed_cpus().back();
    ASSERT_TRUE(bind_to_cpus(std::vector{cpu}, "k").ok());
    EXPECT_EQ(allowed_cpus(), std::vector{cpu});
    std::thread([&] { EXPECT_EQ(allowed_cpus(), std::vector{cpu}); }).join();
    const Status refused = bind_to_cpus(std::vector<uint32_t>{CPU_SETSIZE - 1}, "k");
    EXPECT_EQ(field_of(refused), "k");
    EXPECT_EQ(allowed_cpus(), std::vector{cpu}) << "a refused binding changes nothing";
  }).join();
}

TEST(CpuSet, PoolThreadsKeepToTheirsInTurn) {
  const std::vector<uint32_t> cpus = allowed_cpus();
  ThreadPool pool(3, ThreadPool::kSpin, cpus);
  std::atomic<uint32_t> inside{0};
  std::vector<std::vector<uint32_t>> seen(3);
  const auto caller = std::this_thread::get_id();
  pool.parallel_for(3, [&](uint32_t i) {
    inside.fetch_add(1);
    while (inside.load() < 3) std::this_thread::yield();  // each body on a thread of its own
    if (std::this_thread::get_id() != caller) seen[i] = allowed_cpus();
  });
  std::vector<uint32_t> pinned;
  for (const auto& s : seen) {
    if (s.empty()) continue;
    ASSERT_EQ(s.size(), 1u);
    pinned.push_back(s.front());
  }
  std::sort(pinned.begin(), pinned.end());
  std::vector<uint32_t> want = {cpus[1 % cpus.size()], cpus[2 % cpus.size()]};
  std::sort(want.begin(), want.end());
  EXPECT_EQ(pinned, want);
  EXPECT_EQ(allowed_cpus(), cpus) << "the caller keeps itself";
}

}  // namespace
}  // namespace conclave
