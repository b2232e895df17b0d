#include <atomic>
#include <bit>
#include <cmath>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "libs/base/bounded_queue.h"
#include "libs/base/float_bits.h"
#include "libs/base/random.h"
#include "libs/base/status.h"
#include "libs/base/thread_pool.h"

namespace conclave {
namespace {

TEST(SystemRandom, WordsDifferInOneThreadAndBetweenThreads) {
  constexpr size_t kWords = 1000;  // many blocks
  std::vector<std::vector<uint64_t>> drawn(4);
  std::vector<std::thread> threads;
  for (auto& mine : drawn) {
    threads.emplace_back([&mine] {
      for (size_t i = 0; i < kWords; ++i) mine.push_back(system_random_u64());
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<uint64_t> all;
  for (const auto& mine : drawn) all.insert(mine.begin(), mine.end());
  EXPECT_EQ(all.size(), drawn.size() * kWords);
}

TEST(StatusTest, FieldSurvivesAnnotation) {
  Status s = annotate(invalid_field("max_tokens", "must be positive"), "request");
  EXPECT_EQ(field_of(s), "max_tokens");
  EXPECT_EQ(message_of(s), "request: must be positive");
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(field_of(OkStatus()), "");
}

StatusOr<int> half(int x) {
  if (x % 2) return invalid_argument("odd");
  return x / 2;
}
StatusOr<int> quarter(int x) {
  ASSIGN_OR_RETURN(int h, half(x));
  ASSIGN_OR_RETURN(int q, half(h));
  return q;
}
TEST(StatusTest, MacrosReturnTheFirstError) {
  EXPECT_EQ(*quarter(8), 2);
  EXPECT_FALSE(quarter(6).ok());
}

// Known answer of Random123's kat_vectors for philox4x32-10.
TEST(RandomTest, PhiloxKnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(RandomTest, DrawsDependOnEveryPartOfTheKey) {
  const float base = uniform_draw(1, 2, 3, DrawPurpose::kSample);
  EXPECT_EQ(base, uniform_draw(1, 2, 3, DrawPurpose::kSample));
  EXPECT_NE(base, uniform_draw(2, 2, 3, DrawPurpose::kSample));
  EXPECT_NE(base, uniform_draw(1, 3, 3, DrawPurpose::kSample));
  EXPECT_NE(base, uniform_draw(1, 2, 4, DrawPurpose::kSample));
  EXPECT_NE(base, uniform_draw(1, 2, 3, DrawPurpose::kDraft));
  EXPECT_NE(base, uniform_draw(1, 2, 3 + (1ull << 32), DrawPurpose::kSample));
  double sum = 0;
  for (uint64_t i = 0; i < 10000; ++i) {
    const float u = uniform_draw(7, 0, i, DrawPurpose::kSample);
    ASSERT_GE(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    sum += u;
  }
  EXPECT_NEAR(sum / 10000, 0.5, 0.02);
}

TEST(RandomTest, IncarnationsGrowWithTime) {
  const Incarnation a = make_incarnation();
  std::vector<Incarnation> more;
  for (int i = 0; i < 100; ++i) more.push_back(make_incarnation());
  for (const auto& b : more) EXPECT_GE(b.value >> 22, a.value >> 22);
}

TEST(FloatBitsTest, Bf16RoundsToNearestEven) {
  for (uint32_t hi = 0; hi < 0x10000; ++hi) {
    const float exact = bf16_to_float(static_cast<Bf16>(hi));
    if (std::isnan(exact)) {
      EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(exact))));
      continue;
    }
    EXPECT_EQ(float_to_bf16(exact), hi);
    if (std::isinf(exact) || (hi & 0x7fff) >= 0x7f7f) continue;
    const float middle = std::bit_cast<float>((hi << 16) | 0x8000u);
    EXPECT_EQ(float_to_bf16(middle) & 1u, 0u) << hi;
  }
}

TEST(FloatBitsTest, E4m3RoundTripsAndRoundsToTheNearest) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_float(static_cast<uint8_t>(code));
    if (std::isnan(value)) {
      EXPECT_EQ(code & 0x7f, 0x7f);
      continue;
    }
    EXPECT_EQ(float_to_e4m3(value), code) << value;
  }
  EXPECT_EQ(e4m3_to_float(1), 0x1.0p-9f);  // subnormal steps of 2^-9
  EXPECT_EQ(e4m3_to_float(7), 7 * 0x1.0p-9f);
  EXPECT_EQ(e4m3_to_float(0x7e), 448.0f);
  EXPECT_EQ(float_to_e4m3(1e9f), 0x7e);
  EXPECT_EQ(float_to_e4m3(-1e9f), 0xfe);
  SplitMix64 random(3);
  for (int i = 0; i < 200000; ++i) {
    const float x = static_cast<float>((random.uniform() * 2 - 1) * std::exp2(random.uniform() * 20 - 11));
    const uint8_t got = float_to_e4m3(x);
    const float error = std::fabs(e4m3_to_float(got) - x);
    for (int delta : {-1, 1}) {
      const int other = (got & 0x7f) + delta;
      if (other < 0 || other > 0x7e) continue;
      const float value = e4m3_to_float(static_cast<uint8_t>((got & 0x80) | other));
      ASSERT_LE(error, std::fabs(value - x)) << x;
    }
  }
}

TEST(BoundedQueueTest, HoldsItsBoundAndCloses) {
  BoundedQueue<int> queue(2);
  EXPECT_TRUE(queue.try_push(1));
  EXPECT_TRUE(queue.try_push(2));
  EXPECT_FALSE(queue.try_push(3));
  EXPECT_EQ(*queue.try_pop(), 1);
  EXPECT_TRUE(queue.try_push(4));
  queue.close();
  EXPECT_FALSE(queue.try_push(5));
  EXPECT_EQ(*queue.pop(), 2);
  EXPECT_EQ(*queue.pop(), 4);
  EXPECT_FALSE(queue.pop().has_value());
}

TEST(BoundedQueueTest, ManyProducersAndConsumersLoseNothing) {
  BoundedQueue<int> queue(16);
  std::atomic<long> sum{0};
  std::vector<std::thread> consumers;
  for (int c = 0; c < 2; ++c) {
    consumers.emplace_back([&] {
      while (auto item = queue.pop()) sum += *item;
    });
  }
  std::vector<std::thread> producers;
  for (int p = 0; p < 3; ++p) {
    producers.emplace_back([&] {
      for (int i = 1; i <= 1000; ++i) {
        while (!queue.try_push(i)) std::this_thread::yield();
      }
    });
  }
  for (auto& t : producers) t.join();
  queue.close();
  for (auto& t : consumers) t.join();
  EXPECT_EQ(sum.load(), 3L * 500500);
}

TEST(ThreadPoolTest, EveryIndexOnce) {
  for (unsigned threads : {1u, 2u, 5u}) {
    ThreadPool pool(threads);
    for (uint32_t count : {0u, 1u, 2u, 7u, 1000u}) {
      std::vector<std::atomic<int>> seen(count);
      pool.parallel_for(count, [&](uint32_t i) { seen[i]++; });
      for (auto& s : seen) EXPECT_EQ(s.load(), 1);
    }
  }
}

}  // namespace
}  // namespace conclave
