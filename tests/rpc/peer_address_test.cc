#include "scheduler/peer_address.h"

#include <gtest/gtest.h>

namespace conclave::scheduler {
namespace {

TEST(ReachableFrom, AnUnspecifiedHostIsThePeers) {
  EXPECT_EQ(reachable_from("0.0.0.0:9090", "ipv4:10.0.0.7:4242"), "10.0.0.7:9090");
  EXPECT_EQ(reachable_from(":9090", "ipv4:10.0.0.7:4242"), "10.0.0.7:9090");
  EXPECT_EQ(reachable_from("[::]:9090", "ipv6:%5Bfd00::7%5D:4242"), "[fd00::7]:9090");
  EXPECT_EQ(reachable_from("0.0.0.0:9090", "ipv6:[fd00::7]:4242"), "[fd00::7]:9090");
  EXPECT_EQ(reachable_from("127.0.0.1:9090", "ipv4:10.0.0.7:4242"), "127.0.0.1:9090");
  EXPECT_EQ(reachable_from("pod-1.conclave:9090", "ipv4:10.0.0.7:4242"), "pod-1.conclave:9090");
}

TEST(ReachableFrom, WhatIsNotUnderstoodIsEmpty) {
  for (const char* announced : {"", "nonsense", "0.0.0.0", "0.0.0.0:99999", "a b:1"})
    EXPECT_EQ(reachable_from(announced, "ipv4:10.0.0.7:4242"), "") << announced;
  for (const char* peer : {"", "unix:/tmp/socket", "ipv4:", "ipv6:%5B", "10.0.0.7:4242", "ipv4:10.0.0.7"})
    EXPECT_EQ(reachable_from("0.0.0.0:9090", peer), "") << peer;
}

}  // namespace
}  // namespace conclave::scheduler
