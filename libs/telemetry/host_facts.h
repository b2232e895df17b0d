// What the machine and its limits give a process: what `conclave diag` judges. Read from the kernel, never
// guessed: a figure that cannot be read is missing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace conclave {

struct HostFacts {
  std::string host;                       // the name it goes by
  std::string kernel;                     // release
  std::string cpu;                        // model name
  std::vector<std::string> cpu_features;  // of those that matter to the kernels: avx2, avx512f, amx_bf16, ...
  std::vector<uint32_t> allowed_cpus;     // this thread's; ascending
  uint32_t online_cpus = 0;
  std::optional<double> cpu_quota;  // processors' worth of time that the control group allows
  struct Node {
    uint32_t number = 0;
    std::vector<uint32_t> cpus;
  };
  std::vector<Node> numa_nodes;

  // RLIM_INFINITY is UINT64_MAX.
  using Limit = std::pair<uint64_t, uint64_t>;  // soft, hard
  std::optional<Limit> memlock_bytes;
  std::optional<Limit> open_files;
  std::optional<Limit> core_bytes;
  std::optional<uint64_t> open_now;  // descriptors
  uint32_t threads = 0;              // of the process

  std::optional<uint64_t> memory_bytes;        // of the machine
  std::optional<uint64_t> memory_limit_bytes;  // of the control group
  std::optional<uint64_t> available_bytes;
  std::optional<uint64_t> swap_used_bytes;
  std::optional<uint64_t> huge_pages_total;
  std::optional<uint64_t> huge_pages_free;
  std::optional<uint64_t> huge_page_bytes;
  std::string transparent_huge_pages;  // always | madvise | never; empty: unknown
  std::optional<uint64_t> shm_bytes;   // size of /dev/shm
  std::optional<uint64_t> shm_free_bytes;

  // Kernel settings by their names in /proc/sys, with dots, e.g. net.core.somaxconn.
  std::vector<std::pair<std::string, std::string>> settings;
  std::string clock_source;

  struct RdmaPort {
    std::string device;  // mlx5_0
    uint32_t port = 0;
    std::string state;       // ACTIVE
    std::string link_layer;  // InfiniBand | Ethernet
    std::string rate;        // 400 Gb/sec (4X NDR)
  };
  std::vector<RdmaPort> rdma_ports;
  std::optional<bool> rdma_usable;  // /dev/infiniband/uverbs* can be opened; none: there are none
};

// Of this process on this machine. `root` is put before /proc, /sys and /dev, for tests.
HostFacts read_host_facts(const std::string& root = "");
// One JSON object with the names above; what is missing is null.
std::string host_facts_json(const HostFacts& facts);

}  // namespace conclave
