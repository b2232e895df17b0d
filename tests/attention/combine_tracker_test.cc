#include "attention_service/core/combine_tracker.h"

#include <gtest/gtest.h>

namespace conclave {
namespace {

TEST(CombineTracker, AcceptsEachSlotOnce) {
  CombineTracker t;
  t.reset(2, 3);
  std::byte rows[6];
  EXPECT_FALSE(t.complete());
  EXPECT_TRUE(t.accept(1, 2, &rows[5]));
  EXPECT_FALSE(t.accept(1, 2, &rows[0])) << "a second output must not replace the first";
  EXPECT_EQ(t.rows(1)[2], &rows[5]);
  EXPECT_FALSE(t.open(1, 2));
  EXPECT_TRUE(t.open(0, 2));
  for (uint32_t i : {3u, 0u, 4u, 2u, 1u}) EXPECT_TRUE(t.accept(i / 3, i % 3, &rows[i]));
  EXPECT_TRUE(t.complete());
  for (uint32_t s = 0; s < 3; ++s) EXPECT_EQ(t.rows(0)[s], &rows[s]);
}

TEST(CombineTracker, MaskedTokensAreDoneAndTakeNothing) {
  CombineTracker t;
  t.reset(2, 2);
  std::byte row;
  EXPECT_TRUE(t.accept(0, 1, &row));
  t.mask(0);
  t.mask(0);
  EXPECT_EQ(t.remaining(), 2u);
  EXPECT_FALSE(t.accept(0, 0, &row));
  EXPECT_FALSE(t.open(0, 0));
  EXPECT_TRUE(t.accept(1, 0, &row));
  EXPECT_TRUE(t.accept(1, 1, &row));
  EXPECT_TRUE(t.complete());
}

TEST(CombineTracker, ResetForgetsEverything) {
  CombineTracker t;
  std::byte row;
  for (uint32_t tokens : {1u, 70u, 3u}) {
    t.reset(tokens, 8);
    EXPECT_EQ(t.remaining(), tokens * 8);
    for (uint32_t i = 0; i < tokens * 8; ++i) EXPECT_TRUE(t.accept(i / 8, i % 8, &row));
    EXPECT_TRUE(t.complete());
  }
}

}  // namespace
}  // namespace conclave
