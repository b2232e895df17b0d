// An attention worker or an expert shard as a process: the loop it runs on, its threads, its transport, its
// line to the scheduler. Core is Worker or Shard.
//
// A scheduler fences an incarnation whose connection was lost. A live process then starts over under a new
// one: a new transport, a new core, a new line; the weights stay mapped.
//
// A scheduler may drain a member: it then has nothing to do any more until the process is started anew.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "libs/base/cpu_set.h"
#include "libs/base/id_text.h"
#include "libs/base/json_escape.h"
#include "libs/base/random.h"
#include "libs/base/thread_pool.h"
#include "libs/base/watched_file.h"
#include "libs/config/cluster_config.h"
#include "libs/kernels/ops.h"
#include "libs/rpc/member_client.h"
#include "libs/runtime/loop_executor.h"
#include "libs/service/test_faults.h"
#include "libs/telemetry/log.h"
#include "libs/telemetry/log_limit.h"
#include "libs/transport/handshake.h"
#include "libs/transport/ucx_transport.h"

namespace conclave {

struct MemberSettings {
  std::string scheduler;  // host:port
  rpc::ClientOptions control;
  TransportConfig transport;
  std::vector<std::string> secrets;  // parse_secrets(); empty: none
  std::optional<WatchedFile> secret_file;
  std::string numerics_id;
  std::string model_fingerprint;
  uint32_t threads = 1;
  std::vector<uint32_t> pinned_cpus;  // one for each thread that computes, in turn; empty: none
  kernels::Isa isa = kernels::Isa::kScalar;
  std::optional<TestFaults> test_faults;  // injected into the data plane
};

inline constexpr int kRefusalsPerIncarnation = 20;
inline constexpr size_t kMaxUcxWords = 64 << 10;   // of what UCX says of itself
inline constexpr Nanos kSecretLook = 5 * kSecond;  // between looks at the file of the cluster's secret

template <class Core, class Metrics>
class MemberProcess {
 public:
  // Makes the core; on the loop, for each incarnation.
  using Factory =
      std::function<StatusOr<std::unique_ptr<Core>>(Executor&, ExpertTransport&, kernels::Context)>;

  MemberProcess(MemberSettings settings, Factory factory)
      : settings_(std::move(settings)),
        factory_(std::move(factory)),
        pool_(settings_.threads, ThreadPool::kSpin, settings_.pinned_cpus),
        secrets_(settings_.secrets),
        secret_file_(settings_.secret_file),
        thread_(LoopExecutor::Options{.spin_ns = settings_.transport.spin}) {}
  ~MemberProcess() { stop(); }

  // UNAVAILABLE when the transport can't start, or what the factory says.
  Status start() {
    Status status;
    thread_.loop().call([&] {
      if (!settings_.pinned_cpus.empty()) {
        status = bind_to_cpus(std::span(settings_.pinned_cpus).first(1), "cpus");
        if (!status.ok()) return;
      }
      status = join();
      if (secret_file_) look_at_secret();
    });
    return status;
  }

  // Leaves the cluster at once: what it was computing is computed elsewhere.
  void stop() {
    if (stopped_) return;
    stopped_ = true;
    thread_.loop().call([&] { leave(); });
    thread_.stop();
  }

  // Asks the scheduler to move elsewhere what runs or is held here; `done` is called once, on the loop, when
  // nothing is left: at once where there is no connection to a scheduler. Work goes on until then.
  void drain(std::function<void()> done) {
    thread_.loop().post([this, done = std::move(done)] {
      on_drained_ = done;
      if (!connected_ || drained_) return nothing_left();
      member_->client->send(Leaving{});
    });
  }

  // Reads the file of the cluster's secret again, if it has changed. Any thread.
  void reload_secret() {
    thread_.loop().post([this] { take_secret(); });
  }

  // Why it is not of use to the cluster, for /readyz. Any thread.
  std::vector<std::string> reasons() {
    std::lock_guard lock(mutex_);
    if (!failure_.empty()) return {failure_};
    if (shown_ == nullptr) return {"joining the cluster"};
    if (std::string why = shown_->client->not_joined(); !why.empty()) return {why};
    if (drained_) return {"drained: the scheduler gives it nothing to do"};
    if (!shown_->core->ready()) return {"the scheduler has not made it ready yet"};
    return {};
  }

