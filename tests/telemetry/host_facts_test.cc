// Facts of the machine: read from made-up trees of files, and from this machine.
#include "libs/telemetry/host_facts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace conclave {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class HostFactsTree : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "host-" + std::to_string(getpid());
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  void file(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  std::string root_;
};

TEST_F(HostFactsTree, WhatIsThereIsReadAndWhatIsNotIsMissing) {
  file("/proc/cpuinfo",
       "processor\t: 0\nmodel name\t: A CPU @ 2GHz\nflags\t\t: fpu sse fma avx2 avx512f amx_bf16 xyz\n");
  file("/sys/devices/system/cpu/online", "0-3,8\n");
  file("/sys/devices/system/node/node0/cpulist", "0-1\n");
  file("/sys/devices/system/node/node10/cpulist", "2-3,8\n");
  file("/sys/fs/cgroup/cpu.max", "150000 100000\n");
  file("/sys/fs/cgroup/memory.max", "max\n");
  file("/proc/meminfo",
       "MemTotal:       1000 kB\nMemAvailable:    600 kB\nSwapTotal:  50 kB\nSwapFree:  20 kB\n"
       "HugePages_Total:       4\nHugePages_Free:        3\nHugepagesize:       2048 kB\n");
  file("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  file("/proc/sys/net/core/somaxconn", "4096\n");
  file("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
  file("/sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand\n");
  file("/sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n");
  const HostFacts facts = read_host_facts(root_);
  EXPECT_EQ(facts.cpu, "A CPU @ 2GHz");
  EXPECT_THAT(facts.cpu_features, ElementsAre("fma", "avx2", "avx512f", "amx_bf16"));
  EXPECT_EQ(facts.online_cpus, 5u);
  ASSERT_EQ(facts.numa_nodes.size(), 2u);
  EXPECT_EQ(facts.numa_nodes[1].number, 10u);
  EXPECT_THAT(facts.numa_nodes[1].cpus, ElementsAre(2, 3, 8));
  EXPECT_EQ(facts.cpu_quota, 1.5);
  EXPECT_EQ(facts.memory_bytes, 1000u * 1024);
  EXPECT_EQ(facts.swap_used_bytes, 30u * 1024);
  EXPECT_FALSE(facts.memory_limit_bytes.has_value());
  EXPECT_EQ(facts.huge_pages_free, 3u);
  EXPECT_EQ(facts.transparent_huge_pages, "madvise");
  ASSERT_EQ(facts.settings.size(), 1u);
  EXPECT_EQ(facts.settings[0].first, "net.core.somaxconn");
  ASSERT_EQ(facts.rdma_ports.size(), 1u);
  EXPECT_EQ(facts.rdma_ports[0].state, "ACTIVE");
  EXPECT_FALSE(facts.rdma_usable.has_value());
  EXPECT_FALSE(facts.shm_bytes.has_value());
  EXPECT_THAT(host_facts_json(facts), HasSubstr("\"shm_bytes\":null"));
  EXPECT_THAT(host_facts_json(facts), HasSubstr("\"device\":\"mlx5_0\",\"port\":1,\"state\":\"ACTIVE\""));
}

TEST_F(HostFactsTree, NonsenseInTheKernelsFilesIsNoFact) {
  for (const char* path :
       {"/proc/cpuinfo", "/sys/devices/system/cpu/online", "/sys/fs/cgroup/cpu.max", "/proc/meminfo",
        "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/devices/system/node/nodeX/cpulist"})
    file(path, "]]]\n,,--,9-,MemTotal:\nMemTotal: x kB\nflags\nmodel name\n[");
  const HostFacts facts = read_host_facts(root_);
  EXPECT_FALSE(facts.memory_bytes.has_value());
  EXPECT_FALSE(facts.cpu_quota.has_value());
  EXPECT_TRUE(facts.transparent_huge_pages.empty());
  EXPECT_TRUE(facts.numa_nodes.empty());
  EXPECT_FALSE(host_facts_json(facts).empty());
}

TEST(HostFacts, OfThisProcess) {
  const HostFacts facts = read_host_facts();
  EXPECT_GT(facts.memory_bytes.value_or(0), 1u << 20);
  EXPECT_FALSE(facts.allowed_cpus.empty());
  EXPECT_GE(facts.online_cpus, 1u);
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  ASSERT_TRUE(facts.open_files.has_value());
  EXPECT_EQ(facts.open_files->first, files.rlim_cur);
  EXPECT_GE(facts.open_now.value_or(0), 3u);
  EXPECT_GE(facts.threads, 1u);
}

}  // namespace
}  // namespace conclave
