// What a worker says of a step's time, and what it counts by shard.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>

#include "attention_service/core/step_shards.h"
#include "tests/attention/worker_fixture.h"

namespace conclave {
namespace {

using StepTimingTest = WorkerTest;

TEST(StepShards, TimeOutstandingIsOfAtLeastOneDispatch) {
  StepShards shards;
  shards.sent(kS1, 10);
  shards.sent(kS1, 20);
  shards.answered(kS1, 30, 4, 12);
  shards.left(kS1, 40);
  shards.left(kS1, 50);
  shards.sent(kS1, 90);
  shards.answered(kS1, 5, 1, 2);
  shards.left(kS1, 95);
  shards.left(kS2, 99);  // of an earlier step
  const auto list = shards.list();
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].shard, kS1);
  EXPECT_EQ(list[0].outstanding_ns, 45);
  EXPECT_EQ(list[0].slowest_ns, 30);
  EXPECT_EQ(list[0].compute_ns, 14);
  EXPECT_EQ(list[0].replies, 2u);
  EXPECT_EQ(list[0].items, 5u);
}

TEST(StepShards, TheSlowestAreKept) {
  StepShards shards;
  for (uint64_t i = 1; i <= 40; ++i) {
    shards.sent(Incarnation(i), 0);
    shards.left(Incarnation(i), static_cast<TimePoint>(i));
  }
  const auto list = shards.list();
  ASSERT_EQ(list.size(), kMaxTimedShards);
  EXPECT_EQ(list.front().shard, Incarnation(40));
  EXPECT_EQ(list.back().shard, Incarnation(25));
}

BatchPlan one_prompt(SequenceStart start, std::vector<BlockId> blocks) {
  BatchPlan p;
  const auto count = static_cast<uint32_t>(start.tokens.size());
  const SeqId seq = start.seq;
  p.starts = {std::move(start)};
  p.slices = {{seq, 0, count, true, std::move(blocks)}};
  return p;
}

TEST_F(StepTimingTest, OnlyAPlanThatAsksIsTimedAndTheTimesAddUp) {
  make();
  BatchPlan p = one_prompt(sequence(1, prompt), {0, 1});
  plan(p);
  run();
  EXPECT_FALSE(last().timing.has_value());

  p = one_prompt(sequence(2, prompt), {2, 3});
  p.timed = true;
  plan(p);
  p = {};
  p.slices = {{SeqId(2), 18, 1, true, {}}};
  p.timed = true;
  plan(p);
  settle();
  const Nanos pause = 3 * kMillisecond;
  while (served < transport.submits.size()) {
    // Everything that waits is answered at once, a while after it was asked.
    world.run_until(world.now() + pause);
    for (size_t left = transport.submits.size() - served; left > 0; --left) serve_one();
    settle();
  }
  const auto results = link.all<StepResult>();
  ASSERT_GE(results.size(), 3u);
  const uint32_t layers = model.spec.num_layers;
  for (size_t i = results.size() - 2; i < results.size(); ++i) {
    ASSERT_TRUE(results[i].timing.has_value());
    const StepTiming& timing = *results[i].timing;
    EXPECT_EQ(timing.wall_ns, results[i].compute_ns + results[i].expert_wait_ns);
    EXPECT_EQ(timing.wall_ns, layers * pause) << "nothing takes time here but the wait";
    EXPECT_EQ(timing.rows, i + 1 == results.size() ? 1u : 18u);
    uint32_t items = 0;
    std::set<Incarnation> seen;
    for (const ShardTiming& shard : timing.shards) {
      EXPECT_TRUE(shard.shard == kS1 || shard.shard == kS2);
      seen.insert(shard.shard);
      EXPECT_EQ(shard.slowest_ns, pause);
      EXPECT_LE(shard.replies, layers * timing.micro_batches);
      EXPECT_LE(shard.outstanding_ns, timing.wall_ns);
      items += shard.items;
    }
    EXPECT_EQ(seen.size(), timing.shards.size()) << "each once";
    EXPECT_EQ(items, timing.rows * model.spec.experts_per_token * layers);
  }
  // The second plan waited for the first.
  EXPECT_EQ(results[results.size() - 2].timing->queued_ns, 0);
  EXPECT_EQ(results.back().timing->queued_ns, layers * pause);
}

TEST_F(StepTimingTest, RowsSentAgainAndMissedDeadlinesAreOfTheirStep) {
  make();
  BatchPlan p = one_prompt(sequence(1, prompt), {0, 1});
  p.timed = true;
  plan(p);
  settle();
  const size_t lost = transport.submits.size();
  served = lost;  // the first layer's dispatches are lost
  ASSERT_TRUE(world.run_until([&] { return transport.submits.size() > lost; }, world.now() + kSecond));
  for (int i = 0; i < 50 && link.all<StepResult>().empty(); ++i) {
    run();
    world.run_until(world.now() + kSecond);
  }
  ASSERT_TRUE(last().timing.has_value());
  EXPECT_EQ(last().timing->deadlines, worker->metrics().exchange.deadlines);
  EXPECT_GT(last().timing->deadlines, 0u);
  EXPECT_EQ(last().timing->retried_items, worker->metrics().exchange.retried_items);
  EXPECT_GT(last().timing->retried_items, 0u);
}

