#include "tests/golden/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace conclave::golden {
namespace {

constexpr uint32_t kKvBlocks = 64;            // 1024 positions
constexpr Nanos kStepLimit = 3600 * kSecond;  // virtual

TransportOptions transport_options(Incarnation self, uint64_t seed) {
  TransportOptions o;
  o.self = self;
  o.secret = "test";
  o.fleet = "golden";
  auto random = std::make_shared<SplitMix64>(seed);
  o.random = [random] { return random->next(); };
  return o;
}

}  // namespace

Engine::Engine(const BoundModel& model, Precision precision, kernels::Isa isa, uint32_t shards, bool fp8_wire)
    : model_(model) {
  const kernels::Context kernels{isa, nullptr};
  std::vector<ShardEndpoint> ends;
  for (uint32_t i = 0; i < shards; ++i) {
    const Incarnation self(i + 1);
    const std::string name = "expert-" + std::to_string(i);
    SimExecutor& executor = world_.add_process(name);
    Node node;
    node.transport = std::make_unique<LoopbackTransport>(hub_, executor, transport_options(self, 10 + i));
    ShardOptions options;
    options.name = name;
    options.precision = precision;
    options.fp8_wire = fp8_wire;
    node.shard =
        std::make_unique<Shard>(executor, *node.transport, model.spec, model.experts, kernels, options);
    node.shard->start();
    ends.push_back({self, name, node.transport->address()});
    shards_.push_back(std::move(node));
  }
  SimExecutor& executor = world_.add_process("attention");
  transport_ = std::make_unique<LoopbackTransport>(hub_, executor, transport_options(Incarnation(100), 9));
  WorkerOptions options;
  options.precision = precision;
  options.fp8_wire = fp8_wire;
  options.kv_blocks = kKvBlocks;
  options.max_batch_tokens = 512;
  options.logits_observer = [this](RequestId, uint32_t position, std::span<const float> logits) {
    if (observed_.size() <= position) observed_.resize(position + 1);
    observed_[position].assign(logits.begin(), logits.end());
  };
  auto worker = Worker::create(executor, *transport_, model.spec, model.dense, kernels, options);
  if (!worker.ok()) {
    ADD_FAILURE() << message_of(worker.status());
    return;
  }
  worker_ = std::move(*worker);
  worker_->set_link(&link_);
  worker_->start();
  const PlacementTable table = even_placement(Epoch(1), model.spec.num_layers, model.spec.num_experts, ends);
  worker_->on_message(Welcome{Incarnation(9), kSecond});
  worker_->on_message(PlacementUpdate{table});
  for (Node& node : shards_) {
    node.shard->on_message(Welcome{Incarnation(9), kSecond});
    node.shard->on_message(PlacementUpdate{table});
  }
  world_.run_until(world_.now() + kSecond);
}

Engine::~Engine() = default;

StepResult Engine::step(BatchPlan plan) {
  plan.step = StepId(next_step_++);
  link_.sent.clear();
  worker_->on_message(std::move(plan));
  const bool done =
      world_.run_until([&] { return !link_.all<StepResult>().empty(); }, world_.now() + kStepLimit);
  if (!done) {
    ADD_FAILURE() << "the step did not end";
    return {};
  }
  StepResult result = link_.all<StepResult>().back();
  for (const auto& f : result.failures) ADD_FAILURE() << f.cause;
  return result;
}

Engine::Answer Engine::run(const std::vector<TokenId>& prompt, uint32_t count, uint32_t chunk) {
  Answer answer;
  observed_.clear();
  const SeqId seq(next_seq_++);
  const uint32_t length = static_cast<uint32_t>(prompt.size());
  SequenceStart start;
  start.seq = seq;
  start.tokens = prompt;
  start.prompt_tokens = length;
  start.sampling.temperature = 0;
  start.sampling.max_tokens = count + 1;
  start.sampling.ignore_eos = true;
  uint32_t blocks = 0;
  auto slice = [&](uint32_t begin, uint32_t n, bool sample) {
    PlanSlice s{seq, begin, n, sample, {}};
    for (; blocks * kBlockTokens < begin + n; ++blocks) s.new_blocks.push_back(blocks);
    return s;
  };
  for (uint32_t begin = 0; begin < length && ok(); begin += chunk) {
    BatchPlan plan;
    if (begin == 0) plan.starts = {start};
    const uint32_t n = std::min(chunk, length - begin);
    const bool last = begin + n == length;
    plan.slices = {slice(begin, n, last && count > 0)};
    const StepResult result = step(std::move(plan));
    for (const SampledToken& t : result.sampled) answer.tokens.push_back(t.token);
  }
  answer.logits = observed_;
  while (answer.tokens.size() < count) {
    BatchPlan plan;
    plan.slices = {slice(length + static_cast<uint32_t>(answer.tokens.size()) - 1, 1, true)};
    const StepResult result = step(std::move(plan));
    if (result.sampled.size() != 1) {
      ADD_FAILURE() << "nothing was sampled";
      break;
    }
    answer.tokens.push_back(result.sampled[0].token);
  }
  BatchPlan plan;
  plan.ends = {seq};
  step(std::move(plan));
  return answer;
}

}  // namespace conclave::golden
