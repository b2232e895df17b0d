// The network that the fault tests run on: it does to packets what it was told, and leaves nothing behind.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "tests/cluster/relay/network.h"

namespace conclave {
namespace {

TEST(LinkModelTest, DelayIsAddedAndNeverChangesTheOrder) {
  LinkModel model(1, 2);
  EXPECT_EQ(model.send(0, 1, 100), 100);
  model.set(0, 1, {.delay = 50 * kMillisecond});
  EXPECT_EQ(model.send(0, 1, 200), 200 + 50 * kMillisecond);
  EXPECT_EQ(model.send(1, 0, 200), 200) << "the other direction";
  model.set(0, 1, {});
  EXPECT_EQ(model.send(0, 1, 300), 200 + 50 * kMillisecond) << "not before the one that was sent earlier";
  EXPECT_EQ(model.send(0, 1, kSecond), kSecond);
}

TEST(LinkModelTest, ACutLosesAllOfOneDirectionUntilItIsMended) {
  LinkModel model(1, 3);
  model.set(0, 1, {.cut = true});
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(model.send(0, 1, i));
  EXPECT_TRUE(model.send(1, 0, 0));
  EXPECT_TRUE(model.send(0, 2, 0));
  model.set(0, 1, {});
  EXPECT_TRUE(model.send(0, 1, 20));
  EXPECT_EQ(model.counts(0, 1).cut, 10u);
  EXPECT_EQ(model.counts(0, 1).forwarded, 1u);
}

std::vector<int> lost_of(uint64_t seed, int packets, double loss, bool with_others) {
  LinkModel model(seed, 3);
  model.set(0, 1, {.loss = loss});
  model.set(2, 1, {.loss = loss});
  std::vector<int> lost;
  for (int i = 0; i < packets; ++i) {
    if (with_others) model.send(2, 1, i);
    if (!model.send(0, 1, i)) lost.push_back(i);
  }
  EXPECT_EQ(model.counts(0, 1).lost, lost.size());
  return lost;
}

TEST(LinkModelTest, LossHasItsShareAndTheSameSeedLosesTheSame) {
  const std::vector<int> lost = lost_of(7, 100000, 0.01, false);
  EXPECT_NEAR(static_cast<double>(lost.size()), 1000, 160);  // five standard deviations
  EXPECT_EQ(lost_of(7, 100000, 0.01, true), lost) << "other links do not matter";
  EXPECT_NE(lost_of(8, 100000, 0.01, false), lost);
  EXPECT_TRUE(lost_of(7, 1000, 0, false).empty());
  EXPECT_EQ(lost_of(7, 1000, 1, false).size(), 1000u);
}

// UDP between two nodes, each packet one number.
struct RelayTest : ::testing::Test {
  void SetUp() override {
    auto started = Network::start(kSeed, {"a", "b"});
    if (started.status().code() == StatusCode::kFailedPrecondition) GTEST_SKIP() << started.status();
    ASSERT_TRUE(started.ok()) << started.status();
    network = *std::move(started);
    a = bound("a");
    b = bound("b");
    host = bound("host");
  }
  void TearDown() override {
    for (int fd : {a, b, host}) {
      if (fd >= 0) close(fd);
    }
  }
  sockaddr_in address(const std::string& node) {
    sockaddr_in out{};
    out.sin_family = AF_INET;
    out.sin_port = htons(kPort);
    inet_pton(AF_INET, network->node(node).address.c_str(), &out.sin_addr);
    return out;
  }
  int bound(const std::string& node) {
    const int fd = socket_in(network->node(node).netns, SOCK_DGRAM);
    const sockaddr_in at = address(node);
    EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&at), sizeof(at)), 0) << node;
    return fd;
  }
  void send(int fd, const std::string& to, uint32_t number) {
    const sockaddr_in at = address(to);
    EXPECT_EQ(sendto(fd, &number, sizeof(number), 0, reinterpret_cast<const sockaddr*>(&at), sizeof(at)),
              static_cast<ssize_t>(sizeof(number)));
  }
  // The next number; -1 after `limit`.
  int64_t receive(int fd, Nanos limit) {
    pollfd wait{fd, POLLIN, 0};
    uint32_t number = 0;
    if (poll(&wait, 1, static_cast<int>(limit / kMillisecond)) != 1) return -1;
    return recv(fd, &number, sizeof(number), 0) == sizeof(number) ? static_cast<int64_t>(number) : -1;
  }

  static constexpr uint64_t kSeed = 11;
  static constexpr uint16_t kPort = 7000;
  static constexpr Nanos kLimit = 10 * kSecond;
  std::unique_ptr<Network> network;
  int a = -1, b = -1, host = -1;
};

