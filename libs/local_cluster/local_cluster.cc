#include "libs/local_cluster/local_cluster.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "libs/base/check.h"
#include "libs/base/random.h"

namespace conclave {

// Hears of the fleet's state as a gateway does, so that waiting needs no polling.
class LocalCluster::FleetWatch final : public scheduler::GatewaySession {
 public:
  void welcome(const Welcome&) override {}
  void reply(RequestId, const Status&, bool) override {}
  void reply_adopt(RequestId, const Status&, const AdoptedRequest*) override {}
  void tokens(const TokenEvent&) override {}
  void close(const Status&) override {}
  void fleet(const FleetInfo& fleet) override {
    std::lock_guard lock(mutex_);
    fleet_ = fleet;
    changed_.notify_all();
  }
  Status wait_ready(Nanos limit) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::nanoseconds(limit), [&] { return fleet_.ready; }))
      return OkStatus();
    return unavailable("the cluster is not ready: " + fleet_.not_ready);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  FleetInfo fleet_;
};

scheduler::SchedulerOptions LocalClusterOptions::default_scheduler() {
  scheduler::SchedulerOptions options;
  options.lease_ms = 60'000;
  options.dead_after_ms = 600'000;
  options.dead_after_trouble_ms = 600'000;
  return options;
}

StatusOr<std::unique_ptr<LocalCluster>> LocalCluster::start(const LocalModel& model,
                                                            LocalClusterOptions options) {
  std::unique_ptr<LocalCluster> cluster(new LocalCluster(model, std::move(options)));
  RETURN_IF_ERROR(cluster->begin());
  return cluster;
}

StatusOr<std::unique_ptr<LocalCluster>> LocalCluster::load(const std::string& directory,
                                                           LocalClusterOptions options) {
  ASSIGN_OR_RETURN(std::unique_ptr<BoundModel> bound, load_model(directory));
  std::unique_ptr<LocalCluster> cluster(new LocalCluster(LocalModel::of(*bound), std::move(options)));
  cluster->bound_ = std::move(bound);
  RETURN_IF_ERROR(cluster->begin());
  return cluster;
}

LocalCluster::LocalCluster(LocalModel model, LocalClusterOptions options)
    : model_(std::move(model)), options_(std::move(options)) {}

Status LocalCluster::begin() {
  if (options_.workers == 0) return invalid_field("workers", "must be at least 1");
  if (options_.shards == 0) return invalid_field("shards", "must be at least 1");
  if (options_.threads == 0) return invalid_field("threads", "must be at least 1");
  if (options_.isa) {
    isa_ = *options_.isa;
  } else {
    ASSIGN_OR_RETURN(isa_, kernels::choose_isa());
  }
  numerics_id_ = numerics_id(options_.precision, "cpu", options_.fp8_wire);
  if (!options_.scheduler.incarnation) options_.scheduler.incarnation = make_incarnation();
  RETURN_IF_ERROR(options_.scheduler.validate());
  options_.transport.fleet = numerics_id_ + " " + model_.fingerprint;
  if (!options_.make_transport) {
    options_.make_transport =
        [hub = hub_](LoopExecutor& loop,
                     const TransportOptions& transport) -> StatusOr<std::unique_ptr<ExpertTransport>> {
      return std::make_unique<LoopbackTransport>(hub, loop, transport);
    };
  }
  if (options_.all_logits) {
    options_.worker.logits_observer = [this](RequestId request, uint32_t position,
                                             std::span<const float> row) {
      keep_logits(request, position, row);
    };
  }
  scheduler_thread_ = std::make_unique<LoopThread>();
  scheduler_thread_->loop().call([&] {
    scheduler_ = std::make_unique<scheduler::SchedulerLoop>(options_.scheduler, scheduler_thread_->loop());
  });
  fleet_ = std::make_shared<FleetWatch>();
  Hello hello;
  hello.role = Role::kRouter;
  hello.name = "local-cluster";
  hello.incarnation = make_incarnation();
  scheduler_->gateway_connected(fleet_, hello);
  for (uint32_t i = 0; i < options_.shards; ++i) RETURN_IF_ERROR(add_shard());
  for (uint32_t i = 0; i < options_.workers; ++i) RETURN_IF_ERROR(add_worker());
  return OkStatus();
}

LocalCluster::~LocalCluster() {
  workers_.clear();
  shards_.clear();
  if (scheduler_thread_ != nullptr) {
    scheduler_thread_->loop().call([&] { scheduler_.reset(); });
    scheduler_thread_->stop();
  }
}

