// A cluster of real processes on a small checkpoint made by the test, and a gateway of our own in front of
// it.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "libs/checkpoint/make.h"
#include "libs/local_cluster/local_cluster.h"
#include "libs/rpc/grpc_setup.h"
#include "libs/rpc/scheduler_client.h"
#include "tests/cluster/process.h"
#include "tests/cluster/relay/network.h"

namespace conclave {

// Asks until it holds; the limit only bounds a failing test.
bool eventually(const std::function<bool()>& reached, Nanos limit = 60 * kSecond);

// A directory of this test program, removed at its end, with the checkpoint all of its tests serve.
class ClusterEnvironment : public ::testing::Environment {
 public:
  void SetUp() override;
  void TearDown() override;
  static const std::string& directory();
  static const std::string& model();
};

// What a cluster is made of; arguments are those of the binaries.
struct ClusterShape {
  uint32_t shards = 2;
  uint32_t workers = 1;
  std::string model;  // empty: ClusterEnvironment::model()
  std::vector<std::string> scheduler_arguments;
  bool start_members = true;  // false: only the scheduler starts by itself
  std::vector<std::string> worker_arguments = {"--set", "attention.kv_bytes=64MiB"};
  std::vector<std::string> shard_arguments;
  std::vector<std::string> arguments;  // of every process
  std::shared_ptr<tls::Identity> tls;  // the gateway's; null: in clear
  // Each process on its node of this network, called as the process; the test is the host. Null: loopback.
  Network* network = nullptr;
};

// One scheduler, one worker or more, two shards, as separate processes.
class ProcessCluster {
 public:
  explicit ProcessCluster(ClusterShape shape);
  explicit ProcessCluster(uint32_t shards = 2, std::vector<std::string> scheduler_arguments = {});
  ~ProcessCluster();

  // On the same port as before, if there was one.
  void start_scheduler();
  void start_worker(size_t index = 0);
  void start_shard(size_t index);
  // On the same ports as before, if there were any; returns when it listens.
  void start_router(std::vector<std::string> more_arguments = {});
  // Until the gateway sees a fleet that can serve.
  ::testing::AssertionResult wait_ready();
  // Until the router itself says that it is ready: its warm-up has gone through.
  ::testing::AssertionResult wait_router_ready();
  std::string scheduler_address() const { return scheduler_address_; }
  std::string http_address() const { return http_address_; }
  std::string grpc_address() const { return grpc_address_; }
  // host:port of the operations server. Workers are "worker", "worker1", ...; shards "shard0", ...
  std::string ops(const std::string& process);
  // One value of a process's metrics, with its labels as /metrics shows them; -1 when it is not there.
  double metric(const std::string& process, const std::string& name);
  // Everything that ended though nobody ended it, with its log; empty: nothing.
  std::string unexpected_ends();

  const ClusterShape& shape() const { return shape_; }
  // Of processes started from now on, by name: NAME=VALUE.
  std::map<std::string, std::vector<std::string>> environment;
  std::shared_ptr<PendingCompletion> submit(AcceptedRequest request);

  Process scheduler, worker, router;
  std::vector<Process> other_workers;  // the second and further ones
  std::vector<Process> shards;
  std::unique_ptr<rpc::SchedulerClient> gateway;

 private:
  std::vector<std::string> member_arguments(const std::string& name);
  std::string any_port(const std::string& name) const;
  Process launch(const std::string& program, const std::string& name, std::vector<std::string> arguments,
                 const std::vector<std::string>& more);
  std::string ready_path(const std::string& name);
  std::string log_path(const std::string& name);

  const ClusterShape shape_;
  const std::string prefix_;
  std::string scheduler_address_, http_address_, grpc_address_;
  int starts_ = 0;
};

// The demo checkpoint of the repository.
std::string demo_model();

// A request of the tests: number `i` always has the same prompt and parameters; odd ones sample, even ones
// are greedy.
AcceptedRequest numbered_request(uint32_t i, uint32_t max_tokens);
// What it generates in an undisturbed cluster in one process, on the checkpoint of the tests or another.
std::vector<std::vector<TokenId>> undisturbed(uint32_t count, uint32_t max_tokens,
                                              const std::string& model = "");

inline constexpr Nanos kStreamLimit = 120 * kSecond;

// Streams of numbered requests that are running, and what they must become.
struct Streams {
  Streams(ProcessCluster& cluster, uint32_t count, uint32_t tokens);
  void wait_tokens(size_t count);
  // Tokens of the one that is furthest.
  size_t longest() const;
  // Waits for all of them, and compares.
  void check(ProcessCluster& cluster);

  std::vector<std::vector<TokenId>> expected;
  std::vector<std::shared_ptr<PendingCompletion>> pending;
};

}  // namespace conclave
