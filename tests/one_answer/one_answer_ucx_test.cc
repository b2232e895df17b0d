// The same answers over UCX as over loopback, undisturbed and with a shard that dies in the middle.
#include <gtest/gtest.h>

#include "libs/transport/ucx_transport.h"
#include "tests/one_answer/harness.h"

namespace conclave {
namespace {

using testing::Answer;
using testing::RandomModel;

// Before any thread exists.
const bool kExported = (UcxSettings().export_to_environment(), true);

TransportFactory over_ucx() {
  return
      [](LoopExecutor& loop, const TransportOptions& options) -> StatusOr<std::unique_ptr<ExpertTransport>> {
        ASSIGN_OR_RETURN(std::unique_ptr<UcxTransport> transport,
                         UcxTransport::create(loop, UcxTransport::with_defaults(options)));
        return transport;
      };
}

class OneAnswerUcx : public ::testing::TestWithParam<Precision> {
 protected:
  std::unique_ptr<LocalCluster> start(const RandomModel& model, LocalClusterOptions options) {
    options.precision = GetParam();
    options.all_logits = true;
    auto cluster = LocalCluster::start(testing::local(model), std::move(options));
    EXPECT_TRUE(cluster.ok()) << cluster.status();
    if (!cluster.ok()) return nullptr;
    const Status ready = (*cluster)->wait_ready();
    EXPECT_TRUE(ready.ok()) << ready;
    return std::move(*cluster);
  }
};

TEST_P(OneAnswerUcx, EqualToLoopbackForEveryNumberOfShards) {
  ASSERT_TRUE(kExported);
  const RandomModel model(WeightDtype::kBf16, 23);
  const auto requests = testing::mixed_requests(model.spec, 16, 8);
  LocalClusterOptions options;
  options.shards = 1;
  options.scheduler.prefix_cache = false;  // every position's logits
  auto cluster = start(model, options);
  ASSERT_NE(cluster, nullptr);
  const auto want = testing::answers(*cluster, requests, 1);
  cluster.reset();
  options.scheduler.prefix_cache = true;
  options.make_transport = over_ucx();
  options.worker.micro_batch_min_rows = 4;
  options.scheduler.prefill_chunk_tokens = 40;
  for (const uint32_t shards : {1u, 2u, 5u}) {
    SCOPED_TRACE(shards);
    options.shards = shards;
    cluster = start(model, options);
    ASSERT_NE(cluster, nullptr);
    testing::expect_same(want, testing::answers(*cluster, requests, 16));
    cluster.reset();
  }
}

TEST_P(OneAnswerUcx, AShardDiesInTheMiddleOf16Streams) {
  const RandomModel model(WeightDtype::kBf16, 29);
  const auto requests = testing::mixed_requests(model.spec, 16, 80);
  LocalClusterOptions options;
  auto cluster = start(model, options);
  ASSERT_NE(cluster, nullptr);
  const auto want = testing::answers(*cluster, requests, 16, false);
  options.make_transport = over_ucx();
  cluster = start(model, options);
  ASSERT_NE(cluster, nullptr);
  std::vector<std::shared_ptr<PendingCompletion>> pending;
  for (const auto& r : requests) pending.push_back(cluster->submit(r));
  for (const auto& p : pending) ASSERT_TRUE(p->wait_for_tokens(3, 60 * kSecond));
  cluster->kill_shard(1);
  ASSERT_TRUE(cluster->add_shard().ok());
  std::vector<Answer> got;
  for (const auto& p : pending) {
    const auto done = p->wait(120 * kSecond);
    ASSERT_TRUE(done.ok()) << done.status();
    got.push_back({*done, {}});
  }
  testing::expect_same(want, got);
}

INSTANTIATE_TEST_SUITE_P(Both, OneAnswerUcx, ::testing::Values(Precision::kBf16, Precision::kF32),
                         [](const auto& p) { return p.param == Precision::kBf16 ? "Bf16" : "F32"; });

}  // namespace
}  // namespace conclave
