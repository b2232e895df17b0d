// Copies of pages: what lets several choices share a prompt that ends within a page.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "attention_service/core/kv_store.h"
#include "tests/attention/worker_fixture.h"

namespace conclave {
namespace {

TEST(KvStore, ACopyIsTheWholePageInEveryLayerAndNothingElse) {
  for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
    ModelSpec spec;
    spec.num_layers = 3;
    spec.num_heads = 4;
    spec.num_kv_heads = 2;
    spec.head_dim = 8;
    auto kv = KvStore::reserve(spec, precision, 5);
    ASSERT_TRUE(kv.ok()) << kv.status();
    const size_t bytes = kernels::kv_page_bytes(kv->shape());
    const auto fill = [](uint32_t layer, BlockId block) { return static_cast<int>(10 * layer + block + 1); };
    for (uint32_t layer = 0; layer < 3; ++layer) {
      for (BlockId block = 0; block < 5; ++block) {
        std::memset(kv->page(layer, block), fill(layer, block), bytes);
      }
    }
    kv->copy(3, 1);
    for (uint32_t layer = 0; layer < 3; ++layer) {
      for (BlockId block = 0; block < 5; ++block) {
        const std::vector<std::byte> want(bytes, std::byte(fill(layer, block == 1 ? 3 : block)));
        EXPECT_EQ(std::memcmp(kv->page(layer, block), want.data(), bytes), 0) << layer << " " << block;
      }
    }
  }
}

class PageCopyTest : public WorkerTest {
 protected:
  using Logits = std::map<uint32_t, std::vector<float>>;

  PageCopyTest() {
    options.logits_observer = [this](RequestId request, uint32_t position, std::span<const float> logits) {
      seen[request.lo][position].assign(logits.begin(), logits.end());
    };
  }
  SequenceStart choice_of(uint64_t seq, const std::vector<TokenId>& tokens, uint32_t choice) {
    SequenceStart s = sequence(seq, tokens);
    s.request = RequestId{1, seq};
    s.choice = choice;
    s.sampling.seed = 77;
    s.sampling.temperature = 1.5f;
    return s;
  }
  void note_sampled() {
    for (const SampledToken& t : last().sampled) sampled[t.seq.value].push_back(t.token);
  }
  void decode(const std::vector<uint64_t>& seqs, uint32_t position, uint32_t steps) {
    for (uint32_t i = 0; i < steps; ++i) {
      BatchPlan p;
      for (uint64_t seq : seqs) p.slices.push_back({SeqId(seq), position + i, 1, true, {}});
      plan(p);
      run();
      note_sampled();
    }
  }

  std::map<uint64_t, Logits> seen;                   // by sequence
  std::map<uint64_t, std::vector<TokenId>> sampled;  // by sequence
};

// Every length of the part of a page that is shared, with the first choice going on in the page copied from.
TEST_F(PageCopyTest, ASequenceFromACopiedPageIsThatOfAFreshPrefill) {
  for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
    for (uint32_t length : {3u, 17u, 31u}) {
      SCOPED_TRACE(std::string(precision == Precision::kF32 ? "f32" : "bf16") + ", prompt of " +
                   std::to_string(length));
      options.precision = precision;
      options.micro_batches = 1 + length % 3;
      options.micro_batch_min_rows = 1;
      worker.reset();
      make();
      seen.clear();
      sampled.clear();
      std::vector<TokenId> tokens;
      for (uint32_t i = 0; i < length; ++i) tokens.push_back(prompt[i % prompt.size()] + i / 16);
      const uint32_t kSteps = 4;
      for (uint32_t choice = 0; choice < 3; ++choice) {
        const BlockId block = 10 + 3 * choice;
        BatchPlan p;
        p.starts = {choice_of(1 + choice, tokens, choice)};
        p.slices = {{SeqId(1 + choice), 0, length, true, {block, block + 1, block + 2}}};
        plan(p);
        run();
        note_sampled();
        decode({1 + choice}, length, kSteps);
      }
      // The same three with one prefill.
      BatchPlan p;
      p.starts = {choice_of(11, tokens, 0)};
      const std::vector<BlockId> shared = {40, 41};
      const uint32_t whole = length / kBlockTokens;
      p.slices = {{SeqId(11), 0, length, true, {40, 41, 42}}};
      p.ends = {SeqId(1), SeqId(2), SeqId(3)};
      plan(p);
      run();
      note_sampled();
      p = {};
      for (uint32_t choice = 1; choice < 3; ++choice) {
        const BlockId block = 44 + 4 * choice;
        std::vector<BlockId> blocks(shared.begin(), shared.begin() + whole);
        for (uint32_t i = whole; i < 3; ++i) blocks.push_back(block + i);
        p.copies.push_back({shared[whole], blocks[whole]});
        p.starts.push_back(choice_of(11 + choice, tokens, choice));
        p.slices.push_back({SeqId(11 + choice), length - 1, 1, true, blocks});
      }
      p.slices.push_back({SeqId(11), length, 1, true, {}});  // writes where the others read
      const uint64_t rows = worker->metrics().rows;
      plan(p);
      run();
      note_sampled();
      EXPECT_TRUE(last().failures.empty()) << last().failures[0].cause;
      EXPECT_EQ(worker->metrics().rows - rows, 3u) << "the prompt was computed once";
      EXPECT_EQ(worker->metrics().copied_pages, 2u);
      decode({12, 13}, length, kSteps);
      decode({11}, length + 1, kSteps - 1);
      for (uint64_t choice = 0; choice < 3; ++choice) {
        EXPECT_EQ(sampled[11 + choice], sampled[1 + choice]) << choice;
        for (const auto& [position, logits] : seen[11 + choice]) {
          const auto& want = seen[1 + choice][position];
          ASSERT_EQ(logits.size(), want.size());
          EXPECT_EQ(std::memcmp(logits.data(), want.data(), logits.size() * sizeof(float)), 0)
              << choice << " at " << position;
        }
      }
      EXPECT_NE(sampled[11], sampled[12]) << "the choices must differ for this to show anything";
    }
  }
}

