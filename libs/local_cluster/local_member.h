// A worker or a shard of the cluster in one process: its thread, transport, kernel threads and line to the
// scheduler.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "attention_service/core/worker.h"
#include "expert_service/core/shard.h"
#include "libs/base/thread_pool.h"
#include "libs/kernels/ops.h"
#include "libs/runtime/loop_executor.h"
#include "libs/transport/transport_options.h"
#include "scheduler/loop.h"

namespace conclave {

// Makes a member's transport; called on its thread. The transport is destroyed there too, before the executor
// ends.
using TransportFactory =
    std::function<StatusOr<std::unique_ptr<ExpertTransport>>(LoopExecutor&, const TransportOptions&)>;

class LocalMember {
 public:
  struct Config {
    kernels::Isa isa = kernels::Isa::kScalar;
    unsigned threads = 1;
    Nanos heartbeat = 100 * kMillisecond;
    TransportOptions transport;
    TransportFactory make_transport;
  };

  LocalMember() = default;
  ~LocalMember() { stop(); }
  LocalMember(const LocalMember&) = delete;
  LocalMember& operator=(const LocalMember&) = delete;

  // References are borrowed and outlive the member.
  Status start_worker(const Config& config, const ModelSpec& spec, const DenseWeights& dense,
                      WorkerOptions options, scheduler::SchedulerLoop& scheduler);
  Status start_shard(const Config& config, const ModelSpec& spec, const ExpertTable& experts,
                     ShardOptions options, scheduler::SchedulerLoop& scheduler);
  // At once, as if its process were killed: its line and its connections break. No-op when it does not run.
  void stop();
  bool running() const { return thread_ != nullptr; }

  // Copies of the counters, taken on the member's thread.
  WorkerMetrics worker_metrics();
  ShardMetrics shard_metrics();

 private:
  Status begin(const Config& config);
  void beat(Nanos interval);

  std::unique_ptr<LoopThread> thread_;
  std::unique_ptr<ThreadPool> pool_;
  kernels::Context kernels_;
  // On the member's thread only:
  std::unique_ptr<ExpertTransport> transport_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Shard> shard_;
  std::unique_ptr<MemberLink> link_;
  TimerId heartbeat_;
};

}  // namespace conclave
