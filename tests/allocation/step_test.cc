// What a decode step takes from the heap, on all threads of a worker, two shards and a scheduler, with
// messages over UCX: nothing for a layer, a few small pieces for the step and for each of its tokens.
#include <gtest/gtest.h>

#include <cstdio>

#include "libs/local_cluster/local_cluster.h"
#include "libs/transport/ucx_transport.h"
#include "tests/allocation/count.h"
#include "tests/support/random_model.h"

namespace conclave {
namespace {

using testing::allocations;
using testing::RandomModel;

// Before any thread exists.
const bool kExported = (UcxSettings().export_to_environment(), true);

// Allocations and messages of a decode step of `streams` streams.
struct PerStep {
  double allocations = 0, messages = 0;
};

PerStep measure(uint32_t layers, uint32_t streams) {
  const RandomModel model(WeightDtype::kBf16, 11, {.layers = layers, .experts = 16, .top_k = 4});
  LocalClusterOptions options;
  options.shards = 2;
  options.worker.micro_batches = 1;
  options.worker.micro_batch_tuning = false;
  options.make_transport = [](LoopExecutor& loop,
                              const TransportOptions& to) -> StatusOr<std::unique_ptr<ExpertTransport>> {
    ASSIGN_OR_RETURN(std::unique_ptr<UcxTransport> transport,
                     UcxTransport::create(loop, UcxTransport::with_defaults(to)));
    return transport;
  };
  auto cluster = LocalCluster::start({&model.spec, &model.dense, &model.experts, "random"}, options);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_TRUE((*cluster)->wait_ready().ok());
  constexpr uint32_t kWarm = 60, kCounted = 200;
  std::vector<std::shared_ptr<PendingCompletion>> pending;
  for (uint32_t i = 0; i < streams; ++i) {
    AcceptedRequest request = make_request({1 + i, 2, 3 + i}, kWarm + kCounted + 100);
    request.sampling.ignore_eos = true;
    pending.push_back((*cluster)->submit(std::move(request)));
  }
  for (const auto& one : pending) EXPECT_TRUE(one->wait_for_tokens(kWarm, 60 * kSecond));
  const WorkerMetrics before = (*cluster)->worker_metrics(0);
  const uint64_t begin = allocations();
  for (const auto& one : pending) EXPECT_TRUE(one->wait_for_tokens(kWarm + kCounted, 60 * kSecond));
  const uint64_t end = allocations();
  const WorkerMetrics after = (*cluster)->worker_metrics(0);
  for (const auto& one : pending) EXPECT_TRUE(one->wait(60 * kSecond).ok());
  const auto steps = static_cast<double>(after.steps - before.steps);
  return {static_cast<double>(end - begin) / steps,
          static_cast<double>(after.exchange.dispatches - before.exchange.dispatches) / steps};
}

TEST(AllocationOfAStep, NothingForALayerAFewPiecesForTheStep) {
  ASSERT_TRUE(kExported);
  constexpr uint32_t kFew = 2, kMany = 12;
  // A dispatch and its combine, at both ends; lists may still grow now and then.
  constexpr double kMostPerExchange = 0.2;
  for (const uint32_t streams : {1u, 4u, 16u}) {
    const PerStep few = measure(kFew, streams), many = measure(kMany, streams);
    const double exchanges = many.messages - few.messages;
    const double each = (many.allocations - few.allocations) / exchanges;
    std::printf("%u streams: %.1f allocations a dispatch with its combine, %.0f a step beside\n", streams,
                each, few.allocations - each * few.messages);
    EXPECT_LT(each, kMostPerExchange) << streams;
    EXPECT_LT(few.allocations, 50 + 10 * streams);
  }
}

}  // namespace
}  // namespace conclave
