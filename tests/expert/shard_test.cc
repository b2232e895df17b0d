#include "expert_service/core/shard.h"

#include <gtest/gtest.h>

#include <cstring>

#include "libs/runtime/sim_executor.h"
#include "tests/support/fake_transport.h"
#include "tests/support/random_model.h"

namespace conclave {
namespace {

using testing::FakeLink;
using testing::FakeTransport;
using testing::RandomModel;

constexpr Incarnation kShard(77);
constexpr Incarnation kWorkerA(1);
constexpr Incarnation kWorkerB(2);

class ShardTest : public ::testing::Test {
 protected:
  void make(ShardOptions options = {}) {
    options.precision = Precision::kF32;
    shard =
        std::make_unique<Shard>(executor, transport, model.spec, model.experts, kernels::Context{}, options);
    shard->set_link(&link);
    shard->start();
    shard->on_message(Welcome{Incarnation(9), kSecond});
    settle();
  }
  void settle() {
    world.run_until([&] { return world.pending() == 0; });
  }
  // Experts [begin, end) of every layer.
  void place(uint64_t epoch, uint16_t begin, uint16_t end, bool release = false, bool urgent = false) {
    PlacementTable table(Epoch(epoch), model.spec.num_layers, model.spec.num_experts,
                         {{kShard, "s", transport.address()}});
    for (uint32_t layer = 0; layer < model.spec.num_layers; ++layer) {
      for (uint16_t e = begin; e < end; ++e) table.add_home(layer, e, 0);
    }
    shard->on_message(PlacementUpdate{table, urgent, release});
    if (settles) settle();
  }
  DispatchBatch dispatch(Incarnation worker, uint64_t seq, uint32_t layer,
                         const std::vector<std::vector<uint16_t>>& rows, uint64_t seed = 5) {
    DispatchBatch b;
    b.id = {worker, seq};
    b.layer = layer;
    b.hidden = model.spec.hidden_size;
    b.dtype = RowDtype::kF32;
    b.expert_begin = {0};
    SplitMix64 random(seed);
    b.rows = std::make_shared<std::vector<std::byte>>(rows.size() * b.row_bytes());
    for (size_t i = 0; i < rows.size() * b.hidden; ++i) {
      const float x = static_cast<float>(random.uniform() * 2 - 1);
      std::memcpy(b.rows->data() + i * 4, &x, 4);
    }
    for (const auto& ids : rows) {
      b.expert_ids.insert(b.expert_ids.end(), ids.begin(), ids.end());
      b.expert_begin.push_back(static_cast<uint32_t>(b.expert_ids.size()));
    }
    return b;
  }
  void give(const DispatchBatch& b) { transport.push(b.id.worker, TransportEvent::Dispatch{b}); }
  // What expert `e` makes of a row, computed alone.
  std::vector<std::byte> alone(const DispatchBatch& b, uint32_t row, uint16_t e) {
    std::vector<std::byte> out(b.row_bytes());
    const std::byte* in = b.rows->data() + row * b.row_bytes();
    std::byte* o = out.data();
    const kernels::ExpertJob job{&model.experts[b.layer][e], &in, &o, 1};
    kernels::run_experts({}, Precision::kF32, {&job, 1});
    return out;
  }
  void expect_outputs(const DispatchBatch& b, const CombineBatch& c) {
    ASSERT_EQ(c.outputs->size(), c.items.size() * b.row_bytes());
    for (size_t i = 0; i < c.items.size(); ++i) {
      uint32_t row = 0;
      while (b.expert_begin[row + 1] <= c.items[i]) ++row;
      const auto want = alone(b, row, b.expert_ids[c.items[i]]);
      EXPECT_EQ(std::memcmp(want.data(), c.outputs->data() + i * b.row_bytes(), want.size()), 0)
          << "item " << i;
    }
  }

