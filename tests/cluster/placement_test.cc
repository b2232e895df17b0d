// What people see of placement, and that they can change it: conclave shards, experts, rebalance.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/cluster/cluster.h"

namespace conclave {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

class PlacementTest : public ::testing::Test {
 protected:
  std::string command(std::vector<std::string> arguments, int code = 0) {
    static int count = 0;
    arguments.insert(arguments.end(), {"--scheduler", cluster.scheduler_address()});
    Process process =
        Process::start("conclave", arguments,
                       ClusterEnvironment::directory() + "/command" + std::to_string(++count) + ".log");
    EXPECT_EQ(process.wait(60 * kSecond).value_or(-1), code) << process.log();
    return process.log();
  }
  bool replicated() {
    return eventually([&] { return cluster.metric("scheduler", "conclave_scheduler_short_experts") == 0; });
  }

  ProcessCluster cluster;
};

TEST_F(PlacementTest, CommandsShowLoadAndHomes) {
  ASSERT_TRUE(cluster.wait_ready());
  ASSERT_TRUE(replicated()) << "two shards have room for two homes of every expert";
  EXPECT_THAT(command({"rebalance", "--dry-run"}), HasSubstr("nothing to move"));
  Streams streams(cluster, 4, 32);
  streams.check(cluster);
  // Reports come every second.
  ASSERT_TRUE(
      eventually([&] { return cluster.metric("scheduler", "conclave_scheduler_busiest_shard_ratio") >= 1; }));

  const std::string shards = command({"shards"});
  EXPECT_THAT(shards, ContainsRegex("placement [0-9]+, [0-9]+ layers of [0-9]+ experts, the busiest shard"));
  EXPECT_THAT(shards, ContainsRegex("shard0 +[0-9]+ +ready +[1-9]"));
  EXPECT_THAT(shards, ContainsRegex("shard1 +[0-9]+ +ready +[1-9]"));
  const std::string shards_json = command({"shards", "--json"});
  EXPECT_THAT(shards_json, HasSubstr("\"sole_homes\":0"));
  EXPECT_THAT(shards_json, HasSubstr("\"slots\":null"));
  EXPECT_THAT(shards_json, HasSubstr("\"name\":\"shard1\""));

  const std::string layer = command({"experts", "--layer", "1"});
  EXPECT_THAT(layer, ContainsRegex("layer 1: the busiest shard has [1-9]"));
  EXPECT_THAT(layer, ContainsRegex(" 0 +[0-9.]+ +[0-9.]+ +shard[01], shard[01]"));
  const std::string layers = command({"experts"});
  EXPECT_THAT(layers, HasSubstr("BUSIEST EXPERT"));
  EXPECT_THAT(layers, HasSubstr("2 to 2"));
  const std::string experts_json = command({"experts", "--layer", "0", "--json"});
  EXPECT_THAT(experts_json, HasSubstr("\"rows_per_s\":"));
  EXPECT_THAT(experts_json, ::testing::Not(HasSubstr("\"layer\":1")));
  EXPECT_THAT(command({"experts", "--layer", "99"}, 2), HasSubstr("99 is not below the number of layers"));
  EXPECT_THAT(command({"rebalance", "--dry-run", "--json"}), HasSubstr("\"dry_run\":true"));
  EXPECT_THAT(command({"status"}), HasSubstr(" experts a layer"));
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST_F(PlacementTest, AShardThatComesLaterTakesItsShareWithoutAnyRequestNoticing) {
  ASSERT_TRUE(cluster.wait_ready());
  ASSERT_TRUE(replicated());
  const double pairs = cluster.metric("shard0", "conclave_expert_held_experts");
  Streams streams(cluster, 4, 256);
  streams.wait_tokens(4);
  cluster.shards.emplace_back();
  cluster.start_shard(2);
  ASSERT_TRUE(eventually([&] {
    const double held = cluster.metric("shard2", "conclave_expert_held_experts");
    return held > 0 && cluster.metric("shard0", "conclave_expert_held_experts") < pairs;
  }));
  streams.check(cluster);
  EXPECT_TRUE(replicated());
  EXPECT_EQ(cluster.metric("worker", "conclave_attention_lost_shards_total"), 0);
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

}  // namespace
}  // namespace conclave