TEST_F(RelayTest, NodesAndTheHostReachEachOther) {
  send(a, "b", 1);
  EXPECT_EQ(receive(b, kLimit), 1);
  send(b, "host", 2);
  EXPECT_EQ(receive(host, kLimit), 2);
  send(host, "a", 3);
  EXPECT_EQ(receive(a, kLimit), 3);
}

TEST_F(RelayTest, DelayCountsInBothDirections) {
  ASSERT_TRUE(network->set("a", "b", {.delay = 20 * kMillisecond}).ok());
  for (uint32_t i = 0; i < 5; ++i) {
    const TimePoint begin = steady_now();
    send(a, "b", i);
    ASSERT_EQ(receive(b, kLimit), i);
    send(b, "a", i);
    ASSERT_EQ(receive(a, kLimit), i);
    EXPECT_GE(steady_now() - begin, 40 * kMillisecond);
  }
  // All of them are on the way at once.
  ASSERT_TRUE(network->set("a", "b", {.delay = 100 * kMillisecond}).ok());
  const TimePoint begin = steady_now();
  for (uint32_t i = 0; i < 100; ++i) send(a, "b", i);
  for (uint32_t i = 0; i < 100; ++i) ASSERT_EQ(receive(b, kLimit), i);
  EXPECT_LT(steady_now() - begin, 100 * 100 * kMillisecond);
}

// What the model loses is what is missing at the other end.
TEST_F(RelayTest, LossAndCutsAreThoseOfTheModel) {
  const uint32_t kPackets = 200;
  ASSERT_TRUE(network->set("a", "b", {.loss = 0.3}).ok());
  LinkModel model(kSeed, 3);
  model.set(1, 2, {.loss = 0.3});
  for (uint32_t i = 0; i < kPackets; ++i) send(a, "b", i);
  uint32_t lost = 0;
  for (uint32_t i = 0; i < kPackets; ++i) {
    if (model.send(1, 2, 0)) {
      ASSERT_EQ(receive(b, kLimit), i);
    } else {
      ++lost;
    }
  }
  EXPECT_GT(lost, 0u);
  ASSERT_TRUE(network->set("a", "b", {.cut = true}).ok());
  send(a, "b", 1);
  const auto counts = network->counts("a", "b");
  ASSERT_TRUE(counts.ok());
  EXPECT_EQ(counts->lost, lost);
  EXPECT_EQ(counts->forwarded, kPackets - lost);
  ASSERT_TRUE(network->set("a", "b", {}).ok());
  send(a, "b", 2);
  EXPECT_EQ(receive(b, kLimit), 2);
}

bool exists(const std::string& netns) { return std::filesystem::exists("/run/netns/" + netns); }

TEST_F(RelayTest, NothingIsLeftBehind) {
  const std::string first = network->node("a").netns;
  ASSERT_TRUE(exists(first));
  // Killed, it can't clean up; the next run does. A namespace of a run that lives stays.
  auto other = Network::start(1, {"x"});
  ASSERT_TRUE(other.ok()) << other.status();
  const std::string of_other = (*other)->node("x").netns;
  unsigned pid = 0;
  ASSERT_EQ(std::sscanf(of_other.c_str(), "cv%un0", &pid), 1);
  ASSERT_EQ(kill(static_cast<pid_t>(pid), SIGKILL), 0);
  other->reset();
  EXPECT_TRUE(exists(of_other));
  auto third = Network::start(1, {"x"});
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_FALSE(exists(of_other));
  EXPECT_TRUE(exists(first));
  const std::string of_third = (*third)->node("x").netns;
  third->reset();
  EXPECT_FALSE(exists(of_third));
}

}  // namespace
}  // namespace conclave
