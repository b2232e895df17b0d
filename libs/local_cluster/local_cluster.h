// Everything of a cluster but the router in one process: a scheduler, workers and shards, each on a thread of
// its own, over the loopback transport or another one. For `conclave up --in-process`, `conclave logits` and
// tests.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "libs/checkpoint/binding.h"
#include "libs/local_cluster/completion.h"
#include "libs/local_cluster/local_member.h"
#include "libs/transport/loopback_transport.h"
#include "scheduler/loop.h"

namespace conclave {

struct LocalClusterOptions {
  uint32_t workers = 1;
  uint32_t shards = 2;
  Precision precision = Precision::kBf16;
  bool fp8_wire = false;            // of hidden rows
  std::optional<kernels::Isa> isa;  // absent: the best there is, or what CONCLAVE_ISA names
  unsigned threads = 1;             // of each member
  // Names, ids and the fingerprint in these are filled in by the cluster. Leases are long here by default:
  // one process has no member that hangs alone, but one that computes for seconds.
  scheduler::SchedulerOptions scheduler = default_scheduler();
  WorkerOptions worker;
  ShardOptions shard;
  TransportOptions transport;       // `self` and `fleet` are filled in
  TransportFactory make_transport;  // absent: loopback
  // Keep every position's logits, which logits() needs; costs lm_head for every row.
  bool all_logits = false;

  static scheduler::SchedulerOptions default_scheduler();
};

// The parts of a model that a cluster needs; borrowed.
struct LocalModel {
  const ModelSpec* spec = nullptr;
  const DenseWeights* dense = nullptr;
  const ExpertTable* experts = nullptr;
  std::string fingerprint;

  static LocalModel of(const BoundModel& model) {
    return {&model.spec, &model.dense, &model.experts, model.fingerprint};
  }
};

// Public methods may be called from any thread, but starting and stopping members from one at a time.
class LocalCluster {
 public:
  // Starts all members; they may not have joined yet (wait_ready). The model outlives the cluster.
  static StatusOr<std::unique_ptr<LocalCluster>> start(const LocalModel& model, LocalClusterOptions options);
  // Loads the checkpoint and keeps it.
  static StatusOr<std::unique_ptr<LocalCluster>> load(const std::string& directory,
                                                      LocalClusterOptions options);
  ~LocalCluster();

  SchedulerPort& port() { return *scheduler_; }
  scheduler::SchedulerLoop& scheduler() { return *scheduler_; }
  const ModelSpec& spec() const { return *model_.spec; }
  // Null unless made by load().
  const BoundModel* bound_model() const { return bound_.get(); }

  // Until the fleet can serve; UNAVAILABLE with the reason after `limit`.
  Status wait_ready(Nanos limit = 60 * kSecond);
  // Submits and returns at once.
  std::shared_ptr<PendingCompletion> submit(AcceptedRequest request);
  // Submits and waits for the end.
  StatusOr<Completion> complete(AcceptedRequest request, Nanos limit = 300 * kSecond);
  // Every position's logits of `tokens` (1 .. context - 1 of them), tokens x vocab_size, computed by the way
  // any request goes. Needs all_logits.
  StatusOr<std::vector<float>> logits(const std::vector<TokenId>& tokens, Nanos limit = 600 * kSecond);
  // With all_logits: logits of a request, in order of the positions that were computed for it (those in the
  // prefix cache were not), until they are taken or the cluster ends.
  std::vector<float> take_logits(RequestId request);

  // Dies at once, with what it was computing. Index in the order of starting.
  void kill_shard(size_t index);
  void kill_worker(size_t index);
  Status add_shard();
  Status add_worker();
  size_t shards() const { return shards_.size(); }
  WorkerMetrics worker_metrics(size_t index) { return workers_[index]->worker_metrics(); }
  ShardMetrics shard_metrics(size_t index) { return shards_[index]->shard_metrics(); }

 private:
  class FleetWatch;

  LocalCluster(LocalModel model, LocalClusterOptions options);
  Status begin();
  LocalMember::Config member_config();
  void keep_logits(RequestId request, uint32_t position, std::span<const float> row);

  LocalModel model_;
  std::unique_ptr<BoundModel> bound_;
  LocalClusterOptions options_;
  std::string numerics_id_;
  kernels::Isa isa_ = kernels::Isa::kScalar;
  std::shared_ptr<LoopbackHub> hub_ = std::make_shared<LoopbackHub>();
  std::unique_ptr<LoopThread> scheduler_thread_;
  std::unique_ptr<scheduler::SchedulerLoop> scheduler_;
  std::shared_ptr<FleetWatch> fleet_;
  std::vector<std::unique_ptr<LocalMember>> shards_;
  std::vector<std::unique_ptr<LocalMember>> workers_;
  std::mutex logits_mutex_;
  std::map<RequestId, std::map<uint32_t, std::vector<float>>> logits_;  // by position; guarded
};

// Fills in what a request needs to be valid, for callers that have only a prompt: a random id, greedy
// sampling unless `sampling` says otherwise.
AcceptedRequest make_request(std::vector<TokenId> prompt, uint32_t max_tokens);

}  // namespace conclave
