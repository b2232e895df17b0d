#include "cli/cluster_control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace conclave::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(FindMember, ByNameOrIncarnationAndNeverByGuess) {
  v1::StatusReply cluster;
  EXPECT_THAT(message_of(find_member(cluster, "a").status()), HasSubstr("there are: none"));
  const std::pair<const char*, uint64_t> members[] = {{"a", 11}, {"b", 12}, {"b", 13}, {"12", 14}};
  for (const auto& [name, incarnation] : members) {
    v1::MemberStatus* member = cluster.add_members();
    member->set_name(name);
    member->set_incarnation(incarnation);
  }
  EXPECT_EQ(find_member(cluster, "a")->incarnation(), 11u);
  EXPECT_EQ(find_member(cluster, "13")->incarnation(), 13u);
  EXPECT_EQ(find_member(cluster, "000000000000000d")->incarnation(), 13u) << "as logs write it";
  EXPECT_EQ(find_member(cluster, "0x000000000000000d")->incarnation(), 13u);
  EXPECT_EQ(find_member(cluster, "12")->incarnation(), 12u) << "an incarnation is nobody else's";
  const Status several = find_member(cluster, "b").status();
  EXPECT_EQ(several.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(message_of(several), AllOf(HasSubstr("2 members are called b"), HasSubstr("12, 13")));
  const Status none = find_member(cluster, "c").status();
  EXPECT_EQ(none.code(), StatusCode::kNotFound);
  EXPECT_THAT(message_of(none), HasSubstr("there are: a, b, b, 12"));
}

TEST(ClusterControlTest, AnAddressIsOneOrNamesTheFlag) {
  for (const char* bad : {"", "host", "host:", "host:0", "host:99999", "host:port", "::1:80", "http://host:80", "host:-1"}) {
    SchedulerFlags flags;
    flags.address = bad;
    const Status status = ClusterControl(flags).status().status();
    EXPECT_EQ(field_of(status), "--scheduler") << bad;
  }
}

}  // namespace
}  // namespace conclave::cli
