// How long streams stand still when a process is killed: the longest gap between two tokens of a stream, over
// all streams, for each of many kills.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "libs/base/random.h"
#include "tests/cluster/fault_flags.h"
#include "tests/cluster/keeper.h"
#include "tests/cluster/load.h"

namespace conclave {
namespace {

constexpr uint32_t kStreams = 16;
constexpr Nanos kLimit = 60 * kSecond;
constexpr Nanos kQuiet = 2500 * kMillisecond;  // between kills; back-offs have started over by then

struct Kind {
  const char* name;
  uint32_t shards, workers;
  std::vector<std::string> victims;
  Nanos aim;
};

std::string milliseconds(Nanos time) { return std::to_string(time / kMillisecond); }

// Whether every process is a ready member, under load.
bool all_ready(Keeper& keeper, ProcessCluster& cluster) {
  for (const std::string& name : keeper.names()) {
    if (!keeper.process(name).running()) return false;
    const auto ready = http_get(cluster.ops(name), "/readyz");
    if (!ready.ok() || ready->code != 200) return false;
  }
  return true;
}

TEST(StallTest, LongKillsOfEachRole) {
  const Kind kinds[] = {{"a shard of three, whose experts others have too",
                         3,
                         1,
                         {"shard0", "shard1", "shard2"},
                         250 * kMillisecond},
                        {"a worker of two", 2, 2, {"worker", "worker1"}, 1500 * kMillisecond},
                        {"the scheduler", 2, 1, {"scheduler"}, 2 * kSecond}};
  SplitMix64 random(fault_flags().seed);
  table_line("| killed, " + std::to_string(fault_flags().kills) +
             " times | longest gap without a kill, ms | median, ms | maximum, ms | aim, ms |");
  table_line("|---|---|---|---|---|");
  for (const Kind& kind : kinds) {
    if (std::string(kind.name).find(fault_flags().only) == std::string::npos) continue;
    ClusterShape shape;
    shape.model = demo_model();
    shape.shards = kind.shards;
    shape.workers = kind.workers;
    ProcessCluster cluster(shape);
    ASSERT_TRUE(cluster.wait_ready());
    Keeper keeper(cluster);
    Load load(*cluster.gateway, fault_free_tokens(), {.concurrency = kStreams});
    ASSERT_TRUE(keeper.tend_until([&] { return load.running() == kStreams; }, kLimit));
    std::vector<Nanos> gaps;
    Nanos without = 0;
    for (uint32_t i = 0; i < fault_flags().kills; ++i) {
      ASSERT_TRUE(keeper.tend_until([&] { return all_ready(keeper, cluster); }, kLimit)) << kind.name;
      load.mark();
      keeper.tend_for(kQuiet);
      without = std::max(without, load.longest_gap());
      ASSERT_TRUE(keeper.tend_until([&] { return load.running() == kStreams; }, kLimit)) << kind.name;
      load.mark();
      keeper.kill(kind.victims[random.below(kind.victims.size())]);
      // Until it is back and everybody goes on: what its return costs is part of it.
      ASSERT_TRUE(keeper.tend_until([&] { return all_ready(keeper, cluster); }, kLimit)) << kind.name;
      const TimePoint back = steady_now();
      ASSERT_TRUE(keeper.tend_until([&] { return load.all_moved(back); }, kLimit)) << kind.name;
      gaps.push_back(load.longest_gap());
    }
    load.stop();
    ASSERT_TRUE(keeper.tend_until([&] { return load.over(); }, kLimit)) << kind.name;
    const LoadReport report = load.report();
    EXPECT_EQ(report.wrong, 0u) << kind.name << ": " << ::testing::PrintToString(report.faults);
    std::sort(gaps.begin(), gaps.end());
    std::string all;
    for (const Nanos gap : gaps) all += " " + milliseconds(gap);
    std::cout << "gaps in ms:" << all << "; survivors that ended: " << keeper.unexpected().size() << "\n";
    table_line("| " + std::string(kind.name) + " | " + milliseconds(without) + " | " +
               milliseconds(gaps[gaps.size() / 2]) + " | " + milliseconds(gaps.back()) + " | " +
               milliseconds(kind.aim) + " |");
  }
}

// Bytes a second of a file in the page cache that a mapping of its own gets to see for the first time, one
// page after the other on one thread; 0 when the file cannot be read.
double page_in_rate(const std::filesystem::path& file) {
  const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info {};
  if (fd < 0 || fstat(fd, &info) != 0) return 0;
  const auto size = static_cast<size_t>(info.st_size);
  void* map = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (map == MAP_FAILED) return 0;
  const auto touch = [&] {
    uint64_t sum = 0;
    for (size_t at = 0; at < size; at += 4096) sum += static_cast<const volatile uint8_t*>(map)[at];
    return sum;
  };
  // The first time it may come from the disk.
  touch();
  madvise(map, size, MADV_DONTNEED);
  const TimePoint begin = steady_now();
  touch();
  const double rate = static_cast<double>(size) / (static_cast<double>(steady_now() - begin) * 1e-9);
  munmap(map, size);
  return rate;
}

// The survivor has to map all that the shard with most of the experts had before anything goes on.
TEST(StallTest, LongAShardWithoutReplicaOnTheRealGeometry) {
  constexpr uint32_t kFew = 8, kShort = 24;
  constexpr Nanos kBeyond = kSecond;  // aim, on top of the page-in
  if (std::string("a shard without replica, real geometry").find(fault_flags().only) == std::string::npos)
    GTEST_SKIP() << "not asked for";
  ClusterShape shape;
  shape.model = fault_flags().checkpoint;
  if (shape.model.empty()) {
    MakeOptions options;
    options.out = shape.model = ClusterEnvironment::directory() + "/m2-3";
    options.geometry = "m2";
    options.layers = 3;
    options.dtype = "fp8";
    const auto made = make_checkpoint(options);
    ASSERT_TRUE(made.ok()) << made.status();
  }
  shape.scheduler_arguments = {"--set", "scheduler.min_replicas=1", "--set", "scheduler.max_replicas=1"};
  double rate = 0;
  for (const auto& entry : std::filesystem::directory_iterator(shape.model)) {
    if (entry.path().extension() == ".safetensors" && entry.file_size() > 1u << 30)
      rate = std::max(rate, page_in_rate(entry.path()));
  }
  ASSERT_GT(rate, 0);
  const auto expected = undisturbed(kFew, kShort, shape.model);
  ProcessCluster cluster(shape);
  ASSERT_TRUE(cluster.wait_ready());
  Keeper keeper(cluster);
  Load load(*cluster.gateway, expected, {.concurrency = kFew});
  const auto held = [&](const std::string& shard) {
    return cluster.metric(shard, "conclave_expert_held_weight_bytes");
  };
  table_line(
      "| killed, M2's geometry, 3 layers | longest gap without a kill, ms | weights to map, GB | their "
      "page-in, ms "
      "| longest gap, ms | beyond the page-in, ms | aim, ms |");
  table_line("|---|---|---|---|---|---|---|");
  for (uint32_t i = 0; i < std::min(fault_flags().kills, 5u); ++i) {
    const auto settled = [&] {
      return all_ready(keeper, cluster) && load.running() == kFew &&
             cluster.metric("scheduler", "conclave_scheduler_preparing_placements") == 0 &&
             std::min(held("shard0"), held("shard1")) > 0;
    };
    ASSERT_TRUE(keeper.tend_until(settled, 2 * kLimit));
    load.mark();
    keeper.tend_for(kQuiet);
    const Nanos without = load.longest_gap();
    // The load of a few streams is balanced with a few experts: one shard may hold most of the others.
    const std::string victim = held("shard0") > held("shard1") ? "shard0" : "shard1";
    const double bytes = held(victim);
    load.mark();
    keeper.kill(victim);
    const TimePoint killed = steady_now();
    ASSERT_TRUE(keeper.tend_until([&] { return load.all_moved(killed); }, 2 * kLimit));
    ASSERT_TRUE(keeper.tend_until(settled, 2 * kLimit));
    const Nanos gap = load.longest_gap();
    const auto page_in = static_cast<Nanos>(bytes / rate * 1e9);
    std::ostringstream line;
    line << std::fixed << std::setprecision(1) << "| " << victim << " | " << milliseconds(without) << " | "
         << bytes / 1e9 << " | " << milliseconds(page_in) << " | " << milliseconds(gap) << " | "
         << milliseconds(gap - page_in) << " | " << milliseconds(kBeyond) << " |";
    table_line(line.str());
  }
  load.stop();
  ASSERT_TRUE(keeper.tend_until([&] { return load.over(); }, 2 * kLimit));
  const LoadReport report = load.report();
  EXPECT_EQ(report.wrong, 0u) << ::testing::PrintToString(report.faults);
}

}  // namespace
}  // namespace conclave
