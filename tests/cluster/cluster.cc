#include "tests/cluster/cluster.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

#include "libs/base/random.h"

namespace conclave {
namespace {

std::string g_directory;
std::string g_model;

}  // namespace

bool eventually(const std::function<bool()>& reached, Nanos limit) {
  const TimePoint end = steady_now() + limit;
  while (!reached()) {
    if (steady_now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

void ClusterEnvironment::SetUp() {
  rpc::route_grpc_logs(nullptr);
  g_directory = ::testing::TempDir() + "conclave_cluster_" + std::to_string(getpid());
  std::filesystem::create_directories(g_directory);
  g_model = g_directory + "/tiny-m2";
  MakeOptions options;
  options.out = g_model;
  options.geometry = "tiny-m2";
  const auto made = make_checkpoint(options);
  ASSERT_TRUE(made.ok()) << made.status();
}

void ClusterEnvironment::TearDown() {
  if (!::testing::UnitTest::GetInstance()->Failed()) std::filesystem::remove_all(g_directory);
}

const std::string& ClusterEnvironment::directory() { return g_directory; }
const std::string& ClusterEnvironment::model() { return g_model; }

namespace {

ClusterShape shape_of(uint32_t shards, std::vector<std::string> scheduler_arguments) {
  ClusterShape shape;
  shape.shards = shards;
  shape.scheduler_arguments = std::move(scheduler_arguments);
  return shape;
}

}  // namespace

ProcessCluster::ProcessCluster(uint32_t shard_count, std::vector<std::string> scheduler_arguments)
    : ProcessCluster(shape_of(shard_count, std::move(scheduler_arguments))) {}

ProcessCluster::ProcessCluster(ClusterShape shape)
    : shape_(std::move(shape)),
      prefix_(g_directory + "/" + ::testing::UnitTest::GetInstance()->current_test_info()->name() + "-") {
  start_scheduler();
  shards.resize(shape_.shards);
  other_workers.resize(shape_.workers - 1);
  if (shape_.start_members) {
    for (size_t i = 0; i < shape_.shards; ++i) start_shard(i);
    for (size_t i = 0; i < shape_.workers; ++i) start_worker(i);
  }
  rpc::ClientOptions options;
  options.target = scheduler_address_;
  options.tls = shape_.tls;
  options.reconnect_max = 200 * kMillisecond;
  gateway = std::make_unique<rpc::SchedulerClient>(options, "test", make_incarnation());
}

ProcessCluster::~ProcessCluster() { gateway.reset(); }

std::string ProcessCluster::ready_path(const std::string& name) { return prefix_ + name + ".ready"; }
std::string ProcessCluster::log_path(const std::string& name) {
  return prefix_ + name + "." + std::to_string(starts_++) + ".log";
}

std::string ProcessCluster::any_port(const std::string& name) const {
  return (shape_.network == nullptr ? "127.0.0.1" : shape_.network->node(name).address) + ":0";
}

Process ProcessCluster::launch(const std::string& program, const std::string& name,
                               std::vector<std::string> arguments, const std::vector<std::string>& more) {
  std::filesystem::remove(ready_path(name));
  arguments.insert(arguments.end(), {"--ops-listen", any_port(name), "--ready-file", ready_path(name)});
  arguments.insert(arguments.end(), shape_.arguments.begin(), shape_.arguments.end());
  arguments.insert(arguments.end(), more.begin(), more.end());
  Surroundings where;
  if (shape_.network != nullptr) where.netns = shape_.network->node(name).netns;
  if (const auto own = environment.find(name); own != environment.end()) where.environment = own->second;
  return Process::start(program, arguments, log_path(name), where);
}

void ProcessCluster::start_scheduler() {
  scheduler = launch("conclave-scheduler", "scheduler",
                     {"--listen", scheduler_address_.empty() ? any_port("scheduler") : scheduler_address_},
                     shape_.scheduler_arguments);
  std::map<std::string, std::string> ready;
  EXPECT_TRUE(eventually([&] {
    ready = read_ready_file(ready_path("scheduler"));
    return !ready.empty() || !scheduler.running();
  }));
  ASSERT_FALSE(ready["grpc"].empty()) << scheduler.log();
  scheduler_address_ = ready["grpc"];
}

std::vector<std::string> ProcessCluster::member_arguments(const std::string& name) {
  std::vector<std::string> arguments = {
      "--model",     shape_.model.empty() ? ClusterEnvironment::model() : shape_.model,
      "--name",      name,
      "--scheduler", scheduler_address_,
      "--threads",   "1"};
  if (shape_.network != nullptr) {
    arguments.insert(arguments.end(), {"--set", "transport.interface=" + shape_.network->node(name).device});
  }
  return arguments;
}

void ProcessCluster::start_worker(size_t index) {
  const std::string name = "worker" + (index == 0 ? "" : std::to_string(index));
  Process& process = index == 0 ? worker : other_workers[index - 1];
  process = launch("conclave-attention", name, member_arguments(name), shape_.worker_arguments);
}

void ProcessCluster::start_shard(size_t index) {
  const std::string name = "shard" + std::to_string(index);
  shards[index] = launch("conclave-expert", name, member_arguments(name), shape_.shard_arguments);
}

void ProcessCluster::start_router(std::vector<std::string> more_arguments) {
  router =
      launch("conclave-router", "router",
             {"--model", shape_.model.empty() ? ClusterEnvironment::model() : shape_.model, "--scheduler",
              scheduler_address_, "--http-listen", http_address_.empty() ? any_port("router") : http_address_,
              "--grpc-listen", grpc_address_.empty() ? any_port("router") : grpc_address_, "--admin-listen",
              "127.0.0.1:0"},
             more_arguments);
  std::map<std::string, std::string> ready;
  EXPECT_TRUE(eventually([&] {
    ready = read_ready_file(ready_path("router"));
    return !ready.empty() || !router.running();
  }));
  ASSERT_FALSE(ready["http"].empty()) << router.log();
  http_address_ = ready["http"];
  grpc_address_ = ready["grpc"];
}

std::string ProcessCluster::ops(const std::string& process) {
  std::map<std::string, std::string> ready;
  EXPECT_TRUE(eventually([&] {
    ready = read_ready_file(ready_path(process));
    return !ready.empty();
  })) << process;
  return ready["ops"];
}

double ProcessCluster::metric(const std::string& process, const std::string& name) {
  const auto answer = http_get(ops(process), "/metrics");
  if (!answer.ok()) return -1;
  const size_t at = ("\n" + answer->body).find("\n" + name + " ");
  return at == std::string::npos ? -1 : std::stod(answer->body.substr(at + name.size()));
}

::testing::AssertionResult ProcessCluster::wait_ready() {
  const bool ready = eventually([&] { return gateway->fleet().ready; });
  // Every worker, where a test has several: which one runs what must not hang on who came first.
  if (ready && (shape_.workers == 1 || eventually([&] {
                  return metric("scheduler", "conclave_scheduler_workers") == shape_.workers;
                }))) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << gateway->fleet().not_ready << "\n--- scheduler\n"
                                       << scheduler.log() << "\n--- worker\n"
                                       << worker.log() << "\n--- shard 0\n"
                                       << shards[0].log();
}

::testing::AssertionResult ProcessCluster::wait_router_ready() {
  if (eventually([&] {
        auto answer = http_get(ops("router"), "/readyz");
        return answer.ok() && answer->code == 200;
      })) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << router.log();
}

std::string ProcessCluster::unexpected_ends() {
  std::string out;
  const auto look = [&out](const char* name, Process& process) {
    if (!process.running()) out += std::string(name) + " ended:\n" + process.log();
  };
  look("scheduler", scheduler);
  look("worker", worker);
  if (router.pid() > 0) look("router", router);
  for (Process& other : other_workers) look("worker", other);
  for (Process& shard : shards) look("shard", shard);
  return out;
}

std::shared_ptr<PendingCompletion> ProcessCluster::submit(AcceptedRequest request) {
  auto pending = std::make_shared<PendingCompletion>(request.choices);
  gateway->submit(std::move(request), pending);
  return pending;
}

std::string demo_model() { return CONCLAVE_DEMO_MODEL; }

AcceptedRequest numbered_request(uint32_t i, uint32_t max_tokens) {
  SplitMix64 random(i + 1);
  std::vector<TokenId> prompt(1 + random.below(40));
  for (TokenId& token : prompt) token = static_cast<TokenId>(random.below(200));
  AcceptedRequest request = make_request(std::move(prompt), max_tokens);
  request.sampling.ignore_eos = true;
  request.sampling.seed = i;
  request.sampling.temperature = i % 2 == 0 ? 0.0f : 0.9f;
  request.sampling.top_k = i % 4 == 1 ? 20 : 0;
  return request;
}

std::vector<std::vector<TokenId>> undisturbed(uint32_t count, uint32_t max_tokens, const std::string& model) {
  auto cluster =
      LocalCluster::load(model.empty() ? ClusterEnvironment::model() : model, LocalClusterOptions());
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  if (!cluster.ok()) return {};
  EXPECT_TRUE((*cluster)->wait_ready().ok());
  std::vector<std::vector<TokenId>> out;
  for (uint32_t i = 0; i < count; ++i) {
    auto answer = (*cluster)->complete(numbered_request(i, max_tokens));
    EXPECT_TRUE(answer.ok()) << answer.status();
    out.push_back(answer.ok() ? answer->tokens : std::vector<TokenId>());
  }
  return out;
}

Streams::Streams(ProcessCluster& cluster, uint32_t count, uint32_t tokens)
    : expected(undisturbed(count, tokens, cluster.shape().model)) {
  for (uint32_t i = 0; i < count; ++i) pending.push_back(cluster.submit(numbered_request(i, tokens)));
}

void Streams::wait_tokens(size_t count) {
  for (auto& stream : pending) ASSERT_TRUE(stream->wait_for_tokens(count, kStreamLimit));
}

size_t Streams::longest() const {
  size_t most = 0;
  for (const auto& stream : pending) most = std::max(most, stream->tokens());
  return most;
}

void Streams::check(ProcessCluster& cluster) {
  for (size_t i = 0; i < pending.size(); ++i) {
    auto answer = pending[i]->wait(kStreamLimit);
    ASSERT_TRUE(answer.ok()) << i << ": " << answer.status() << "\n--- worker\n" << cluster.worker.log();
    EXPECT_EQ(answer->finish, FinishReason::kLength) << i << ": " << answer->error;
    EXPECT_EQ(answer->tokens, expected[i]) << "stream " << i;
  }
}

}  // namespace conclave
