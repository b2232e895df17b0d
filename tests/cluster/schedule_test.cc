// What the scheduler promises, shown by real processes on the demo checkpoint: a conversation stays where its
// prefix is; whatever is done to a sequence, its tokens stay the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <utility>

#include "libs/base/random.h"
#include "tests/cluster/cluster.h"

namespace conclave {
namespace {

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

constexpr char kCached[] = "conclave_scheduler_cached_tokens_total";
constexpr char kRows[] = "conclave_attention_rows_total";

struct Conversations {
  static constexpr uint32_t kCount = 4, kTurns = 5, kAnswer = 24;

  // All of them turn by turn, each answer a part of the next prompt.
  static Conversations run(ProcessCluster& cluster) {
    Conversations out;
    std::vector<std::vector<TokenId>> history(kCount);
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      std::vector<std::shared_ptr<PendingCompletion>> pending;
      for (uint32_t i = 0; i < kCount; ++i) {
        SplitMix64 random(100 * i + turn + 1);
        for (uint64_t n = 10 + random.below(40); n > 0; --n) {
          history[i].push_back(static_cast<TokenId>(random.below(1000)));
        }
        AcceptedRequest request = make_request(history[i], kAnswer);
        request.sampling.ignore_eos = true;
        request.sampling.seed = i;
        request.sampling.temperature = i % 2 == 0 ? 0.0f : 0.8f;
        pending.push_back(cluster.submit(std::move(request)));
      }
      for (uint32_t i = 0; i < kCount; ++i) {
        auto answer = pending[i]->wait(kStreamLimit);
        EXPECT_TRUE(answer.ok()) << answer.status();
        if (!answer.ok()) return out;
        out.rows += history[i].size() + kAnswer - 1;
        history[i].insert(history[i].end(), answer->tokens.begin(), answer->tokens.end());
        // The last token is known and not computed; whole pages can be shared.
        if (turn + 1 < kTurns) out.reusable += (history[i].size() - 1) / kBlockTokens * kBlockTokens;
      }
    }
    out.histories = std::move(history);
    return out;
  }