  // The core's counters: of now if its loop answers within `limit`, else the last seen. Any thread but the
  // loop's.
  Metrics metrics(Nanos limit = 250 * kMillisecond) {
    const std::shared_ptr<Snapshot> snapshot = snapshot_;
    std::unique_lock lock(snapshot->mutex);
    const uint64_t asked = ++snapshot->asked;
    thread_.loop().post([this, snapshot, asked] {
      std::lock_guard inner(snapshot->mutex);
      if (member_ != nullptr) snapshot->metrics = member_->core->metrics();
      snapshot->busy = member_ != nullptr && member_->core->busy();
      snapshot->waiting_for = member_ != nullptr ? member_->core->waiting_for() : "";
      if (transport_stats_) snapshot->transport = transport_stats_();
      snapshot->answered = asked;
      snapshot->changed.notify_all();
    });
    snapshot->changed.wait_for(lock, std::chrono::nanoseconds(limit),
                               [&] { return snapshot->answered >= asked; });
    return snapshot->metrics;
  }
  // As of the last metrics().
  TransportStats transport_stats() {
    std::lock_guard lock(snapshot_->mutex);
    return snapshot_->transport;
  }
  // What UCX says of the transports and devices it selected, for /debug/process: {"tls","interface","ucx"};
  // ucx is null when the loop does not answer within `limit`. Any thread but the loop's.
  std::string data_plane(Nanos limit = 500 * kMillisecond) {
    struct Words {
      std::mutex mutex;
      std::condition_variable changed;
      std::optional<std::string> text;
    };
    const auto words = std::make_shared<Words>();
    thread_.loop().post([this, words] {
      std::lock_guard inner(words->mutex);
      words->text = ucx_ != nullptr ? ucx_->describe() : "";
      words->changed.notify_all();
    });
    std::unique_lock lock(words->mutex);
    words->changed.wait_for(lock, std::chrono::nanoseconds(limit), [&] { return words->text.has_value(); });
    return "{\"tls\":" + json_quoted(settings_.transport.ucx.tls) +
           ",\"interface\":" + json_quoted(settings_.transport.ucx.net_devices) +
           ",\"ucx\":" + (words->text ? json_quoted(words->text->substr(0, kMaxUcxWords)) : "null") + "}";
  }
  // Kernels and threads, for /debug/process.
  std::string compute() const {
    std::string pinned;
    for (const uint32_t cpu : settings_.pinned_cpus)
      pinned += (pinned.empty() ? "" : ",") + std::to_string(cpu);
    return "{\"isa\":" + json_quoted(kernels::isa_name(settings_.isa)) +
           ",\"threads\":" + std::to_string(settings_.threads) + ",\"pinned_cpus\":[" + pinned +
           "],\"numerics_id\":" + json_quoted(settings_.numerics_id) +
           ",\"model_fingerprint\":" + json_quoted(settings_.model_fingerprint) + "}";
  }
  // Whom its work waits for, as of the last metrics(); empty: nobody.
  std::string waiting_for() {
    std::lock_guard lock(snapshot_->mutex);
    return snapshot_->waiting_for;
  }
  // Whether there was anything to compute, as of the last metrics().
  bool busy() {
    std::lock_guard lock(snapshot_->mutex);
    return snapshot_->busy;
  }
  // Runs the task on the loop. Any thread.
  void post(std::function<void()> task) { thread_.loop().post(std::move(task)); }
  uint64_t incarnations() const { return incarnations_.load(); }