LocalMember::Config LocalCluster::member_config() {
  LocalMember::Config config;
  config.isa = isa_;
  config.threads = options_.threads;
  config.heartbeat = static_cast<Nanos>(options_.scheduler.lease_ms) * kMillisecond / 4;
  config.transport = options_.transport;
  config.transport.self = make_incarnation();
  config.make_transport = options_.make_transport;
  return config;
}

Status LocalCluster::add_shard() {
  ShardOptions shard = options_.shard;
  shard.name = "expert-" + std::to_string(shards_.size());
  shard.numerics_id = numerics_id_;
  shard.model_fingerprint = model_.fingerprint;
  shard.precision = options_.precision;
  shard.fp8_wire = options_.fp8_wire;
  shard.threads = options_.threads;
  auto member = std::make_unique<LocalMember>();
  RETURN_IF_ERROR(
      member->start_shard(member_config(), *model_.spec, *model_.experts, std::move(shard), *scheduler_));
  shards_.push_back(std::move(member));
  return OkStatus();
}

Status LocalCluster::add_worker() {
  WorkerOptions worker = options_.worker;
  worker.name = "attention-" + std::to_string(workers_.size());
  worker.numerics_id = numerics_id_;
  worker.model_fingerprint = model_.fingerprint;
  worker.precision = options_.precision;
  worker.fp8_wire = options_.fp8_wire;
  worker.threads = options_.threads;
  auto member = std::make_unique<LocalMember>();
  RETURN_IF_ERROR(
      member->start_worker(member_config(), *model_.spec, *model_.dense, std::move(worker), *scheduler_));
  workers_.push_back(std::move(member));
  return OkStatus();
}

void LocalCluster::kill_shard(size_t index) { shards_.at(index)->stop(); }
void LocalCluster::kill_worker(size_t index) { workers_.at(index)->stop(); }

Status LocalCluster::wait_ready(Nanos limit) { return fleet_->wait_ready(limit); }

std::shared_ptr<PendingCompletion> LocalCluster::submit(AcceptedRequest request) {
  auto pending = std::make_shared<PendingCompletion>(request.choices);
  scheduler_->submit(std::move(request), pending);
  return pending;
}

StatusOr<Completion> LocalCluster::complete(AcceptedRequest request, Nanos limit) {
  const RequestId id = request.id;
  const auto pending = submit(std::move(request));
  StatusOr<Completion> done = pending->wait(limit);
  if (!done.ok() && done.status().code() == StatusCode::kDeadlineExceeded) scheduler_->cancel(id);
  return done;
}

void LocalCluster::keep_logits(RequestId request, uint32_t position, std::span<const float> row) {
  std::lock_guard lock(logits_mutex_);
  logits_[request][position].assign(row.begin(), row.end());
}

std::vector<float> LocalCluster::take_logits(RequestId request) {
  std::lock_guard lock(logits_mutex_);
  const auto it = logits_.find(request);
  if (it == logits_.end()) return {};
  std::vector<float> all;
  for (const auto& [position, row] : it->second) all.insert(all.end(), row.begin(), row.end());
  logits_.erase(it);
  return all;
}

StatusOr<std::vector<float>> LocalCluster::logits(const std::vector<TokenId>& tokens, Nanos limit) {
  if (!options_.all_logits) return failed_precondition("the cluster was started without all_logits");
  if (tokens.empty() || tokens.size() >= model_.spec->max_positions) {
    return invalid_field("tokens",
                         "must be 1 to " + std::to_string(model_.spec->max_positions - 1) + " tokens");
  }
  for (TokenId token : tokens) {
    if (token >= model_.spec->vocab_size) {
      return invalid_field("tokens", "id " + std::to_string(token) + " is not below the vocabulary size " +
                                         std::to_string(model_.spec->vocab_size));
    }
  }
  AcceptedRequest request = make_request(tokens, 1);
  request.time_left = limit;
  const RequestId id = request.id;
  request.cache_salt = std::to_string(id.hi) + ":" + std::to_string(id.lo);  // every position is computed
  StatusOr<Completion> done = complete(std::move(request), limit);
  std::vector<float> all = take_logits(id);
  if (!done.ok()) return done.status();
  if (done->finish == FinishReason::kError) return internal_error(done->error);
  if (done->finish == FinishReason::kDeadline) return deadline_exceeded("logits took longer than allowed");
  all.resize(tokens.size() * model_.spec->vocab_size);
  return all;
}

AcceptedRequest make_request(std::vector<TokenId> prompt, uint32_t max_tokens) {
  AcceptedRequest request;
  request.id = {system_random_u64(), system_random_u64()};
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = max_tokens;
  return request;
}

}  // namespace conclave
