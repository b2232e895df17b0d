#include "libs/local_cluster/local_member.h"

#include <utility>

namespace conclave {

Status LocalMember::begin(const Config& config) {
  thread_ = std::make_unique<LoopThread>();
  pool_ = std::make_unique<ThreadPool>(config.threads);
  kernels_ = {config.isa, pool_.get()};
  Status status;
  thread_->loop().call([&] {
    auto transport = config.make_transport(thread_->loop(), config.transport);
    if (transport.ok()) {
      transport_ = std::move(*transport);
    } else {
      status = transport.status();
    }
  });
  if (!status.ok()) stop();
  return status;
}

Status LocalMember::start_worker(const Config& config, const ModelSpec& spec, const DenseWeights& dense,
                                 WorkerOptions options, scheduler::SchedulerLoop& scheduler) {
  RETURN_IF_ERROR(begin(config));
  Status status;
  thread_->loop().call([&] {
    auto worker = Worker::create(thread_->loop(), *transport_, spec, dense, kernels_, std::move(options));
    if (!worker.ok()) {
      status = worker.status();
      return;
    }
    worker_ = std::move(*worker);
    link_ = scheduler.attach_member(*worker_, thread_->loop());
    worker_->set_link(link_.get());
    worker_->start();
    beat(config.heartbeat);
  });
  if (!status.ok()) stop();
  return status;
}

Status LocalMember::start_shard(const Config& config, const ModelSpec& spec, const ExpertTable& experts,
                                ShardOptions options, scheduler::SchedulerLoop& scheduler) {
  RETURN_IF_ERROR(begin(config));
  thread_->loop().call([&] {
    shard_ =
        std::make_unique<Shard>(thread_->loop(), *transport_, spec, experts, kernels_, std::move(options));
    link_ = scheduler.attach_member(*shard_, thread_->loop());
    shard_->set_link(link_.get());
    shard_->start();
    beat(config.heartbeat);
  });
  return OkStatus();
}

void LocalMember::beat(Nanos interval) {
  if (worker_ != nullptr) link_->send(worker_->heartbeat());
  if (shard_ != nullptr) link_->send(shard_->heartbeat());
  LoopExecutor& loop = thread_->loop();
  heartbeat_ = loop.post_at(loop.now() + interval, [this, interval] { beat(interval); });
}

void LocalMember::stop() {
  if (thread_ == nullptr) return;
  thread_->loop().call([&] {
    if (heartbeat_) thread_->loop().cancel(heartbeat_);
    heartbeat_ = TimerId();
    if (worker_ != nullptr) worker_->set_link(nullptr);
    if (shard_ != nullptr) shard_->set_link(nullptr);
    link_.reset();
    worker_.reset();
    shard_.reset();
    transport_.reset();
  });
  thread_->stop();
  thread_.reset();
  pool_.reset();
}

WorkerMetrics LocalMember::worker_metrics() {
  WorkerMetrics metrics;
  if (thread_ == nullptr) return metrics;
  thread_->loop().call([&] {
    if (worker_ != nullptr) metrics = worker_->metrics();
  });
  return metrics;
}

ShardMetrics LocalMember::shard_metrics() {
  ShardMetrics metrics;
  if (thread_ == nullptr) return metrics;
  thread_->loop().call([&] {
    if (shard_ != nullptr) metrics = shard_->metrics();
  });
  return metrics;
}

}  // namespace conclave
