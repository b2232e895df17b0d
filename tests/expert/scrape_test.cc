// What a scrape costs of a shard and of a worker of the full geometry: 62 layers of 256 experts, in a cluster
// of 64 workers and 64 shards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "attention_service/adapters/worker_metrics.h"
#include "expert_service/adapters/shard_metrics.h"
#include "libs/base/clock.h"
#include "libs/base/random.h"
#include "libs/service/member_settings.h"
#include "libs/telemetry/ops_server.h"
#include "libs/telemetry/process_metrics.h"
#include "libs/telemetry/progress_watch.h"
#include "tests/router/raw_http.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kLayers = 62;
constexpr uint32_t kExperts = 256;
constexpr uint32_t kPeers = 64;
constexpr size_t kMaxBytes = 200'000;
constexpr Nanos kMaxTime = 50 * kMillisecond;
constexpr int kScrapes = 20;

Incarnation member(uint32_t i) { return Incarnation((1'764'500'000'000ull << 22) + i * 4'099); }

ShardMetrics full_shard(SplitMix64& random) {
  ShardMetrics m;
  m.experts = kExperts;
  m.tokens.resize(size_t{kLayers} * kExperts);
  for (uint64_t& rows : m.tokens) rows = random.below(1ull << 40);
  m.dispatches = m.replies = m.groups = m.items = m.expert_runs = 1ull << 40;
  m.held_experts = kLayers * kExperts;
  m.held_bytes = 1ull << 40;
  m.compute_ns = 1ll << 50;
  return m;
}

TransportStats full_transport(SplitMix64& random) {
  TransportStats stats;
  stats.peers = kPeers;
  stats.sent_bytes = stats.received_bytes = 1ull << 50;
  for (uint32_t i = 0; i < kPeers; ++i)
    stats.links.push_back({member(i), random.below(1ull << 40), random.below(1ull << 50),
                           random.below(1ull << 40), random.below(1ull << 50), random.below(1ull << 30)});
  return stats;
}

WorkerMetrics full_worker(SplitMix64& random) {
  WorkerMetrics m;
  m.steps = m.rows = m.sampled_tokens = 1ull << 40;
  for (uint32_t i = 0; i < kPeers; ++i) {
    ShardLink link;
    link.shard = member(i);
    link.name = "conclave-expert-" + std::to_string(i);
    link.replied_items = random.below(1ull << 50);
    link.compute_ns = static_cast<Nanos>(random.below(1ull << 50));
    for (int n = 0; n < 1000; ++n) link.replies.observe(static_cast<Nanos>(random.below(kSecond)));
    m.links.push_back(std::move(link));
  }
  return m;
}

// As a service of its own puts its operations port together.
class Scraped {
 public:
  Scraped(const char* role, std::function<void(MetricSink&)> collect)
      : process_(export_process(registry_, "1.0.0", role)),
        start_(export_startup(registry_, startup_)),
        collector_(registry_.add_collector(std::move(collect))),
        watch_(30 * kSecond) {
    watch_.start(registry_);
    OpsServer::Hooks hooks;
    hooks.metrics = &registry_;
    hooks.startup = &startup_;
    auto started = OpsServer::start("127.0.0.1:0", hooks);
    EXPECT_TRUE(started.ok()) << started.status();
    server_ = std::move(started).value();
  }

  // The body, and the fastest of many scrapes: what the machine does besides is not what is asked for.
  std::string scrape(Nanos* fastest) {
    std::string body;
    *fastest = kNever;
    for (int i = 0; i < kScrapes; ++i) {
      const TimePoint begin = steady_now();
      const auto response = testing::http_call(server_->port(), "GET", "/metrics");
      *fastest = std::min(*fastest, steady_now() - begin);
      EXPECT_EQ(response.status, 200);
      body = response.body;
    }
    return body;
  }

 private:
  MetricsRegistry registry_;
  StartupProgress startup_;
  std::unique_ptr<MetricsRegistry::CollectorHandle> process_, start_, collector_;
  ProgressWatch watch_;
  std::unique_ptr<OpsServer> server_;
};

size_t series_of(const std::string& text, const std::string& name) {
  size_t count = 0;
  for (size_t at = text.find("\n" + name); at != std::string::npos; at = text.find("\n" + name, at + 1)) {
    const char next = text[at + 1 + name.size()];
    count += next == '{' || next == ' ';
  }
  return count;
}

TEST(Scrape, AShardOfTheFullGeometry) {
  SplitMix64 random(7);
  const ShardMetrics metrics = full_shard(random);
  const TransportStats transport = full_transport(random);
  Scraped shard("expert", [&](MetricSink& sink) {
    const ShardMetrics copy = metrics;  // as MemberProcess hands it out
    export_metrics(copy, sink);
    export_transport(transport, 1, sink);
  });
  Nanos fastest = 0;
  const std::string text = shard.scrape(&fastest);
  EXPECT_LT(text.size(), kMaxBytes);
  EXPECT_LT(fastest, kMaxTime);
  EXPECT_EQ(series_of(text, "conclave_expert_layer_rows_total"), kLayers);
  EXPECT_EQ(series_of(text, "conclave_expert_layer_busiest_rows_total"), kLayers);
  EXPECT_EQ(series_of(text, "conclave_transport_link_sent_bytes_total"), kPeers);
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 1000)
      << "series grow with layers and peers, not experts";
  RecordProperty("bytes", static_cast<int>(text.size()));
  RecordProperty("microseconds", static_cast<int>(fastest / 1000));
  std::printf("shard: %zu bytes, %.3f ms\n", text.size(), static_cast<double>(fastest) * 1e-6);
}

TEST(Scrape, AWorkerOfAsManyShards) {
  SplitMix64 random(8);
  const WorkerMetrics metrics = full_worker(random);
  const TransportStats transport = full_transport(random);
  Scraped worker("attention", [&](MetricSink& sink) {
    export_metrics(metrics, 4096, sink);
    export_transport(transport, 1, sink);
  });
  Nanos fastest = 0;
  const std::string text = worker.scrape(&fastest);
  EXPECT_LT(text.size(), kMaxBytes);
  EXPECT_LT(fastest, kMaxTime);
  EXPECT_EQ(series_of(text, "conclave_attention_shard_reply_seconds_count"), kPeers);
  std::printf("worker: %zu bytes, %.3f ms\n", text.size(), static_cast<double>(fastest) * 1e-6);
}

TEST(Scrape, FiguresOfALayerAreThoseOfItsExperts) {
  ShardMetrics m;
  m.experts = 12;
  m.tokens.assign(24, 1);
  for (uint32_t e = 0; e < 12; ++e) m.tokens[12 + e] = e * 10;
  MetricsRegistry registry;
  const auto handle = registry.add_collector([&](MetricSink& sink) { export_metrics(m, sink); });
  const std::string text = registry.expose();
  EXPECT_THAT(text, HasSubstr("conclave_expert_layer_rows_total{layer=\"0\"} 12\n"));
  EXPECT_THAT(text, HasSubstr("conclave_expert_layer_busiest_rows_total{layer=\"0\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("conclave_expert_layer_busy_rows_total{layer=\"0\"} 8\n"));
  EXPECT_THAT(text, HasSubstr("conclave_expert_layer_rows_total{layer=\"1\"} 660\n"));
  EXPECT_THAT(text, HasSubstr("conclave_expert_layer_busiest_rows_total{layer=\"1\"} 110\n"));
  EXPECT_THAT(text, HasSubstr("conclave_expert_layer_busy_rows_total{layer=\"1\"} 600\n"));
  m.experts = 0;  // before there is a model
  EXPECT_THAT(registry.expose(), ::testing::Not(HasSubstr("layer=")));
}

}  // namespace
}  // namespace conclave
