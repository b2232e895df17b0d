#include "libs/model/row_pool.h"

#include <gtest/gtest.h>

#include <thread>

namespace conclave {
namespace {

TEST(RowPool, UsesMemoryAgainAndPicksTheFit) {
  RowPool pool;
  RowBuffer small = pool.get(100);
  RowBuffer large = pool.get(10'000);
  const std::byte* small_at = small->data();
  const std::byte* large_at = large->data();
  small.reset();
  large.reset();
  RowBuffer again = pool.get(80);
  EXPECT_EQ(again->size(), 80u);
  EXPECT_EQ(again->data(), small_at);
  EXPECT_EQ(pool.get(9'000)->data(), large_at);
}

TEST(RowPool, KeepsNoMoreThanItsBound) {
  RowPool pool(2);
  std::vector<RowBuffer> held;
  for (size_t i = 1; i <= 4; ++i) held.push_back(pool.get(i * 1'000));
  held.clear();  // the first two come back, the others are freed
  const RowBuffer a = pool.get(1);
  const RowBuffer b = pool.get(1);
  const RowBuffer c = pool.get(1);
  EXPECT_GE(a->capacity(), 1'000u);
  EXPECT_GE(b->capacity(), 1'000u);
  EXPECT_LT(c->capacity(), 1'000u) << "a third buffer was kept";
}

TEST(RowPool, BuffersComeBackFromOtherThreadsAndOutliveThePool) {
  RowBuffer last;
  {
    RowPool pool;
    for (int i = 0; i < 200; ++i) {
      RowBuffer b = pool.get(64);
      std::thread([moved = std::move(b)] { (*moved)[0] = std::byte(1); }).join();
    }
    last = pool.get(32);
  }
  EXPECT_EQ(last->size(), 32u);
}

}  // namespace
}  // namespace conclave
