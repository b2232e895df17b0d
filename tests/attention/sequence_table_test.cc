#include "attention_service/core/sequence_table.h"

#include <gtest/gtest.h>

namespace conclave {
namespace {

class SequenceTableTest : public ::testing::Test {
 protected:
  SequenceTableTest() {
    spec.vocab_size = 100;
    spec.max_positions = 50;
    begin.seq = SeqId(4);
    begin.tokens.assign(20, 7);
    begin.prompt_tokens = 18;
  }
  ModelSpec spec;
  SequenceStart begin;
  SequenceTable table{spec, 8};
};

TEST_F(SequenceTableTest, ChecksWhatItIsGiven) {
  auto bad = begin;
  bad.tokens.clear();
  EXPECT_EQ(field_of(table.start(bad)), "plan.starts.tokens");
  bad = begin;
  bad.prompt_tokens = 21;
  EXPECT_EQ(field_of(table.start(bad)), "plan.starts.prompt_tokens");
  bad = begin;
  bad.tokens[3] = 100;
  EXPECT_EQ(field_of(table.start(bad)), "plan.starts.tokens");
  bad = begin;
  bad.tokens.assign(51, 1);
  EXPECT_EQ(field_of(table.start(bad)), "plan.starts.tokens");
  EXPECT_EQ(table.size(), 0u);
  EXPECT_TRUE(table.start(begin).ok());
  EXPECT_EQ(table.find(SeqId(4))->tokens.size(), 20u);
  EXPECT_EQ(table.find(SeqId(5)), nullptr);
}

TEST_F(SequenceTableTest, ExtendsInOrderOnly) {
  ASSERT_TRUE(table.start(begin).ok());
  Sequence& s = *table.find(SeqId(4));
  EXPECT_EQ(field_of(table.extend(s, {SeqId(4), 1, 4, false, {0}})), "plan.slices.start");
  EXPECT_EQ(field_of(table.extend(s, {SeqId(4), 0, 0, false, {0}})), "plan.slices.count");
  EXPECT_EQ(field_of(table.extend(s, {SeqId(4), 0, 21, false, {0, 1}})), "plan.slices.count");
  EXPECT_EQ(field_of(table.extend(s, {SeqId(4), 0, 16, true, {0, 1}})), "plan.slices.sample");
  EXPECT_EQ(field_of(table.extend(s, {SeqId(4), 0, 16, false, {8}})), "plan.slices.new_blocks");
  EXPECT_EQ(field_of(table.extend(s, {SeqId(4), 0, 17, false, {3}})), "plan.slices.new_blocks");
  EXPECT_EQ(s.computed, 0u);
  EXPECT_TRUE(s.blocks.empty());
  EXPECT_TRUE(table.extend(s, {SeqId(4), 0, 16, false, {3}}).ok());
  EXPECT_TRUE(table.extend(s, {SeqId(4), 16, 4, true, {1}}).ok());
  EXPECT_EQ(s.computed, 20u);
  EXPECT_EQ(s.blocks, (std::vector<BlockId>{3, 1}));
  s.tokens.push_back(9);
  EXPECT_TRUE(table.extend(s, {SeqId(4), 20, 1, true, {}}).ok());
}

}  // namespace
}  // namespace conclave
