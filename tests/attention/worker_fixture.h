// A worker on a random model, in virtual time, its shards played by the test.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "attention_service/core/worker.h"
#include "libs/runtime/sim_executor.h"
#include "tests/support/fake_transport.h"
#include "tests/support/random_model.h"

namespace conclave {

inline constexpr Incarnation kSelf(100);
inline constexpr Incarnation kS1(1);
inline constexpr Incarnation kS2(2);

class WorkerTest : public ::testing::Test {
 protected:
  WorkerTest() {
    options.precision = Precision::kF32;
    options.kv_blocks = 64;
    options.max_batch_tokens = 64;
    options.exchange.deadline_floor = 50 * kMillisecond;
  }
  void make() {
    auto created = Worker::create(executor, transport, model.spec, model.dense, kernels::Context{}, options);
    ASSERT_TRUE(created.ok()) << created.status();
    worker = std::move(*created);
    worker->set_link(&link);
    worker->start();
    welcome();
    place(1, {kS1, kS2});
  }
  void welcome() {
    worker->on_message(Welcome{Incarnation(9), kSecond});
    next_step = 1;
  }
  void place(uint64_t epoch, const std::vector<Incarnation>& shards) {
    std::vector<ShardEndpoint> ends;
    for (Incarnation s : shards) ends.push_back({s, "s", "addr"});
    worker->on_message(
        PlacementUpdate{even_placement(Epoch(epoch), model.spec.num_layers, model.spec.num_experts, ends)});
    settle();
  }
  void settle() { world.run_until(world.now()); }
  // Answers every dispatch that was not answered yet, the way a shard would.
  void serve_one() {
    const auto [peer, d] = transport.submits[served++];
    CombineBatch c;
    c.id = d.id;
    c.shard = peer;
    c.layer = d.layer;
    c.hidden = d.hidden;
    c.dtype = d.dtype;
    c.outputs = std::make_shared<std::vector<std::byte>>(d.expert_ids.size() * d.row_bytes());
    for (uint32_t row = 0; row < d.row_count(); ++row) {
      for (uint32_t i = d.expert_begin[row]; i < d.expert_begin[row + 1]; ++i) {
        const std::byte* in = d.rows->data() + row * d.row_bytes();
        std::byte* out = c.outputs->data() + i * d.row_bytes();
        const kernels::ExpertJob job{&model.experts[d.layer][d.expert_ids[i]], &in, &out, 1};
        kernels::run_experts({}, options.precision, {&job, 1});
        c.items.push_back(i);
      }
    }
    transport.push(peer, TransportEvent::Combine{c});
  }
  void run() {
    settle();
    while (served < transport.submits.size()) {
      serve_one();
      settle();
    }
  }
  SequenceStart sequence(uint64_t seq, std::vector<TokenId> tokens, uint32_t max_tokens = 100) {
    SequenceStart s;
    s.seq = SeqId(seq);
    s.prompt_tokens = static_cast<uint32_t>(tokens.size());
    s.tokens = std::move(tokens);
    s.sampling.temperature = 0;
    s.sampling.max_tokens = max_tokens;
    return s;
  }
  void plan(BatchPlan p) {
    p.step = StepId(next_step++);
    worker->on_message(std::move(p));
  }
  StepResult last() { return link.all<StepResult>().back(); }
  // Greedy tokens of a prompt run alone, in the plainest way: the reference for other ways.
  std::vector<TokenId> alone(uint64_t seq, const std::vector<TokenId>& tokens, uint32_t count) {
    std::vector<TokenId> out;
    const BlockId block = static_cast<BlockId>(seq % 16) * 4;
    BatchPlan p;
    p.starts = {sequence(seq, tokens)};
    p.slices = {{SeqId(seq), 0, static_cast<uint32_t>(tokens.size()), true, {block, block + 1, block + 2}}};
    for (uint32_t i = 0; i < count; ++i) {
      plan(p);
      run();
      EXPECT_EQ(last().sampled.size(), 1u);
      out.push_back(last().sampled.at(0).token);
      p = {};
      p.slices = {{SeqId(seq), static_cast<uint32_t>(tokens.size()) + i, 1, true, {}}};
    }
    p = {};
    p.ends = {SeqId(seq)};
    plan(p);
    run();
    return out;
  }

  SimWorld world{1};
  SimExecutor& executor = world.add_process("worker");
  testing::FakeTransport transport{executor, kSelf};
  testing::FakeLink link;
  testing::RandomModel model{WeightDtype::kF32, 3};
  WorkerOptions options;
  std::unique_ptr<Worker> worker;
  size_t served = 0;
  uint64_t next_step = 1;
  const std::vector<TokenId> prompt = {5, 9, 1, 77, 3, 140, 2, 8, 8, 20, 31, 4, 66, 12, 99, 7, 6, 41};
};

}  // namespace conclave
