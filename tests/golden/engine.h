// The engine's cores on one seeded virtual clock: an attention worker and expert shards over the loopback
// transport, driven plan by plan without a scheduler. Test only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention_service/core/worker.h"
#include "expert_service/core/shard.h"
#include "libs/checkpoint/binding.h"
#include "libs/runtime/sim_executor.h"
#include "libs/transport/loopback_transport.h"
#include "tests/support/fake_transport.h"

namespace conclave::golden {

class Engine {
 public:
  // `model` is borrowed. Failures of setting up are failures of the test (ok() is false then).
  Engine(const BoundModel& model, Precision precision, kernels::Isa isa, uint32_t shards = 2,
         bool fp8_wire = false);
  ~Engine();

  bool ok() const { return worker_ != nullptr; }

  struct Answer {
    std::vector<std::vector<float>> logits;  // of every position of the prompt
    std::vector<TokenId> tokens;             // greedy continuation
  };
  // Prefill in chunks of `chunk` positions, then `count` greedy tokens. One sequence at a time.
  Answer run(const std::vector<TokenId>& prompt, uint32_t count, uint32_t chunk = 128);

 private:
  StepResult step(BatchPlan plan);

  const BoundModel& model_;
  SimWorld world_{1};
  std::shared_ptr<LoopbackHub> hub_ = std::make_shared<LoopbackHub>();
  struct Node {
    std::unique_ptr<LoopbackTransport> transport;
    std::unique_ptr<Shard> shard;
  };
  std::vector<Node> shards_;
  testing::FakeLink link_;
  std::unique_ptr<LoopbackTransport> transport_;
  std::unique_ptr<Worker> worker_;
  std::vector<std::vector<float>> observed_;
  uint64_t next_seq_ = 1;
  uint64_t next_step_ = 1;
};

}  // namespace conclave::golden