 private:
  // What the line tells, on its way to the core.
  struct Handler final : MemberHandler {
    Handler(MemberProcess& p, Core& c) : process(p), core(c) {}
    Hello hello() override {
      Hello hello = core.hello();
      hello.secrets = process.told_secrets_ = process.known_secrets();
      hello.drained = process.was_drained_;
      return hello;
    }
    void on_message(ToMember message) override {
      const bool drained = std::holds_alternative<Drained>(message);
      const bool welcome = std::holds_alternative<Welcome>(message);
      log_message(message);
      if (welcome) process.connected_ = true;
      core.on_message(std::move(message));
      if (drained) process.drained();
      if (welcome) process.tell_secrets();  // they may have changed since the hello
    }
    void on_down(const Status& cause) override {
      log_info(LogModule::kSessions, "no connection to the scheduler", {{"cause", cause}});
      core.on_down(cause);
      process.connected_ = false;
      process.drained_ = false;
      process.nothing_left();
    }
    MemberProcess& process;
    Core& core;
  };
  static void log_message(const ToMember& message) {
    if (const auto* plan = std::get_if<BatchPlan>(&message)) {
      if (!log_enabled(LogModule::kRequests, LogLevel::kDebug)) return;
      for (const SequenceStart& start : plan->starts) {
        log_debug(LogModule::kRequests, "a sequence starts",
                  {{"stream", id_text(start.request)},
                   {"choice", start.choice},
                   {"step", plan->step.value},
                   {"prompt_tokens", start.prompt_tokens},
                   {"known_tokens", start.tokens.size()}});
      }
    } else if (const auto* placement = std::get_if<PlacementUpdate>(&message)) {
      log_debug(LogModule::kPlacement, "a placement",
                {{"epoch", placement->table.epoch().value},
                 {"shards", placement->table.shards().size()},
                 {"urgent", placement->urgent},
                 {"release", placement->release}});
    } else if (const auto* welcome = std::get_if<Welcome>(&message)) {
      log_debug(LogModule::kSessions, "welcome",
                {{"scheduler_incarnation", welcome->scheduler.value},
                 {"lease_ms", welcome->lease_ns / kMillisecond}});
    }
  }
  // One incarnation. Destroyed from the last member to the first: the line, the core, the transport.
  struct Member {
    std::unique_ptr<ExpertTransport> transport;
    std::unique_ptr<Core> core;
    std::unique_ptr<Handler> handler;
    std::unique_ptr<rpc::MemberClient> client;
  };
  struct Snapshot {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t asked = 0;
    uint64_t answered = 0;
    Metrics metrics;
    TransportStats transport;
    bool busy = false;
    std::string waiting_for;
  };

  // --- on the loop

  Status join() {
    const Incarnation self = make_incarnation();
    TransportOptions options = settings_.transport.options;
    options.self = self;
    if (!secrets_.empty()) options.secret = secrets_[0];
    if (secrets_.size() > 1) options.other_secret = secrets_[1];
    options.on_refused = [this](HelloRefusal reason, Incarnation peer, const Status& why) {
      if (const auto left_out = refusal_lines_[static_cast<size_t>(reason)].take(steady_now())) {
        log_warn(LogModule::kTransport, "a peer of the data plane was refused",
                 {{"reason", hello_refusal_name(reason)},
                  {"peer_incarnation", peer.value},
                  {"cause", why},
                  {"lines_left_out", *left_out}});
      }
    };
    options.fleet = settings_.numerics_id + " " + settings_.model_fingerprint;
    auto member = std::make_unique<Member>();
    ASSIGN_OR_RETURN(std::unique_ptr<UcxTransport> ucx,
                     UcxTransport::create(thread_.loop(), options, settings_.transport.ucx));
    UcxTransport* const stats_of = ucx.get();
    member->transport = std::move(ucx);
    if (settings_.test_faults) {
      member->transport =
          std::make_unique<FaultTransport>(std::move(member->transport), thread_.loop(),
                                           settings_.test_faults->seed, settings_.test_faults->plan);
    }
    ASSIGN_OR_RETURN(member->core,
                     factory_(thread_.loop(), *member->transport, kernels::Context{settings_.isa, &pool_}));
    rpc::ClientOptions control = settings_.control;
    control.target = settings_.scheduler;
    Core* core = member->core.get();
    member->handler = std::make_unique<Handler>(*this, *core);
    member->client = std::make_unique<rpc::MemberClient>(control, *member->handler, thread_.loop(),
                                                         [core] { return core->heartbeat(); });
    core->set_link(member->client.get());
    core->set_on_refused([this](const Refusal& refusal) { refused(refusal); });
    core->start();
    member->client->start();
    member_ = std::move(member);
    transport_stats_ = [stats_of] { return stats_of->stats(); };
    ucx_ = stats_of;
    ++incarnations_;
    log_info(LogModule::kMembers, "joining",
             {{"member_incarnation", self.value}, {"scheduler", settings_.scheduler}});
    std::lock_guard lock(mutex_);
    shown_ = member_.get();
    failure_.clear();
    return OkStatus();
  }

  void leave() {
    {
      std::lock_guard lock(mutex_);
      shown_ = nullptr;
    }
    transport_stats_ = nullptr;
    ucx_ = nullptr;
    connected_ = false;
    drained_ = false;
    if (member_ == nullptr) return;
    member_->core->set_link(nullptr);
    member_.reset();
  }