TEST_F(PageCopyTest, CopiesHappenInTheirOrder) {
  make();
  BatchPlan p;
  p.starts = {choice_of(1, prompt, 0), choice_of(2, {1, 2, 3}, 0)};
  p.slices = {{SeqId(1), 0, 18, true, {0, 1}}, {SeqId(2), 0, 3, true, {2}}};
  plan(p);
  run();
  note_sampled();
  decode({1}, 18, 2);
  p = {};
  p.starts = {choice_of(3, prompt, 0)};
  p.copies = {{2, 5}, {1, 5}, {5, 6}, {2, 5}};  // 6 is a copy of 1, by way of 5
  p.slices = {{SeqId(3), 17, 1, true, {0, 6}}};
  plan(p);
  run();
  note_sampled();
  decode({3}, 18, 2);
  EXPECT_EQ(sampled[3], sampled[1]);
}

TEST_F(PageCopyTest, BadCopiesFailWhoWouldReadThemAndNoOther) {
  make();
  const PageCopy bad[] = {{64, 9}, {1, 64}, {9, 9}};
  for (uint64_t i = 0; i < std::size(bad); ++i) {
    const uint64_t seq = 1 + 2 * i;
    BatchPlan p;
    p.starts = {choice_of(seq, prompt, 0), choice_of(seq + 1, {1, 2, 3}, 0)};
    p.copies = {bad[i]};
    p.slices = {{SeqId(seq), 17, 1, true, {0, bad[i].to}}, {SeqId(seq + 1), 0, 3, true, {2}}};
    plan(p);
    run();
    ASSERT_EQ(last().failures.size(), 1u) << i;
    EXPECT_EQ(last().failures[0].seq, SeqId(seq));
    EXPECT_NE(last().failures[0].cause.find("plan.copies: "), std::string::npos) << last().failures[0].cause;
    ASSERT_EQ(last().sampled.size(), 1u);
    EXPECT_EQ(last().sampled[0].seq, SeqId(seq + 1));
  }
  EXPECT_EQ(worker->metrics().copied_pages, 0u);
}

TEST_F(PageCopyTest, OnlyACopiedPageMayBeEnteredInItsMiddleAndOnlyOnce) {
  make();
  const auto enter = [&](uint64_t seq, std::vector<PageCopy> copies) {
    BatchPlan p;
    p.starts = {choice_of(seq, prompt, 0)};
    p.copies = std::move(copies);
    p.slices = {{SeqId(seq), 17, 1, true, {0, 9}}};
    plan(p);
    run();
    return last().failures.empty() ? std::string() : last().failures[0].cause;
  };
  EXPECT_NE(enter(1, {}).find("plan.slices.start"), std::string::npos);
  EXPECT_EQ(enter(2, {{1, 9}}), "");
  EXPECT_NE(enter(3, {}).find("plan.slices.start"), std::string::npos) << "its page was given away";
  EXPECT_EQ(enter(4, {{1, 9}}), "");
  BatchPlan early;
  early.copies = {{1, 9}};
  plan(early);
  EXPECT_EQ(enter(5, {}), "") << "a copy may come with a plan before";
  plan(early);
  settle();
  welcome();
  place(1, {kS1, kS2});
  EXPECT_NE(enter(6, {}).find("plan.slices.start"), std::string::npos) << "another scheduler's copy";
}

// Standing still is counted only with sequences and without a plan, and not twice.
TEST_F(WorkerTest, TimeWithoutAPlanIsReported) {
  make();
  const auto pass = [&](Nanos time) { world.run_until(world.now() + time); };
  pass(kSecond);
  BatchPlan p;
  p.starts = {sequence(1, prompt, 3)};
  p.slices = {{SeqId(1), 0, 18, true, {0, 1}}};
  plan(p);
  run();
  EXPECT_EQ(last().plan_wait_ns, 0) << "there was nothing to do";
  pass(5 * kMillisecond);
  BatchPlan next;
  next.slices = {{SeqId(1), 18, 1, true, {}}};
  plan(next);
  settle();
  pass(7 * kMillisecond);  // waits for experts
  next.slices = {{SeqId(1), 19, 1, true, {}}};
  plan(next);  // in time
  run();
  const auto results = link.all<StepResult>();
  ASSERT_EQ(results.size(), 3u);
  EXPECT_EQ(results[1].plan_wait_ns, 5 * kMillisecond);
  EXPECT_EQ(results[2].plan_wait_ns, 0);
  EXPECT_EQ(results[2].sampled.at(0).finish, FinishReason::kLength);
  pass(kSecond);
  p = {};
  p.ends = {SeqId(1)};
  plan(p);
  run();
  EXPECT_EQ(last().plan_wait_ns, 0) << "its sequence had sampled its last token";
  EXPECT_EQ(worker->metrics().plan_wait_ns, 5 * kMillisecond);
}

}  // namespace
}  // namespace conclave
