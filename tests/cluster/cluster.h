// A cluster of real processes on a small checkpoint made by the test, and a gateway of our own in front of
// it.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libs/checkpoint/make.h"
#include "libs/local_cluster/local_cluster.h"
#include "libs/rpc/grpc_setup.h"
#include "libs/rpc/scheduler_client.h"
#include "tests/cluster/process.h"

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

// One scheduler, one worker, two shards, as separate processes.
class ProcessCluster {
 public:
  // Without `members` only the scheduler starts.
  explicit ProcessCluster(uint32_t shards = 2, std::vector<std::string> scheduler_arguments = {},
                          bool members = true);
  ~ProcessCluster();

  // On the same port as before, if there was one.
  void start_scheduler();
  void start_worker();
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
  // host:port of the operations server.
  std::string ops(const std::string& process);
  // Everything that ended though nobody ended it, with its log; empty: nothing.
  std::string unexpected_ends();

  std::shared_ptr<PendingCompletion> submit(AcceptedRequest request);

  Process scheduler, worker, router;
  std::vector<Process> shards;
  std::unique_ptr<rpc::SchedulerClient> gateway;

 private:
  std::vector<std::string> member_arguments(const std::string& name);
  std::string ready_path(const std::string& name);
  std::string log_path(const std::string& name);

  const std::vector<std::string> scheduler_arguments_;
  const std::string prefix_;
  std::string scheduler_address_, http_address_, grpc_address_;
  int starts_ = 0;
};

// A request of the tests: number `i` always has the same prompt and parameters; odd ones sample, even ones
// are greedy.
AcceptedRequest numbered_request(uint32_t i, uint32_t max_tokens);
// What it generates in an undisturbed cluster in one process.
std::vector<std::vector<TokenId>> undisturbed(uint32_t count, uint32_t max_tokens);

}  // namespace conclave