  std::vector<std::vector<TokenId>> histories;
  uint64_t rows = 0;      // positions to compute where nothing is reused
  uint64_t reusable = 0;  // positions in whole pages of the turns before
};

TEST(ScheduleTest, AConversationStaysWhereItsPrefixIsAndSaysTheSameWithoutACache) {
  Conversations with, without;
  {
    ClusterShape shape;
    shape.workers = 2;
    shape.model = demo_model();
    ProcessCluster cluster(shape);
    ASSERT_TRUE(cluster.wait_ready());
    with = Conversations::run(cluster);
    EXPECT_EQ(cluster.metric("scheduler", kCached), static_cast<double>(with.reusable));
    const double rows = cluster.metric("worker", kRows), rows1 = cluster.metric("worker1", kRows);
    EXPECT_EQ(rows + rows1, static_cast<double>(with.rows - with.reusable));
    EXPECT_GT(rows, 0) << "both workers should take conversations";
    EXPECT_GT(rows1, 0);
    RecordProperty("hit_share_percent", static_cast<int>(100 * with.reusable / with.rows));
    EXPECT_EQ(cluster.unexpected_ends(), "");
  }
  {
    ClusterShape shape;
    shape.model = demo_model();
    shape.scheduler_arguments = {"--set", "scheduler.prefix_cache=false"};
    ProcessCluster cluster(shape);
    ASSERT_TRUE(cluster.wait_ready());
    without = Conversations::run(cluster);
    EXPECT_EQ(cluster.metric("scheduler", kCached), 0);
    EXPECT_EQ(cluster.metric("worker", kRows), static_cast<double>(without.rows));
  }
  EXPECT_EQ(with.histories, without.histories);
}

// Sixteen streams in a pool that holds a few: who runs gives way and comes back, and says the same.
TEST(ScheduleTest, PreemptionInATinyPoolChangesNoToken) {
  ClusterShape shape;
  shape.model = demo_model();
  shape.worker_arguments = {"--set", "attention.kv_blocks=40"};
  ProcessCluster cluster(shape);
  ASSERT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 16, 160);
  streams.check(cluster);
  const double preempted = cluster.metric("scheduler", "conclave_scheduler_preempted_sequences_total");
  EXPECT_GT(preempted, 0);
  RecordProperty("preempted", static_cast<int>(preempted));
  EXPECT_EQ(cluster.metric("scheduler", "conclave_scheduler_kv_blocks{state=\"total\"}"), 40);
  // The last token leaves before the plan that ends its sequence is reported, which returns the pages.
  EXPECT_TRUE(eventually(
      [&] { return cluster.metric("scheduler", "conclave_scheduler_kv_blocks{state=\"used\"}") == 0; }));
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

// Four choices of a prompt that ends within a page: it is computed once, and its last page copied. With the
// feature off each choice computes it, and draws the same tokens.
TEST(ScheduleTest, ChoicesShareOnePrefillAndDrawWhatTheyDrawAlone) {
  constexpr uint32_t kPrompt = 100, kChoices = 4, kTokens = 40;
  std::vector<Completion> answers;
  for (const bool shared : {true, false}) {
    ClusterShape shape;
    shape.model = demo_model();
    if (!shared) shape.scheduler_arguments = {"--set", "scheduler.prefix_cache=false"};
    ProcessCluster cluster(shape);
    ASSERT_TRUE(cluster.wait_ready());
    SplitMix64 random(7);
    std::vector<TokenId> prompt(kPrompt);
    for (TokenId& token : prompt) token = static_cast<TokenId>(random.below(1000));
    AcceptedRequest request = make_request(prompt, kTokens);
    request.choices = kChoices;
    request.sampling.temperature = 0.9f;
    request.sampling.seed = 5;
    request.sampling.ignore_eos = true;
    auto pending = std::make_shared<PendingCompletion>(kChoices);
    cluster.gateway->submit(std::move(request), pending);
    auto answer = pending->wait(kStreamLimit);
    ASSERT_TRUE(answer.ok()) << answer.status();
    const uint32_t decoded = kChoices * (kTokens - 1);
    const uint32_t prefilled = shared ? kPrompt + (kChoices - 1) : kChoices * kPrompt;
    EXPECT_EQ(cluster.metric("worker", kRows), prefilled + decoded);
    EXPECT_EQ(cluster.metric("scheduler", "conclave_scheduler_prefill_tokens_total"), prefilled);
    EXPECT_EQ(cluster.metric("worker", "conclave_attention_copied_pages_total"), shared ? kChoices - 1 : 0);
    answers.push_back(*std::move(answer));
    EXPECT_EQ(cluster.unexpected_ends(), "");
  }
  EXPECT_EQ(answers[0].tokens, answers[1].tokens);
  for (uint32_t c = 1; c < kChoices; ++c) {
    EXPECT_EQ(answers[0].more[c - 1].tokens, answers[1].more[c - 1].tokens) << "choice " << c;
    EXPECT_EQ(answers[0].more[c - 1].tokens.size(), kTokens);
  }
  EXPECT_NE(answers[0].tokens, answers[0].more[0].tokens) << "the choices must differ to show anything";
}

// How long a worker with sixteen streams has no plan between steps, as a share of the steps' time.
double plan_wait_share(int steps_in_flight) {
  ClusterShape shape;
  shape.model = demo_model();
  shape.scheduler_arguments = {"--set", "scheduler.steps_in_flight=" + std::to_string(steps_in_flight)};
  ProcessCluster cluster(shape);
  EXPECT_TRUE(cluster.wait_ready());
  Streams streams(cluster, 16, 160);
  streams.check(cluster);
  const auto seconds = [&](const char* what) {
    return cluster.metric("scheduler", std::string("conclave_scheduler_step_") + what + "_seconds_total");
  };
  const double busy = seconds("compute") + seconds("expert_wait"), waited = seconds("plan_wait");
  EXPECT_GT(busy, 0);
  EXPECT_GE(waited, 0);
  std::printf("%d steps in flight: steps took %.1f ms, and %.2f ms passed without a plan, %.2f%%\n",
              steps_in_flight, 1000 * busy, 1000 * waited, 100 * waited / busy);
  return waited / busy;
}

// A plan is there before the step before it ends, so the worker does not stand still for the scheduler. With
// one step at a time it does: that is what the measure itself is checked by.
TEST(ScheduleTest, TheNextPlanIsThereWhenAStepEnds) {
  EXPECT_GT(plan_wait_share(1), 0);
  // Tests share their cores: a scheduler that was not let run shows here too, and one clean run is enough.
  double share = 1;
  for (int attempt = 0; attempt < 3 && share >= 0.02; ++attempt) share = plan_wait_share(2);
  EXPECT_LT(share, 0.02);
}

}  // namespace
}  // namespace conclave
