#include "libs/model/placement.h"

#include <algorithm>
#include <vector>

#include "gtest/gtest.h"

namespace conclave {
namespace {

std::vector<ShardEndpoint> shards(int n) {
  std::vector<ShardEndpoint> out;
  for (int i = 0; i < n; ++i) out.push_back({Incarnation(100 + i), "shard-" + std::to_string(i), "address"});
  return out;
}

TEST(PlacementTest, EvenSpreadGivesEveryExpertOneHomeWithinOneOfEqual) {
  for (int count : {1, 2, 3, 5, 8, 16}) {
    const PlacementTable table = even_placement(Epoch(1), 3, 16, shards(count));
    EXPECT_TRUE(table.complete());
    EXPECT_TRUE(table.validate().ok());
    for (uint32_t layer = 0; layer < 3; ++layer) {
      std::vector<int> load(count);
      for (uint32_t e = 0; e < 16; ++e) {
        ASSERT_EQ(table.homes(layer, e).size(), 1u);
        ++load[table.homes(layer, e)[0]];
      }
      const auto [least, most] = std::minmax_element(load.begin(), load.end());
      EXPECT_LE(*most - *least, 1) << count;
    }
  }
}

TEST(PlacementTest, NoShardsIsIncompleteNotACrash) {
  EXPECT_FALSE(even_placement(Epoch(1), 2, 8, {}).complete());
}

TEST(PlacementTest, BadTablesAreRefused) {
  auto twice = shards(2);
  twice[1].shard = twice[0].shard;
  EXPECT_FALSE(PlacementTable(Epoch(1), 1, 1, twice).validate().ok());
  PlacementTable range(Epoch(1), 1, 1, shards(1));
  range.add_home(0, 0, 3);
  EXPECT_FALSE(range.validate().ok());
  PlacementTable nobody(Epoch(1), 1, 1, {ShardEndpoint{}});
  EXPECT_FALSE(nobody.validate().ok());
}

}  // namespace
}  // namespace conclave