TEST_F(StepTimingTest, ALostSchedulerLeavesNothingBehind) {
  make();
  BatchPlan p = one_prompt(sequence(1, prompt), {0, 1});
  p.timed = true;
  plan(p);
  settle();
  worker->on_down(unavailable("gone"));
  welcome();
  place(1, {kS1, kS2});
  run();
  p = one_prompt(sequence(1, prompt), {0, 1});
  plan(p);
  run();
  ASSERT_EQ(last().sampled.size(), 1u);
  EXPECT_FALSE(last().timing.has_value());
  worker.reset();  // with nothing running
  make();
  p = one_prompt(sequence(1, prompt), {0, 1});
  p.timed = true;
  plan(p);
  settle();
  worker.reset();  // in the middle of it
}

TEST_F(StepTimingTest, LinksAreTheShardsOfNow) {
  make();
  plan(one_prompt(sequence(1, prompt), {0, 1}));
  run();
  WorkerMetrics seen = worker->metrics();
  ASSERT_EQ(seen.links.size(), 2u);
  uint64_t replies = 0, items = 0;
  for (const ShardLink& link_seen : seen.links) {
    EXPECT_TRUE(link_seen.up);
    EXPECT_EQ(link_seen.name, "s");
    EXPECT_EQ(link_seen.outstanding_items, 0u);
    replies += link_seen.replies.count();
    items += link_seen.replied_items;
  }
  EXPECT_EQ(replies, seen.exchange.combines);
  EXPECT_EQ(items, seen.exchange.accepted_items);
  EXPECT_EQ(seen.step_times.count(), seen.steps);
  place(2, {kS2});
  seen = worker->metrics();
  ASSERT_EQ(seen.links.size(), 1u) << "one that left has no series";
  EXPECT_EQ(seen.links[0].shard, kS2);
}

TEST_F(StepTimingTest, AShardsWordForItsTimeIsBounded) {
  make();
  plan(one_prompt(sequence(1, prompt), {0, 1}));
  settle();
  ASSERT_FALSE(transport.submits.empty());
  world.run_until(world.now() + kMillisecond);
  const auto [peer, d] = transport.submits[served++];
  CombineBatch lie;
  lie.id = d.id;
  lie.shard = peer;
  lie.layer = d.layer;
  lie.hidden = d.hidden;
  lie.dtype = d.dtype;
  lie.outputs = std::make_shared<std::vector<std::byte>>();
  lie.compute_ns = std::numeric_limits<int64_t>::max();
  transport.push(peer, TransportEvent::Combine{lie});
  settle();
  const WorkerMetrics seen = worker->metrics();
  for (const ShardLink& one : seen.links) EXPECT_LE(one.compute_ns, kMillisecond);
}

// Each look at the clock takes a microsecond, so that computing takes time.
class TickingExecutor final : public Executor {
 public:
  explicit TickingExecutor(Executor& inner) : inner_(inner) {}
  TimePoint now() const override { return inner_.now() + ++ticks_ * kMicrosecond; }
  void post(Task task) override { inner_.post(std::move(task)); }
  TimerId post_at(TimePoint when, Task task) override {
    return inner_.post_at(std::max(inner_.now(), when - ticks_ * kMicrosecond), std::move(task));
  }
  void cancel(TimerId timer) override { inner_.cancel(timer); }

 private:
  Executor& inner_;
  mutable int64_t ticks_ = 0;
};

TEST_F(StepTimingTest, OverlapIsComputingWhileAnotherMicroBatchWaits) {
  TickingExecutor ticking(executor);
  std::map<uint32_t, Nanos> hidden;
  for (const uint32_t micro_batches : {1u, 2u}) {
    options.micro_batches = micro_batches;
    options.micro_batch_min_rows = 2;
    options.micro_batch_tuning = false;
    auto created = Worker::create(ticking, transport, model.spec, model.dense, kernels::Context{}, options);
    ASSERT_TRUE(created.ok());
    worker = std::move(*created);
    worker->set_link(&link);
    worker->start();
    welcome();
    place(1, {kS1, kS2});
    BatchPlan p;
    p.starts = {sequence(1, {1, 2}), sequence(2, {3, 4})};
    p.slices = {{SeqId(1), 0, 2, true, {0}}, {SeqId(2), 0, 2, true, {1}}};
    p.timed = true;
    plan(p);
    run();
    ASSERT_TRUE(last().timing.has_value());
    EXPECT_EQ(last().timing->micro_batches, micro_batches);
    hidden[micro_batches] = last().timing->hidden_ns;
    EXPECT_EQ(worker->metrics().hidden_ns, hidden[micro_batches]);
    EXPECT_LE(hidden[micro_batches], last().compute_ns);
  }
  EXPECT_EQ(hidden[1], 0);
  EXPECT_GT(hidden[2], 0);
}

}  // namespace
}  // namespace conclave
