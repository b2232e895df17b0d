#include "attention_service/core/micro_batch.h"

#include <gtest/gtest.h>

namespace conclave {
namespace {

MicroBatchSlice slice(uint64_t seq, uint32_t start, uint32_t count, uint32_t index, bool sample = true) {
  auto s = std::make_shared<Sequence>();
  s->id = SeqId(seq);
  return {s, start, count, sample, index};
}

TEST(SplitStep, KeepsSmallStepsWhole) {
  const auto batches = split_step({slice(1, 5, 1, 0), slice(2, 9, 30, 1)}, 4, 16);
  ASSERT_EQ(batches.size(), 1u);
  EXPECT_EQ(batches[0].rows, 31u);
  EXPECT_EQ(batches[0].positions.front(), 5u);
  EXPECT_EQ(batches[0].positions[1], 9u);
  EXPECT_EQ(batches[0].positions.back(), 38u);
}

TEST(SplitStep, CutsALongSliceInOrder) {
  const auto batches = split_step({slice(1, 100, 100, 0)}, 3, 10);
  ASSERT_EQ(batches.size(), 3u);
  uint32_t next = 100;
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(batches[i].slices.size(), 1u);
    EXPECT_EQ(batches[i].slices[0].start, next);
    EXPECT_EQ(batches[i].after_previous, i > 0);
    EXPECT_EQ(batches[i].slices[0].sample, i == 2) << "only the last part has the last row";
    next += batches[i].rows;
  }
  EXPECT_EQ(next, 200u);
}

TEST(SplitStep, PartsOfDifferentSequencesAreIndependent) {
  std::vector<MicroBatchSlice> slices;
  for (uint64_t i = 0; i < 8; ++i) slices.push_back(slice(i, 50, 1, static_cast<uint32_t>(i)));
  const auto batches = split_step(slices, 2, 4);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[0].rows, 4u);
  EXPECT_EQ(batches[1].rows, 4u);
  EXPECT_FALSE(batches[1].after_previous);
}

TEST(SplitStep, EveryRowOnceForManyShapes) {
  for (uint32_t k = 1; k <= 5; ++k) {
    for (uint32_t min_rows : {1u, 3u, 8u}) {
      const auto batches =
          split_step({slice(1, 0, 7, 0), slice(2, 3, 1, 1), slice(3, 0, 13, 2)}, k, min_rows);
      EXPECT_LE(batches.size(), k);
      uint32_t rows = 0;
      uint32_t samples = 0;
      for (const auto& b : batches) {
        EXPECT_GE(b.rows, std::min(min_rows, 21u));
        rows += b.rows;
        for (const auto& s : b.slices) samples += s.sample;
      }
      EXPECT_EQ(rows, 21u);
      EXPECT_EQ(samples, 3u);
    }
  }
}

TEST(MicroBatch, DropsRowsAndMovesTheRest) {
  auto batches = split_step({slice(1, 0, 2, 0), slice(2, 7, 1, 1), slice(3, 4, 2, 2)}, 1, 1);
  MicroBatch& b = batches[0];
  b.x = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4};
  EXPECT_EQ(b.drop_rows(2, [](const Sequence& s) { return s.id == SeqId(2); }), 1u);
  EXPECT_EQ(b.rows, 4u);
  EXPECT_EQ(b.positions, (std::vector<uint32_t>{0, 1, 4, 5}));
  const std::vector<float> want = {0, 0, 1, 1, 3, 3, 4, 4};
  EXPECT_TRUE(std::equal(want.begin(), want.end(), b.x.begin()));
  EXPECT_EQ(b.drop_rows(2, [](const Sequence& s) { return s.id != SeqId(9); }), 4u);
  EXPECT_EQ(b.rows, 0u);
}

}  // namespace
}  // namespace conclave