  SimWorld world{1};
  SimExecutor& executor = world.add_process("shard");
  FakeTransport transport{executor, kShard};
  FakeLink link;
  RandomModel model{WeightDtype::kF32, 3};
  std::unique_ptr<Shard> shard;
  bool settles = true;  // place() runs all that follows
};

TEST_F(ShardTest, AnswersEachRowAndExpertAndGroupsWorkers) {
  make();
  place(1, 0, 10);
  const auto a = dispatch(kWorkerA, 1, 0, {{3, 1, 7}, {1, 2, 3}});
  const auto b = dispatch(kWorkerB, 1, 0, {{1, 9, 0}}, 6);
  give(a);
  give(b);
  settle();
  ASSERT_EQ(transport.replies.size(), 2u);
  EXPECT_EQ(transport.replies[0].first, kWorkerA);
  EXPECT_EQ(transport.replies[1].first, kWorkerB);
  EXPECT_EQ(transport.replies[0].second.items, (std::vector<uint32_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_TRUE(transport.replies[0].second.missing.empty());
  EXPECT_EQ(transport.replies[0].second.shard, kShard);
  expect_outputs(a, transport.replies[0].second);
  expect_outputs(b, transport.replies[1].second);
  EXPECT_EQ(shard->metrics().groups, 1u) << "rows of both workers belong into one group";
  EXPECT_EQ(shard->metrics().items, 9u);
  EXPECT_EQ(shard->metrics().tokens[1], 3u);
}

TEST_F(ShardTest, NamesMissingExpertsAndComputesTheRest) {
  make();
  place(1, 0, 5);
  const auto a = dispatch(kWorkerA, 1, 1, {{8, 4}, {2, 9}, {9, 8}});
  give(a);
  settle();
  ASSERT_EQ(transport.replies.size(), 1u);
  EXPECT_EQ(transport.replies[0].second.missing, (std::vector<uint16_t>{8, 9}));
  EXPECT_EQ(transport.replies[0].second.items, (std::vector<uint32_t>{1, 2}));
  expect_outputs(a, transport.replies[0].second);
  EXPECT_EQ(shard->metrics().missing_items, 4u);
}

TEST_F(ShardTest, HoldsASupersetAndReportsReadyOnceWarm) {
  ShardOptions options;
  options.warm_slice_bytes = 1;  // one expert a task
  make(options);
  place(1, 0, 5);
  EXPECT_EQ(shard->metrics().held_experts, 15u);
  place(2, 5, 10);
  EXPECT_EQ(shard->metrics().held_experts, 30u);
  const auto ready = link.all<PlacementReady>();
  ASSERT_EQ(ready.size(), 2u);
  EXPECT_EQ(ready[1].epoch, Epoch(2));
  EXPECT_EQ(shard->epoch(), Epoch(2));
  EXPECT_GT(shard->metrics().weight_bytes_warmed, 0u);
  place(1, 0, 5);  // older: not taken
  EXPECT_EQ(link.all<PlacementReady>().size(), 2u);
}

TEST_F(ShardTest, LetsGoOfWhatTheReleasedPlacementDoesNotName) {
  make();
  place(1, 0, 6);
  place(2, 4, 10);
  EXPECT_EQ(shard->metrics().held_experts, 30u) << "workers may still use the one before";
  const uint64_t bytes = shard->metrics().held_bytes;
  place(2, 4, 10, true);
  EXPECT_EQ(shard->metrics().held_experts, 18u);
  EXPECT_EQ(shard->metrics().held_bytes, bytes * 18 / 30);
  EXPECT_EQ(shard->metrics().released_experts, 12u);
  EXPECT_EQ(shard->heartbeat().held_experts, 18u);
  EXPECT_EQ(link.all<PlacementReady>().size(), 2u) << "a release needs no answer";
  const auto a = dispatch(kWorkerA, 1, 1, {{3, 4}});
  give(a);
  settle();
  ASSERT_EQ(transport.replies.size(), 1u);
  EXPECT_EQ(transport.replies[0].second.missing, (std::vector<uint16_t>{3}));
  expect_outputs(a, transport.replies[0].second);
  // Given back, it is warmed again.
  const uint64_t warmed = shard->metrics().weight_bytes_warmed;
  place(3, 0, 10);
  EXPECT_EQ(shard->metrics().held_experts, 30u);
  EXPECT_EQ(shard->metrics().weight_bytes_warmed, warmed + bytes * 12 / 30);
  place(2, 0, 1, true);  // older
  EXPECT_EQ(shard->metrics().held_experts, 30u);
  // A drained shard is named no more.
  shard->on_message(PlacementUpdate{PlacementTable(Epoch(4), 3, 10, {}), false, true});
  EXPECT_EQ(shard->metrics().held_experts, 0u);
}

TEST_F(ShardTest, WarmsAtItsPaceBesideAPlacementThatServes) {
  ShardOptions options;
  options.warm_slice_bytes = 1;  // one expert a task
  const TimePoint start = world.now();
  make(options);
  place(1, 0, 1);
  const uint64_t one = shard->metrics().weight_bytes_warmed / 3;
  EXPECT_EQ(world.now(), start) << "nothing serves yet";
  options.warm_bytes_per_s = 10 * one;
  make(options);
  place(1, 0, 1);
  EXPECT_EQ(world.now(), start);
  EXPECT_EQ(link.all<PlacementReady>().size(), 2u);
  settles = false;
  place(2, 0, 5);  // 12 more
  world.run_until(world.now() + 550 * kMillisecond);
  EXPECT_EQ(shard->metrics().cold_experts, 12u - 6u);
  EXPECT_EQ(link.all<PlacementReady>().size(), 2u);
  place(3, 0, 6, false, true);  // somebody waits
  world.run_until(world.now() + kMillisecond);
  EXPECT_EQ(shard->metrics().cold_experts, 0u);
  ASSERT_EQ(link.all<PlacementReady>().size(), 3u) << "not for the one that was overtaken";
  EXPECT_EQ(link.all<PlacementReady>()[2].epoch, Epoch(3));
}

TEST_F(ShardTest, ReadsNothingAheadBeyondItsCapacity) {
  make();
  place(1, 0, 1);
  const uint64_t one = shard->metrics().held_bytes / 3;
  EXPECT_EQ(shard->hello().expert_bytes, one);
  ShardOptions options;
  options.capacity_bytes = 6 * one;
  make(options);
  place(1, 0, 1);
  place(2, 1, 3);
  EXPECT_EQ(shard->metrics().held_experts, 9u) << "with what is about to go";
  EXPECT_EQ(shard->metrics().weight_bytes_warmed, 6 * one);
  EXPECT_EQ(link.all<PlacementReady>().back().epoch, Epoch(2));
  place(2, 1, 3, true);
  EXPECT_EQ(shard->metrics().held_experts, 6u);
  EXPECT_EQ(shard->metrics().weight_bytes_warmed, 9 * one) << "there is room now";
}

TEST_F(ShardTest, TellsTheSchedulerWhatItComputed) {
  make();
  place(1, 0, 10);
  give(dispatch(kWorkerA, 1, 1, {{3, 1}, {1, 2}}));
  give(dispatch(kWorkerB, 1, 0, {{9}}));
  settle();
  const auto first = link.all<ExpertLoad>();
  ASSERT_EQ(first.size(), 1u);
  std::vector<std::pair<uint32_t, uint64_t>> entries;
  for (const auto& entry : first[0].entries) entries.emplace_back(entry.index, entry.count);
  EXPECT_EQ(entries, (std::vector<std::pair<uint32_t, uint64_t>>{{9, 1}, {11, 2}, {12, 1}, {13, 1}}));
  world.run_until(world.now() + 10 * kSecond);
  EXPECT_EQ(link.all<ExpertLoad>().size(), 1u) << "nothing was computed since";
  // Without a scheduler it waits for the next one.
  shard->on_down(unavailable("gone"));
  give(dispatch(kWorkerA, 2, 0, {{5}}));
  settle();
  EXPECT_EQ(link.all<ExpertLoad>().size(), 1u);
  shard->on_message(Welcome{Incarnation(10), kSecond});
  give(dispatch(kWorkerA, 3, 0, {{5}}));
  settle();
  ASSERT_EQ(link.all<ExpertLoad>().size(), 2u);
  ASSERT_EQ(link.all<ExpertLoad>()[1].entries.size(), 1u);
  EXPECT_EQ(link.all<ExpertLoad>()[1].entries[0].count, 2u);
}

TEST_F(ShardTest, SkipsWhatExpiredWhileItWaited) {
  ShardOptions options;
  options.max_group_items = 1;
  make(options);
  place(1, 0, 10);
  give(dispatch(kWorkerA, 1, 0, {{1}}));
  auto late = dispatch(kWorkerA, 2, 0, {{1}});
  late.time_left = 10 * kMillisecond;
  give(late);
  world.run_until([&] { return transport.replies.size() == 1; });
  world.pause(executor, world.now() + 20 * kMillisecond);
  settle();
  EXPECT_EQ(transport.replies.size(), 1u);
  EXPECT_EQ(shard->metrics().expired_dispatches, 1u);
}

TEST_F(ShardTest, SkipsCancelledAndWhatAGoneWorkerSent) {
  make();
  place(1, 0, 10);
  give(dispatch(kWorkerA, 2, 0, {{1}}));
  transport.push(kWorkerA, TransportEvent::Cancel{{kWorkerA, 2}});
  give(dispatch(kWorkerA, 3, 0, {{1}}));
  transport.push(kWorkerB, TransportEvent::Cancel{{kWorkerA, 3}});  // not its to cancel
  give(dispatch(kWorkerB, 4, 0, {{1}}));
  transport.push(kWorkerB, TransportEvent::PeerDown{unavailable("gone")});
  settle();
  ASSERT_EQ(transport.replies.size(), 1u);
  EXPECT_EQ(transport.replies[0].second.id.seq, 3u);
  EXPECT_EQ(shard->metrics().cancelled_dispatches, 2u);
}

TEST_F(ShardTest, RejectsWhatMakesNoSense) {
  make();
  place(1, 0, 10);
  auto bad_layer = dispatch(kWorkerA, 1, 0, {{1}});
  bad_layer.layer = 3;
  auto bad_expert = dispatch(kWorkerA, 2, 0, {{10}});
  auto bad_bytes = dispatch(kWorkerA, 3, 0, {{1}});
  bad_bytes.rows->pop_back();
  auto bad_hidden = dispatch(kWorkerA, 4, 0, {{1}});
  bad_hidden.hidden = 64;
  auto bad_dtype = dispatch(kWorkerA, 5, 0, {{1}});
  bad_dtype.dtype = RowDtype::kBf16;
  auto bad_begin = dispatch(kWorkerA, 6, 0, {{1}, {2}});
  bad_begin.expert_begin = {0, 3, 2};
  for (const auto& b : {bad_layer, bad_expert, bad_bytes, bad_hidden, bad_dtype, bad_begin}) give(b);
  auto forged = dispatch(kWorkerB, 7, 0, {{1}});
  transport.push(kWorkerA, TransportEvent::Dispatch{forged});
  settle();
  EXPECT_TRUE(transport.replies.empty());
  EXPECT_EQ(shard->metrics().rejected_dispatches, 7u);
}

TEST_F(ShardTest, ReadsNoFurtherWhileItsQueueIsFull) {
  ShardOptions options;
  options.max_queued_items = 4;
  options.max_group_items = 2;
  make(options);
  place(1, 0, 10);
  for (uint64_t seq = 1; seq <= 4; ++seq) give(dispatch(kWorkerA, seq, 0, {{1, 2}}));
  const int polls_before = transport.polls;
  // The first read takes all four messages; events that come now must wait until the queue is short again.
  world.run_until([&] { return transport.replies.size() == 1; });
  for (uint64_t seq = 5; seq <= 6; ++seq) give(dispatch(kWorkerA, seq, 0, {{1, 2}}));
  world.run_until([&] { return transport.replies.size() == 2; });
  EXPECT_EQ(transport.polls, polls_before + 1);
  EXPECT_GE(shard->metrics().reads_paused, 1u);
  settle();
  EXPECT_EQ(transport.replies.size(), 6u);
}

TEST_F(ShardTest, KeepsRepliesForCreditsAndDropsThemWhenNobodyWaits) {
  make();
  place(1, 0, 10);
  transport.reply_status = resource_exhausted("credits");
  auto a = dispatch(kWorkerA, 1, 0, {{1}});
  give(a);
  auto b = dispatch(kWorkerB, 1, 0, {{1}});
  b.time_left = 10 * kMillisecond;
  give(b);
  world.run_until([&] { return shard->metrics().groups >= 1; });
  world.run_until(world.now() + kSecond);
  EXPECT_EQ(shard->metrics().dropped_replies, 1u) << "the one whose deadline passed";
  transport.reply_status = OkStatus();
  transport.push(kWorkerA, TransportEvent::Writable{});
  world.run_until([&] { return !transport.replies.empty(); });
  ASSERT_EQ(transport.replies.size(), 1u);
  EXPECT_EQ(transport.replies[0].first, kWorkerA);
}

}  // namespace
}  // namespace conclave
