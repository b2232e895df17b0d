// What micro-batches win when the wire is as slow as the layers: tokens a second with one micro-batch against
// several, with a delay injected into every hop.
//
//   overlap_bench [--streams N] [--tokens N] [--rounds N] [--ratio F]
//
// A made geometry, compute-bound at the rows of a step, so that a layer's time grows with its rows. The
// compute of a layer (attention on the worker, experts on the shard, one thread each) is measured without a
// delay first; the delay of each hop is then half of it over `ratio` (compute over round trip). Every round
// runs all counts of micro-batches in turn; medians.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/random.h"
#include "libs/local_cluster/local_cluster.h"
#include "tests/support/random_model.h"

namespace conclave::bench {
namespace {

constexpr uint32_t kCounts[] = {1, 2, 4, 8};

struct Flags {
  uint32_t streams = 128;
  uint32_t tokens = 12;  // of each stream
  uint32_t rounds = 3;
  double ratio = 1.0;
};

struct Reading {
  double tokens_per_s = 0;
  double attention_ms = 0, experts_ms = 0;  // of one layer of a step with a row of every stream
  std::vector<TokenId> answers;
};

testing::Geometry geometry() {
  testing::Geometry g;
  g.hidden = 512;
  g.intermediate = 512;
  g.layers = 16;
  g.heads = 16;
  g.kv_heads = 4;
  g.head_dim = 64;
  g.rotary_dim = 32;
  g.experts = 2;
  g.top_k = 2;
  g.vocab = 512;
  return g;
}

void fail(const std::string& why) {
  std::fprintf(stderr, "overlap_bench: %s\n", why.c_str());
  std::exit(1);
}

std::vector<std::shared_ptr<PendingCompletion>> submit(LocalCluster& cluster, const Flags& flags,
                                                       uint32_t tokens) {
  SplitMix64 random(5);
  std::vector<std::shared_ptr<PendingCompletion>> pending;
  for (uint32_t i = 0; i < flags.streams; ++i) {
    std::vector<TokenId> prompt(4);
    for (TokenId& token : prompt) token = static_cast<TokenId>(random.below(cluster.spec().vocab_size));
    AcceptedRequest request = make_request(std::move(prompt), tokens);
    request.sampling.ignore_eos = true;
    pending.push_back(cluster.submit(std::move(request)));
  }
  return pending;
}

Reading run(const testing::RandomModel& model, const Flags& flags, uint32_t micro_batches, Nanos hop) {
  LocalClusterOptions options;
  options.shards = 1;
  options.scheduler.prefix_cache = false;
  options.scheduler.step_token_budget = std::max(512u, flags.streams);
  options.scheduler.itl_target_ms = 10'000;
  options.scheduler.max_batch_sequences = flags.streams;
  options.worker.micro_batches = micro_batches;
  options.worker.micro_batch_min_rows = 1;
  options.worker.micro_batch_tuning = false;
  options.worker.exchange.deadline_floor = 60 * kSecond;
  const auto hub = std::make_shared<LoopbackHub>();
  if (hop > 0) hub->set_delay_model([hop](Incarnation, Incarnation, uint64_t) { return hop; });
  options.make_transport =
      [hub](LoopExecutor& loop,
            const TransportOptions& transport) -> StatusOr<std::unique_ptr<ExpertTransport>> {
    return std::make_unique<LoopbackTransport>(hub, loop, transport);
  };
  LocalModel local;
  local.spec = &model.spec;
  local.dense = &model.dense;
  local.experts = &model.experts;
  local.fingerprint = "overlap";
  auto cluster = LocalCluster::start(local, options);
  if (!cluster.ok() || !(*cluster)->wait_ready(60 * kSecond).ok()) fail("the cluster does not start");
  for (const auto& one : submit(**cluster, flags, 2)) {
    if (!one->wait(60 * kSecond).ok()) fail("a request failed");
  }
  const WorkerMetrics worker = (*cluster)->worker_metrics(0);
  const ShardMetrics shard = (*cluster)->shard_metrics(0);
  const TimePoint start = steady_now();
  const auto pending = submit(**cluster, flags, flags.tokens);
  Reading reading;
  for (const auto& one : pending) {
    const auto done = one->wait(600 * kSecond);
    if (!done.ok() || done->tokens.size() != flags.tokens) fail("a request failed");
    reading.answers.insert(reading.answers.end(), done->tokens.begin(), done->tokens.end());
  }
  const double seconds = static_cast<double>(steady_now() - start) / kSecond;
  const WorkerMetrics w = (*cluster)->worker_metrics(0);
  const ShardMetrics s = (*cluster)->shard_metrics(0);
  const double rows = static_cast<double>(w.rows - worker.rows) * model.spec.num_layers;
  reading.tokens_per_s = flags.streams * flags.tokens / seconds;
  const auto of_a_layer = [&](Nanos all) {
    return static_cast<double>(all) / rows * flags.streams / kMillisecond;
  };
  reading.attention_ms = of_a_layer(w.attention_ns + w.dispatch_ns + w.combine_ns - worker.attention_ns -
                                    worker.dispatch_ns - worker.combine_ns);
  reading.experts_ms = of_a_layer(s.compute_ns - shard.compute_ns);
  return reading;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int main_of(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 12);
  Flags flags;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    const double value = std::atof(argv[i + 1]);
    if (name == "--streams") flags.streams = static_cast<uint32_t>(value);
    if (name == "--tokens") flags.tokens = static_cast<uint32_t>(value);
    if (name == "--rounds") flags.rounds = static_cast<uint32_t>(value);
    if (name == "--ratio") flags.ratio = value;
  }
  if (flags.streams < 1 || flags.tokens < 2 || flags.rounds < 1 || !(flags.ratio > 0)) {
    std::fprintf(stderr, "usage: overlap_bench [--streams N] [--tokens N] [--rounds N] [--ratio F]\n");
    return 2;
  }
  const testing::RandomModel model(WeightDtype::kBf16, 7, geometry());
  std::vector<std::vector<double>> speeds(std::size(kCounts));
  std::vector<double> ratios;
  for (uint32_t round = 0; round < flags.rounds; ++round) {
    const Reading still = run(model, flags, 1, 0);
    const double compute_ms = still.attention_ms + still.experts_ms;
    const Nanos hop = static_cast<Nanos>(compute_ms / flags.ratio / 2 * kMillisecond);
    std::printf("a layer: attention %.2f ms, experts %.2f ms; hop %.2f ms; no delay %.0f tokens/s\n",
                still.attention_ms, still.experts_ms, static_cast<double>(hop) / kMillisecond,
                still.tokens_per_s);
    for (size_t i = 0; i < std::size(kCounts); ++i) {
      const Reading reading = run(model, flags, kCounts[i], hop);
      if (reading.answers != still.answers) fail("micro-batches changed a token");
      speeds[i].push_back(reading.tokens_per_s);
      std::printf("  %u micro-batches: %.0f tokens/s, a layer computes %.2f + %.2f ms\n", kCounts[i],
                  reading.tokens_per_s, reading.attention_ms, reading.experts_ms);
    }
  }
  std::printf("micro-batches  tokens/s  against one\n");
  for (size_t i = 0; i < std::size(kCounts); ++i)
    std::printf("%13u %9.0f %12.2f\n", kCounts[i], median(speeds[i]), median(speeds[i]) / median(speeds[0]));
  return 0;
}

}  // namespace
}  // namespace conclave::bench

int main(int argc, char** argv) { return conclave::bench::main_of(argc, argv); }
