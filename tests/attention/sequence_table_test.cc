#include "attention_service/core/sequence_table.h"

#include <gtest/gtest.h>

#include <map>

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
    begin.sampling.max_tokens = 8;
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
  bad = begin;
  bad.sampling.logit_bias = {{100, 1.0f}};
  EXPECT_EQ(field_of(table.start(bad)), "plan.starts.sampling.logit_bias");
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

// What was delivered counts as output, as it did when it was sampled.
TEST_F(SequenceTableTest, AReplayCountsTokensAsTheFirstRunDid) {
  begin.tokens = {7, 8, 7, 9};
  begin.prompt_tokens = 4;
  begin.sampling.presence_penalty = 0.5f;
  ASSERT_TRUE(table.start(begin).ok());
  Sequence& first = *table.find(begin.seq);
  for (const TokenId token : {8u, 11u, 11u, 8u, 12u}) first.append(token);
  SequenceStart replay = begin;
  replay.seq = SeqId(5);
  replay.tokens = first.tokens;
  ASSERT_TRUE(table.start(replay).ok());
  const auto counts = [](const Sequence& sequence) {
    std::map<TokenId, uint32_t> out;
    for (const kernels::SeenToken& seen : sequence.counts.seen()) {
      EXPECT_TRUE(out.emplace(seen.token, seen.output_count).second);
    }
    return out;
  };
  const std::map<TokenId, uint32_t> want = {{7, 0}, {8, 2}, {9, 0}, {11, 2}, {12, 1}};
  EXPECT_EQ(counts(first), want);
  EXPECT_EQ(counts(*table.find(replay.seq)), want);
  replay.seq = SeqId(6);
  replay.sampling.presence_penalty = 0;
  ASSERT_TRUE(table.start(replay).ok());
  EXPECT_TRUE(table.find(replay.seq)->counts.seen().empty());  // costs nothing where nobody asks
}

}  // namespace
}  // namespace conclave
