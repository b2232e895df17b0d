// A scheduler with its gRPC server, and members without a model, in one process and over real connections.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "libs/base/random.h"
#include "libs/rpc/grpc_setup.h"
#include "libs/rpc/member_client.h"
#include "libs/rpc/scheduler_client.h"
#include "libs/runtime/loop_executor.h"
#include "scheduler/grpc_server.h"
#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {

// A condition that other threads bring about; the limit only bounds a failing test.
class Watch {
 public:
  void change(const std::function<void()>& edit) {
    {
      std::lock_guard lock(mutex_);
      edit();
    }
    changed_.notify_all();
  }
  bool wait(const std::function<bool()>& reached, int seconds = 30) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(seconds), reached);
  }
  template <class T>
  T read(const T& value) {
    std::lock_guard lock(mutex_);
    return value;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

// For what can only be asked, not waited for: asks until it holds.
inline bool eventually(const std::function<bool()>& reached, int seconds = 30) {
  const TimePoint end = steady_now() + seconds * kSecond;
  Watch nothing;
  while (!reached()) {
    if (steady_now() > end) return false;
    nothing.wait([] { return false; }, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

struct Collector : RequestObserver {
  void on_accepted() override {
    watch.change([&] { ++accepted; });
  }
  void on_resumable() override {
    watch.change([&] { ++resumable; });
  }
  void on_adopted(const AdoptedRequest& request) override {
    watch.change([&] { adopted.push_back(request); });
  }
  void on_refused(const Status& cause) override {
    watch.change([&] {
      ++ends;
      refused = cause;
    });
  }
  void on_tokens(const TokenEvent& event) override {
    watch.change([&] {
      if (event.index != tokens.size() || ends > 0) ++faults;
      tokens.insert(tokens.end(), event.tokens.begin(), event.tokens.end());
      if (event.finish != FinishReason::kNone) {
        ++ends;
        finish = event.finish;
        error = event.error;
      }
    });
  }
  bool wait_end() {
    return watch.wait([&] { return ends > 0; });
  }
  bool wait_tokens(size_t count) {
    return watch.wait([&] { return tokens.size() >= count || ends > 0; });
  }

  Watch watch;
  int accepted = 0;
  int resumable = 0;
  std::vector<AdoptedRequest> adopted;
  int ends = 0;
  int faults = 0;  // gaps, repeats, events after the end
  Status refused;
  std::vector<TokenId> tokens;
  FinishReason finish = FinishReason::kNone;
  std::string error;
};

inline SchedulerOptions quick_options() {
  SchedulerOptions options;
  options.incarnation = make_incarnation();
  options.placement_settle_ms = 5;
  return options;
}

// A scheduler process of its own, so to speak: restart() loses everything it knew, on the same port.
class SchedulerHost {
 public:
  explicit SchedulerHost(SchedulerOptions options = quick_options(), GrpcServerOptions server = {})
      : server_(server) {
    static std::once_flag quiet;
    std::call_once(quiet, [] { rpc::route_grpc_logs(nullptr); });
    start(options);
  }
  ~SchedulerHost() { stop(); }

  void start(SchedulerOptions options) {
    thread = std::make_unique<LoopThread>();
    loop = std::make_unique<SchedulerLoop>(options, thread->loop());
    auto started = GrpcServer::start(
        server_, *loop, thread->loop(),
        [this](const std::string&, const Status& cause) { watch.change([&] { ended.push_back(cause); }); });
    ASSERT_TRUE(started.ok()) << started.status();
    grpc = *std::move(started);
    server_.listen = grpc->address();
  }
  void stop() {
    if (grpc == nullptr) return;
    grpc.reset();
    thread->stop();
    loop.reset();
    thread.reset();
  }
  void restart() {
    stop();
    start(quick_options());
  }
  rpc::ClientOptions client() const {
    rpc::ClientOptions options;
    options.target = server_.listen;
    options.reconnect_min = 5 * kMillisecond;
    options.reconnect_max = 50 * kMillisecond;
    return options;
  }
  // Whether a session ended with a cause that contains the text.
  bool wait_ended(const std::string& text) {
    return watch.wait([&] {
      for (const Status& cause : ended) {
        if (message_of(cause).find(text) != std::string::npos) return true;
      }
      return false;
    });
  }

  std::unique_ptr<LoopThread> thread;
  std::unique_ptr<SchedulerLoop> loop;
  std::unique_ptr<GrpcServer> grpc;
  Watch watch;
  std::vector<Status> ended;

 private:
  GrpcServerOptions server_;
};

// A member without a model; a worker answers each plan after `step_time`, a shard is ready at once.
class RemoteMember : public MemberHandler {
 public:
  static constexpr uint32_t kKvBlocks = 512;

  RemoteMember(const rpc::ClientOptions& options, Role role, Nanos step_time = 0,
               const std::function<void(Hello&)>& edit = nullptr)
      : step_time_(step_time), model_(kKvBlocks) {
    hello_ = Harness::member_hello(role, make_incarnation().value, kKvBlocks);
    hello_.max_batch_tokens = 512;
    if (edit) edit(hello_);
    client = std::make_unique<rpc::MemberClient>(options, *this, thread.loop());
    client->start();
  }
  ~RemoteMember() override {
    if (client != nullptr) leave();
    thread.stop();
  }
  // As a process that dies: the connection goes, nothing more is answered.
  void leave() {
    thread.loop().call([this] { client.reset(); });
  }
  bool wait_joined() {
    return eventually([this] { return client->not_joined().empty(); });
  }

  Hello hello() override {
    watch.change([&] { ++hellos; });
    return hello_;
  }
  void on_message(ToMember message) override {
    if (std::holds_alternative<Welcome>(message)) {
      model_ = ModelWorker(hello_.kv_blocks);  // what an older connection gave is void
      watch.change([&] { ++welcomes; });
    } else if (const auto* update = std::get_if<PlacementUpdate>(&message)) {
      if (hello_.role == Role::kAttention) {
        client->send(Heartbeat{update->table.epoch()});
      } else if (!update->release) {
        client->send(PlacementReady{update->table.epoch()});
      }
    } else if (auto* plan = std::get_if<BatchPlan>(&message)) {
      if (step_time_ == 0) return answer(*plan);
      thread.loop().post_at(thread.loop().now() + step_time_, [this, p = std::move(*plan), w = welcomes] {
        if (client != nullptr && w == welcomes) answer(p);
      });
    } else if (const auto* refusal = std::get_if<Refusal>(&message)) {
      watch.change([&] { refused = refusal->reason; });
    }
  }
  void on_down(const Status& cause) override {
    watch.change([&] {
      ++downs;
      down_cause = cause;
    });
  }

  std::string breach() {
    std::string out;
    thread.loop().call([&] { out = model_.breach(); });
    return out;
  }

  Watch watch;
  int hellos = 0;
  int welcomes = 0;
  int downs = 0;
  std::string refused;
  Status down_cause;
  LoopThread thread;
  std::unique_ptr<rpc::MemberClient> client;

 private:
  void answer(const BatchPlan& plan) { client->send(model_.run(plan)); }

  const Nanos step_time_;
  Hello hello_;
  ModelWorker model_;
};

}  // namespace conclave::scheduler