  void take_secret() {
    if (!secret_file_ || !secret_file_->changed()) return;
    const auto text = secret_file_->read();
    auto secrets = text.ok() ? parse_secrets(*text) : StatusOr<std::vector<std::string>>(text.status());
    if (!secrets.ok()) {
      log_error(LogModule::kTransport, "the cluster's secret was not read again; the old one stays",
                {{"cause", secrets.status()}});
      return;
    }
    secrets_ = *std::move(secrets);
    if (ucx_ != nullptr) ucx_->set_secrets(secrets_[0], secrets_.size() > 1 ? secrets_[1] : "");
    log_info(LogModule::kTransport, "the cluster's secret was read again",
             {{"accepted", static_cast<uint64_t>(secrets_.size())}});
    tell_secrets();
  }

  KnownSecrets known_secrets() const {
    KnownSecrets known;
    for (const std::string& secret : secrets_) known.digests.push_back(wire::secret_digest(secret));
    return known;
  }

  // Tells the scheduler, where it has heard of others.
  void tell_secrets() {
    if (!connected_) return;
    KnownSecrets known = known_secrets();
    if (known == told_secrets_) return;
    Heartbeat beat = member_->core->heartbeat();
    beat.secrets = told_secrets_ = std::move(known);
    member_->client->send(beat);
  }

  // A file of some bytes, on a file system of this machine: reading it does not hold up the loop.
  void look_at_secret() {
    take_secret();
    thread_.loop().post_at(thread_.loop().now() + kSecretLook, [this] { look_at_secret(); });
  }

  void drained() {
    drained_ = true;
    was_drained_ = true;
    log_info(LogModule::kMembers, "drained: nothing is left here, and the scheduler gives nothing more");
    nothing_left();
  }

  void nothing_left() {
    if (const auto done = std::exchange(on_drained_, nullptr)) done();
  }

  // An incarnation that was welcomed once is fenced, or gave itself up; another refusal stands until somebody
  // changes the fleet, and the line tries again by itself. After many of those a new incarnation is tried all
  // the same: the scheduler's memory of fenced ones is bounded, and ends in a floor.
  void refused(const Refusal& refusal) {
    if (rejoining_) return;
    if (refusal.reason != last_refusal_)
      log_warn(LogModule::kMembers, "not a part of the fleet", {{"reason", refusal.reason}});
    last_refusal_ = refusal.reason;
    if (!member_->client->was_welcomed() && ++refusals_ < kRefusalsPerIncarnation) return;
    rejoining_ = true;
    // Not from inside the core's own callback.
    thread_.loop().post([this] { rejoin(); });
  }

  void rejoin() {
    rejoining_ = false;
    refusals_ = 0;
    leave();
    if (Status joined = join(); !joined.ok()) {
      log_error(LogModule::kMembers, "cannot join again", {{"cause", joined}});
      {
        std::lock_guard lock(mutex_);
        failure_ = "cannot join again: " + message_of(joined);
      }
      thread_.loop().post_at(thread_.loop().now() + settings_.control.reconnect_max, [this] { rejoin(); });
    }
  }

  const MemberSettings settings_;
  const Factory factory_;
  ThreadPool pool_;
  std::atomic<uint64_t> incarnations_{0};
  std::atomic<bool> drained_{false};
  const std::shared_ptr<Snapshot> snapshot_ = std::make_shared<Snapshot>();

  std::mutex mutex_;
  Member* shown_ = nullptr;  // guarded by mutex_: member_, while it is whole
  std::string failure_;      // guarded by mutex_

  // the loop's
  std::unique_ptr<Member> member_;
  std::function<TransportStats()> transport_stats_;
  std::vector<std::string> secrets_;
  std::optional<WatchedFile> secret_file_;
  KnownSecrets told_secrets_;  // to the scheduler, last
  UcxTransport* ucx_ = nullptr;  // of member_
  std::array<LogLimit, kHelloRefusals> refusal_lines_;
  std::string last_refusal_;
  int refusals_ = 0;  // of this incarnation
  bool rejoining_ = false;
  bool connected_ = false;  // to a scheduler that welcomed it
  bool was_drained_ = false;  // once: it stays so until it is started anew, whichever scheduler comes
  std::function<void()> on_drained_;
  bool stopped_ = false;

  LoopThread thread_;  // last: its tasks use everything above
};

}  // namespace conclave
