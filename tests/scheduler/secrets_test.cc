// Members whose data planes could not connect: who is refused, who is expelled, and who stays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

using ::testing::HasSubstr;

using Digests = std::vector<std::string>;

Hello hello_of(Role role, uint64_t incarnation, std::optional<Digests> digests) {
  Hello hello = Harness::member_hello(role, incarnation);
  if (digests) hello.secrets = KnownSecrets{*std::move(digests)};
  return hello;
}
Hello worker(uint64_t incarnation, std::optional<Digests> digests) {
  return hello_of(Role::kAttention, incarnation, std::move(digests));
}
Hello shard(uint64_t incarnation, std::optional<Digests> digests) {
  return hello_of(Role::kExpert, incarnation, std::move(digests));
}

struct SecretsTest : ::testing::Test {
  bool member(uint64_t incarnation) {
    const SessionId session = h.sessions[Incarnation(incarnation)];
    return h.welcomes.contains(session) && !h.closed.contains(session);
  }
  std::string refusal(uint64_t incarnation) { return h.refusals[h.sessions[Incarnation(incarnation)]]; }
  void tell(uint64_t incarnation, Digests digests) {
    Heartbeat beat;
    beat.secrets = KnownSecrets{std::move(digests)};
    h.event(MemberMessage{h.sessions[Incarnation(incarnation)], beat});
  }
  Harness h;
};

TEST_F(SecretsTest, WhoNobodyCanConnectWithIsRefused) {
  h.join(worker(1, Digests{"a"}));
  h.join(shard(11, Digests{"a"}));
  const uint64_t joined = h.core.metrics().members_joined;
  h.join(shard(12, Digests{"b"}));
  h.join(worker(2, Digests{"b"}));
  h.join(shard(13, Digests{}));
  h.join(worker(3, Digests{}));
  h.join(worker(4, Digests{"b", "a"}));  // proves b, which no shard accepts
  for (const uint64_t stranger : {12, 2, 13, 3, 4}) {
    EXPECT_FALSE(member(stranger)) << stranger;
    EXPECT_THAT(refusal(stranger), HasSubstr("transport.secret_file")) << stranger;
  }
  EXPECT_EQ(h.core.metrics().members_refused, 5u);
  EXPECT_EQ(h.core.metrics().members_joined, joined);
  h.join(shard(14, Digests{"b", "a"}));  // accepts a
  EXPECT_TRUE(member(14));
  EXPECT_EQ(h.core.metrics().members_lost, 0u);
}

TEST_F(SecretsTest, WithoutASecretAllMeetButWhoHasOne) {
  h.join(worker(1, Digests{}));
  h.join(shard(11, Digests{}));
  h.join(shard(12, Digests{"a"}));
  EXPECT_TRUE(member(11));
  EXPECT_FALSE(member(12));
}

TEST_F(SecretsTest, WhoHasNotToldIsTakenAtItsWord) {
  h.join(worker(1, Digests{"a"}));
  h.join(shard(11, Digests{"a"}));
  h.join(shard(12, std::nullopt));
  h.join(worker(2, std::nullopt));
  EXPECT_TRUE(member(12));
  EXPECT_TRUE(member(2));
}

// One that came first does not keep the others out.
TEST_F(SecretsTest, AShardThatWasTheFirstIsExpelledWhenOthersMeet) {
  h.join(shard(12, Digests{"b"}));
  h.join(worker(1, Digests{"a"}));
  EXPECT_TRUE(member(12));
  EXPECT_TRUE(member(1));
  h.join(shard(11, Digests{"a"}));
  EXPECT_TRUE(member(1));
  EXPECT_TRUE(member(11));
  EXPECT_FALSE(member(12));
  EXPECT_THAT(refusal(12), HasSubstr("transport.secret_file"));
}

TEST_F(SecretsTest, AWorkerThatWasTheFirstIsExpelledWhenOthersMeet) {
  h.join(worker(2, Digests{"b"}));
  h.join(shard(11, Digests{"a"}));
  h.join(shard(12, Digests{"a"}));
  EXPECT_TRUE(member(11));
  h.join(worker(1, Digests{"a"}));
  EXPECT_FALSE(member(2));
  for (const uint64_t one : {1, 11, 12}) EXPECT_TRUE(member(one)) << one;
}

TEST_F(SecretsTest, AMemberThatLearnsTheSecretMeetsTheOthers) {
  h.join(worker(1, Digests{"b"}));
  h.join(shard(11, Digests{"a"}));
  h.join(shard(12, Digests{"b", "a"}));  // expels 11, which nobody can connect with
  EXPECT_FALSE(member(11));
  h.join(shard(13, Digests{"b"}));
  tell(1, {"a"});
  for (const uint64_t one : {1, 12, 13}) EXPECT_TRUE(member(one)) << one << ": its connections stay";
  h.join(shard(14, Digests{"a"}));
  EXPECT_TRUE(member(14));
  h.join(shard(15, Digests{"b"}));
  EXPECT_FALSE(member(15));
}

// docs/security.md: both everywhere, then the new one first, then alone; every member joins anew between any two steps.
TEST_F(SecretsTest, TheSecretIsChangedInThreeSteps) {
  uint64_t next = 100;
  std::vector<std::pair<Role, uint64_t>> fleet;
  const Digests old{"old"};
  for (const Role role : {Role::kAttention, Role::kExpert, Role::kAttention, Role::kExpert}) {
    h.join(hello_of(role, ++next, old));
    fleet.emplace_back(role, next);
  }
  Digests before = old;
  for (const Digests& step : {Digests{"old", "new"}, Digests{"new", "old"}, Digests{"new"}}) {
    for (size_t i = 0; i < fleet.size(); ++i) {
      tell(fleet[i].second, step);
      // Another one, which has read the file already, and one that has not.
      for (const Digests& known : {step, before}) {
        for (const Role role : {Role::kAttention, Role::kExpert}) {
          h.join(hello_of(role, ++next, known));
          EXPECT_TRUE(member(next)) << refusal(next) << " at " << step[0] << ", member " << i;
          h.event(MemberLost{h.sessions[Incarnation(next)], unavailable("it ends")});
        }
      }
    }
    before = step;
  }
  for (const auto& [role, incarnation] : fleet) EXPECT_TRUE(member(incarnation)) << incarnation;
  EXPECT_EQ(h.core.metrics().members_refused, 0u);
}

TEST_F(SecretsTest, AStrangerIsRefusedThoughThoseWhoMetHaveChangedSince) {
  h.join(worker(1, Digests{"a"}));
  h.join(shard(11, Digests{"a"}));
  tell(1, {"b"});  // the first step was left out
  h.join(shard(12, Digests{"a"}));  // cannot connect with the worker
  EXPECT_FALSE(member(12));
  h.join(shard(13, Digests{"c"}));
  EXPECT_FALSE(member(13));
}

}  // namespace
}  // namespace conclave::scheduler
