// What the scheduler promises, shown by real processes on the demo checkpoint: a conversation stays where its
// prefix is; whatever is done to a sequence, its tokens stay the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace conclave
