// Findings: each of them is raised by what it is about, and by nothing else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <map>
#include <tuple>

#include "cli/diag_checks.h"
#include "libs/base/random.h"
#include "libs/telemetry/host_facts.h"

namespace conclave::cli {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;

constexpr uint64_t kGiB = 1ull << 30;
constexpr char kTcpWords[] =
    "#\n# UCP context\n#\n#            md 0  :  component 0  tcp\n#\n"
    "#      resource 0  :  md 0  dev 0  flags -- tcp/eth0\n#\n"
    "# UCP endpoint\n#               peer: conclave:1\n"
    "#                 lane[0]:  0:tcp/eth0.0 md[0]      -> md[0]/tcp/sysdev[255]      rma_bw#0 am am_bw#0\n";
constexpr char kRdmaWords[] =
    "#      resource 0  :  md 0  dev 0  flags -- rc_mlx5/mlx5_0:1\n"
    "#      resource 1  :  md 0  dev 0  flags -- ud_mlx5/mlx5_0:1\n"
    "#                 lane[0]:  0:rc_mlx5/mlx5_0:1.0 md[0]   -> md[0]/ib/sysdev[255]  am\n";

// A machine with which all is well.
HostFacts good_host() {
  HostFacts f;
  f.host = "node-1";
  f.kernel = "6.1.0";
  f.cpu_features = {"fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq"};
  f.allowed_cpus = {0, 1, 2, 3};
  f.online_cpus = 8;
  f.numa_nodes = {{0, {0, 1, 2, 3}}, {1, {4, 5, 6, 7}}};
  f.memlock_bytes = HostFacts::Limit{UINT64_MAX, UINT64_MAX};
  f.open_files = HostFacts::Limit{65536, 65536};
  f.open_now = 40;
  f.memory_bytes = 64 * kGiB;
  f.available_bytes = 32 * kGiB;
  f.swap_used_bytes = 0;
  f.huge_pages_total = 0;
  f.huge_pages_free = 0;
  f.huge_page_bytes = 2 << 20;
  f.transparent_huge_pages = "madvise";
  f.shm_bytes = 8 * kGiB;
  f.shm_free_bytes = 8 * kGiB;
  f.settings = {{"net.core.somaxconn", "4096"},
                {"net.ipv4.tcp_rmem", "4096 131072 6291456"},
                {"net.ipv4.tcp_wmem", "4096 16384 4194304"},
                {"vm.overcommit_memory", "0"},
                {"vm.zone_reclaim_mode", "0"}};
  f.clock_source = "tsc";
  return f;
}

DiagInput local(const HostFacts& facts, const std::string& words = kTcpWords) {
  DiagInput input;
  input.local_json = "{\"host\":" + host_facts_json(facts) + "}";
  input.local_ucx = words;
  input.local_isa = "avx512";
  input.tls = "tcp";
  input.interface = "eth0";
  return input;
}

ProcessReport process(const std::string& role, const HostFacts& facts, uint32_t threads = 2,
                      const std::string& words = kTcpWords) {
  ProcessReport out;
  out.process = {role, role + "-0", "10.0.0.1:9090", "0.1.0", role == "router" ? "" : "k1", 7};
  out.json = "{\"host\":" + host_facts_json(facts);
  if (role == "attention" || role == "expert") {
    out.json += ",\"compute\":{\"isa\":\"avx512\",\"threads\":" + std::to_string(threads) +
                "},\"data_plane\":{\"tls\":\"tcp\",\"interface\":\"eth0\",\"ucx\":" +
                json::serialize(json::value(words)) + "}";
  }
  out.json += "}";
  out.clock = ClockOffset{0.001, 0.002};
  return out;
}

DiagInput cluster(std::vector<ProcessReport> processes) {
  DiagInput input = local(good_host());
  input.scheduler = "10.0.0.1:7070";
  input.cluster = StatusView{};
  input.cluster->reachable = input.cluster->ready = true;
  input.processes = std::move(processes);
  return input;
}

// Those that are not in order, as "check: severity".
std::vector<std::string> raised(const DiagInput& input) {
  std::vector<std::string> out;
  for (const Finding& f : judge(input)) {
    if (f.severity == Severity::kOk) continue;
    EXPECT_FALSE(f.advice.empty()) << f.check << ": " << f.what;
    out.push_back(f.check + ": " + severity_name(f.severity));
  }
  return out;
}

using Raised = std::vector<std::string>;

TEST(Diag, NothingIsRaisedWhereAllIsWell) {
  EXPECT_EQ(raised(local(good_host())), Raised{});
  EXPECT_EQ(raised(cluster({process("scheduler", good_host()), process("router", good_host()),
                            process("attention", good_host()), process("expert", good_host())})),
            Raised{});
  EXPECT_EQ(worst_of(judge(local(good_host()))), Severity::kOk);
}

TEST(Diag, TransportsAreReadFromUcxsOwnWords) {
  EXPECT_EQ(ucx_transports(kTcpWords).available, Raised{"tcp/eth0"});
  EXPECT_EQ(ucx_transports(kTcpWords).in_use, Raised{"tcp/eth0"});
  EXPECT_EQ(ucx_transports(kRdmaWords).available, (Raised{"rc_mlx5/mlx5_0:1", "ud_mlx5/mlx5_0:1"}));
  EXPECT_EQ(ucx_transports(kRdmaWords).in_use, Raised{"rc_mlx5/mlx5_0:1"});
  EXPECT_TRUE(ucx_transports("").available.empty());
  for (uint64_t seed = 0; seed < 500; ++seed) {  // whatever it says
    SplitMix64 r(seed);
    std::string words = kTcpWords;
    for (int i = 0; i < 30; ++i) words[r.below(words.size())] = static_cast<char>(r.below(256));
    ucx_transports(words.substr(0, r.below(words.size() + 1)));
  }
}

TEST(Diag, LockedMemoryMattersToRdma) {
  HostFacts f = good_host();
  f.memlock_bytes = HostFacts::Limit{8 << 20, 8 << 20};
  EXPECT_EQ(raised(local(f)), Raised{});
  f.rdma_ports = {{"mlx5_0", 1, "ACTIVE", "InfiniBand", "400 Gb/sec"}};
  f.rdma_usable = true;
  EXPECT_EQ(raised(local(f, kRdmaWords)), Raised{"memlock: problem"});
  f.memlock_bytes = HostFacts::Limit{kGiB, kGiB};
  EXPECT_EQ(raised(local(f, kRdmaWords)), Raised{"memlock: warning"});
}

TEST(Diag, RdmaThatIsThereAndNotUsed) {
  HostFacts f = good_host();
  f.rdma_ports = {{"mlx5_0", 1, "ACTIVE", "InfiniBand", "400 Gb/sec"}};
  f.rdma_usable = true;
  EXPECT_EQ(raised(local(f)), Raised{"data plane: warning"});
  EXPECT_EQ(raised(local(f, kRdmaWords)), Raised{});
  f.rdma_usable = false;
  EXPECT_EQ(raised(local(f, kRdmaWords)), Raised{"rdma: problem"});
  f.rdma_ports[0].state = "DOWN";
  EXPECT_EQ(raised(local(f)), Raised{"rdma: warning"});
}

TEST(Diag, UcxThatFindsNothing) {
  DiagInput input = local(good_host(), "");
  input.local_ucx_error = "UCX found no device eth9";
  EXPECT_EQ(raised(input), Raised{"data plane: problem"});
  EXPECT_EQ(raised(local(good_host(), "# UCP context\n")), Raised{"data plane: problem"});
}

TEST(Diag, OpenFiles) {
  for (const auto& [soft, open, what] :
       {std::tuple{512u, 10u, Raised{"open files: warning"}},
        std::tuple{64u, 10u, Raised{"open files: problem"}},
        std::tuple{65536u, 60000u, Raised{"open files: problem"}}, std::tuple{1024u, 10u, Raised{}}}) {
    HostFacts f = good_host();
    f.open_files = HostFacts::Limit{soft, soft};
    f.open_now = open;
    EXPECT_EQ(raised(local(f)), what) << soft;
  }
  HostFacts f = good_host();
  f.open_files = HostFacts::Limit{1024, 1024};  // few for a router
  EXPECT_EQ(raised(cluster({process("router", f), process("expert", f)})), Raised{"open files: warning"});
}

TEST(Diag, SharedMemoryOnlyWhereItIsUsed) {
  HostFacts f = good_host();
  f.shm_bytes = 64 << 20;
  EXPECT_EQ(raised(local(f)), Raised{});
  const std::string words =
      std::string(kTcpWords) + "#      resource 1  :  md 1  dev 1  flags -- posix/memory\n";
  EXPECT_EQ(raised(local(f, words)), Raised{"/dev/shm: warning"});
  f.shm_bytes = 1 << 20;
  EXPECT_EQ(raised(local(f, words)), Raised{"/dev/shm: problem"});
}

TEST(Diag, ThreadsAndProcessors) {
  EXPECT_EQ(raised(cluster({process("attention", good_host(), 4)})), Raised{});
  EXPECT_EQ(raised(cluster({process("attention", good_host(), 5)})), Raised{"processors: warning"});
  HostFacts f = good_host();
  f.cpu_quota = 1.5;
  EXPECT_EQ(raised(cluster({process("attention", f, 2)})), Raised{});
  EXPECT_EQ(raised(cluster({process("attention", f, 3)})), Raised{"processors: warning"});
  f = good_host();
  f.allowed_cpus = {2, 3, 4, 5};
  EXPECT_EQ(raised(cluster({process("expert", f)})), Raised{"numa: warning"});
}

TEST(Diag, KernelsThatAreSlowerThanTheCpu) {
  DiagInput input = local(good_host());
  input.local_isa = "avx2";
  EXPECT_EQ(raised(input), Raised{"isa: warning"});
  input.local_isa = "avx512bf16";
  EXPECT_EQ(raised(input), Raised{});
  HostFacts f = good_host();
  f.cpu_features = {"fma", "avx2"};
  input = local(f);
  input.local_isa = "avx2";
  EXPECT_EQ(raised(input), Raised{});
  input.local_isa = "scalar";
  EXPECT_EQ(raised(input), Raised{"isa: warning"});
}

TEST(Diag, MemoryAndHugePages) {
  HostFacts f = good_host();
  f.available_bytes = kGiB;
  EXPECT_EQ(raised(local(f)), Raised{"memory: problem"});
  f = good_host();
  f.swap_used_bytes = 4 * kGiB;
  EXPECT_EQ(raised(local(f)), Raised{"memory: warning"});
  f = good_host();
  f.huge_pages_total = f.huge_pages_free = 1024;
  EXPECT_EQ(raised(local(f)), Raised{"huge pages: warning"});
  f.huge_pages_free = 0;
  EXPECT_EQ(raised(local(f)), Raised{});
}

TEST(Diag, KernelSettings) {
  for (const auto& [name, value] :
       std::map<std::string, std::string>{{"net.core.somaxconn", "128"},
                                          {"net.ipv4.tcp_rmem", "4096 131072 212992"},
                                          {"net.ipv4.tcp_wmem", "4096 16384 212992"},
                                          {"vm.overcommit_memory", "2"},
                                          {"vm.zone_reclaim_mode", "1"}}) {
    HostFacts f = good_host();
    for (auto& setting : f.settings)
      if (setting.first == name) setting.second = value;
    EXPECT_EQ(raised(local(f)), Raised{"kernel: warning"}) << name;
  }
  HostFacts f = good_host();
  f.clock_source = "hpet";
  EXPECT_EQ(raised(local(f)), Raised{"kernel: warning"});
}

TEST(Diag, HostsAreJudgedOnceAndLoopbackReachesOne) {
  HostFacts other = good_host();
  other.host = "node-2";
  other.swap_used_bytes = 4 * kGiB;
  EXPECT_EQ(raised(cluster(
                {process("attention", good_host()), process("expert", other), process("expert", other)})),
            Raised{"memory: warning"});
  const std::string words = "#      resource 0  :  md 0  dev 0  flags -- tcp/lo\n";
  EXPECT_EQ(raised(cluster({process("expert", good_host(), 2, words)})), Raised{});
  other.swap_used_bytes = 0;
  EXPECT_EQ(raised(cluster({process("expert", good_host(), 2, words), process("attention", other)})),
            Raised{"data plane: problem"});
}

TEST(Diag, ClocksCountBeyondWhatTheRoundTripLeavesOpen) {
  const auto with = [](double offset, double bound) {
    std::vector<ProcessReport> all = {process("scheduler", good_host()), process("expert", good_host())};
    all[1].clock = ClockOffset{offset, bound};
    return raised(cluster(all));
  };
  EXPECT_EQ(with(0.4, 0.001), Raised{});
  EXPECT_EQ(with(1, 0.001), Raised{"clocks: warning"});
  EXPECT_EQ(with(-1, 0.001), Raised{"clocks: warning"});
  EXPECT_EQ(with(-100, 0.001), Raised{"clocks: problem"});
  EXPECT_EQ(with(1, 0.6), Raised{});  // a slow answer proves nothing
}

TEST(Diag, VersionsAndNumerics) {
  std::vector<ProcessReport> all = {process("attention", good_host()), process("expert", good_host())};
  all[1].process.version = "0.2.0";
  EXPECT_EQ(raised(cluster(all)), Raised{"version: warning"});
  all[1].process.version = "0.1.0";
  all[1].process.numerics_id = "k2";
  EXPECT_EQ(raised(cluster(all)), Raised{"numerics: problem"});
}

TEST(Diag, TheClustersOwnState) {
  DiagInput input = cluster({process("expert", good_host())});
  input.cluster->ready = false;
  input.cluster->not_ready = "no attention worker is there";
  EXPECT_EQ(raised(input), Raised{"ready: problem"});
  input = cluster({process("expert", good_host())});
  input.cluster->events.push_back({1, "lost", "expert-1", "gone", 5, 2});
  input.cluster->events.push_back({2, "joined", "expert-1", "", 4, 1});
  EXPECT_EQ(raised(input), Raised{"faults: warning"});
  input.cluster->events[0].age_s = 4000;
  EXPECT_EQ(raised(input), Raised{});
  input.cluster->members.push_back({});
  input.cluster->members.back().state = "suspect";
  EXPECT_EQ(raised(input), Raised{"state: warning"});
}

TEST(Diag, WhatCannotBeReached) {
  ProcessReport gone = process("router", good_host());
  gone.json.clear();
  gone.clock.reset();
  gone.error = "nothing listens there";
  EXPECT_EQ(raised(cluster({gone})), Raised{"reached: warning"});
  DiagInput input = local(good_host());
  input.scheduler = "127.0.0.1:7070";
  input.cluster_error = "no scheduler answers";
  EXPECT_EQ(raised(input), Raised{});
  input.scheduler_named = true;
  EXPECT_EQ(raised(input), Raised{"reached: problem"});
}

TEST(Diag, ReportsThatMakeNoSenseAreNoAccident) {
  for (const char* text :
       {"", "[]", "{", "null", "{\"host\":5}", "{\"host\":{\"memlock_bytes\":[],\"settings\":7}}",
        "{\"data_plane\":7,\"compute\":\"x\"}", "{\"host\":{\"allowed_cpus\":{\"a\":1}}}"}) {
    ProcessReport one = process("expert", good_host());
    one.json = text;
    DiagInput input = cluster({one});
    input.local_json = text;
    judge(input);
  }
}

}  // namespace
}  // namespace conclave::cli
