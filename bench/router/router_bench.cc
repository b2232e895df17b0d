// What the router adds to a token: thousands of open SSE streams over loopback, in front of a scheduler that
// gives each of them 20 tokens a second. Method and figures: docs/bench_router.md.
//
//   router_bench [--streams 2000] [--seconds 10] [--rate 20] [--threads 2] [--route chat|completions]
//
// The router's HTTP front and gateway run in this process over a scheduler port that only emits tokens; the
// clients run in a child process. The latency of a token is the time from just before the scheduler port
// hands it over to just after the client's read returned. CPU is that of this whole process while tokens
// flow, the emitting thread included.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "bench/router/stream_clients.h"
#include "router_service/http/http_front.h"
#include "tests/router/fake_text.h"

namespace conclave::bench {
namespace {

struct Flags {
  uint32_t streams = 2000;
  uint32_t seconds = 10;
  uint32_t rate = 20;
  unsigned threads = 2;
  std::string path = "/v1/chat/completions";
};

// Emits one token every 1/rate seconds for each request, each at its own phase, so that emissions are spread
// evenly as those of many workers are.
class TickingScheduler : public SchedulerPort {
 public:
  TickingScheduler(const SentTimes& sent, uint32_t rate) : sent_(sent), period_(kSecond / rate) {}
  ~TickingScheduler() override {
    stop_.store(true);
    thread_.join();
  }
  void submit(AcceptedRequest request, std::shared_ptr<RequestObserver> observer) override {
    observer->on_accepted();
    std::lock_guard lock(mutex_);
    arrived_.push_back({request.id, static_cast<uint32_t>(request.sampling.seed), 0, std::move(observer)});
  }
  void cancel(RequestId) override {}
  void cancel_choice(RequestId, uint32_t) override {}
  FleetInfo fleet() const override {
    FleetInfo fleet;
    fleet.ready = true;
    return fleet;
  }
  uint64_t emitted() const { return emitted_.load(); }
  // The longest that an emission was later than its time: the machine's share of the latencies.
  Nanos latest() const { return latest_.load(); }

 private:
  struct Open {
    RequestId id;
    uint32_t stream;
    uint32_t next;
    std::shared_ptr<RequestObserver> observer;
  };

  void run() {
    constexpr size_t kSlots = 50;  // the period is cut into so many
    std::vector<std::vector<Open>> slots(kSlots);
    size_t fill = 0;
    TimePoint due = steady_now();
    for (size_t slot = 0; !stop_.load(); slot = (slot + 1) % kSlots) {
      due += period_ / static_cast<Nanos>(kSlots);
      const TimePoint now = steady_now();
      if (due > now)
        std::this_thread::sleep_for(std::chrono::nanoseconds(due - now));
      else
        latest_.store(std::max(latest_.load(), now - due));
      {
        std::lock_guard lock(mutex_);
        for (Open& open : arrived_) slots[fill++ % kSlots].push_back(std::move(open));
        arrived_.clear();
      }
      for (Open& open : slots[slot]) emit(open);
      std::erase_if(slots[slot], [this](const Open& open) { return open.next >= sent_.tokens; });
    }
  }

  void emit(Open& open) {
    TokenEvent event;
    event.request = open.id;
    event.index = open.next;
    event.tokens = {'x'};
    if (open.next + 1 == sent_.tokens) event.finish = FinishReason::kLength;
    __atomic_store_n(&sent_.at(open.stream, open.next), steady_now(), __ATOMIC_RELEASE);
    ++open.next;
    open.observer->on_tokens(event);
    emitted_.fetch_add(1, std::memory_order_relaxed);
  }

  const SentTimes sent_;
  const Nanos period_;
  std::mutex mutex_;
  std::vector<Open> arrived_;  // guarded by mutex_
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> emitted_{0};
  std::atomic<Nanos> latest_{0};
  std::thread thread_{[this] { run(); }};
};

struct Cpu {
  double user = 0, kernel = 0;
  double all() const { return user + kernel; }
};
Cpu cpu_now() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return {seconds(usage.ru_utime), seconds(usage.ru_stime)};
}

bool parse(int argc, char** argv, Flags& flags) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    const uint32_t number = static_cast<uint32_t>(std::strtoul(value.c_str(), nullptr, 10));
    if (name == "--streams" && number >= 1)
      flags.streams = number;
    else if (name == "--seconds" && number >= 1)
      flags.seconds = number;
    else if (name == "--rate" && number >= 1)
      flags.rate = number;
    else if (name == "--threads" && number >= 1)
      flags.threads = number;
    else if (name == "--route" && (value == "chat" || value == "completions"))
      flags.path = value == "chat" ? "/v1/chat/completions" : "/v1/completions";
    else
      return false;
  }
  return argc % 2 == 1;
}

int run(const Flags& flags) {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_cur < flags.streams + 100) {
    std::fprintf(stderr, "router_bench: only %lu open files are allowed\n",
                 static_cast<unsigned long>(files.rlim_cur));
    return 2;
  }
  SentTimes sent;
  sent.streams = flags.streams;
  sent.tokens = flags.seconds * flags.rate;
  const size_t bytes = sizeof(int64_t) * sent.streams * sent.tokens;
  void* shared =
      mmap(nullptr, bytes + sizeof(ClientReport), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 2;
  sent.times = static_cast<int64_t*>(shared);
  auto* report = reinterpret_cast<ClientReport*>(static_cast<char*>(shared) + bytes);

  int port_pipe[2];
  if (pipe(port_pipe) != 0) return 2;
  const pid_t child = fork();  // before there are threads
  if (child == 0) {
    uint16_t port = 0;
    close(port_pipe[1]);
    if (read(port_pipe[0], &port, sizeof port) != sizeof port) _exit(1);
    const uint32_t skip = 2 * flags.rate;  // until all streams are open
    *report =
        run_clients(port, flags.path, sent, std::min(skip, sent.tokens / 2), (flags.seconds + 60) * kSecond);
    _exit(0);
  }
  close(port_pipe[0]);
  testing::FakeText text;
  TickingScheduler scheduler(sent, flags.rate);
  gateway::GatewayOptions options;
  options.limits.max_requests = options.limits.max_queued_requests = options.limits.max_waiting_texts =
      flags.streams + 1;
  gateway::Gateway gateway(options, testing::fake_model(1 << 20), scheduler, text);
  router::HttpFrontOptions front_options;
  front_options.threads = flags.threads;
  front_options.limits.max_connections = flags.streams + 1;
  auto front = router::HttpFront::start(front_options, gateway);
  if (!front.ok()) {
    std::fprintf(stderr, "router_bench: %s\n", message_of(front.status()).c_str());
    return 2;
  }
  const uint16_t port = (*front)->port();
  if (write(port_pipe[1], &port, sizeof port) != sizeof port) return 2;
  // CPU is taken while all streams flow: from 2 s after the last one began to the last second.
  while (gateway.counts().open < flags.streams &&
         scheduler.emitted() < static_cast<uint64_t>(sent.tokens) * sent.streams / 2)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::this_thread::sleep_for(std::chrono::seconds(1));
  const Cpu before = cpu_now();
  const uint64_t tokens_before = scheduler.emitted();
  const TimePoint from = steady_now();
  std::this_thread::sleep_for(
      std::chrono::seconds(std::max(1u, flags.seconds - std::min(flags.seconds - 1, 5u))));
  const Cpu after = cpu_now();
  const double cpu = after.all() - before.all();
  const uint64_t tokens = scheduler.emitted() - tokens_before;
  const double wall = static_cast<double>(steady_now() - from) * 1e-9;
  int status = 0;
  waitpid(child, &status, 0);
  front->reset();
  double load[3] = {};
  if (getloadavg(load, 3) < 1) load[0] = -1;
  std::printf("%u streams, %u tokens/s each, %s, %u HTTP threads, load average %.1f on %u cores\n",
              flags.streams, flags.rate, flags.path.c_str(), flags.threads, load[0],
              std::thread::hardware_concurrency());
  std::printf("  added latency  p50 %.2f ms  p90 %.2f  p99 %.2f  p99.9 %.2f  max %.1f  (%lu tokens)\n",
              report->p50_ms, report->p90_ms, report->p99_ms, report->p999_ms, report->max_ms,
              static_cast<unsigned long>(report->tokens));
  std::printf(
      "  router CPU     %.2f us per token, %.2f of it in the kernel  (%.0f tokens/s over %.1f s, %.0f %% of "
      "a core)\n",
      cpu / static_cast<double>(std::max<uint64_t>(tokens, 1)) * 1e6,
      (after.kernel - before.kernel) / static_cast<double>(std::max<uint64_t>(tokens, 1)) * 1e6,
      static_cast<double>(tokens) / wall, wall, 100 * cpu / wall);
  std::printf(
      "  clients        %.2f tokens per read, %.0f bytes per token, %.1f s of CPU; emissions up to %.1f ms "
      "late; "
      "%lu broken streams\n",
      static_cast<double>(report->tokens) / static_cast<double>(std::max<uint64_t>(report->reads, 1)),
      static_cast<double>(report->bytes) / static_cast<double>(sent.tokens) / sent.streams,
      report->cpu_seconds, static_cast<double>(scheduler.latest()) * 1e-6,
      static_cast<unsigned long>(report->broken));
  return report->broken == 0 ? 0 : 1;
}

}  // namespace
}  // namespace conclave::bench

int main(int argc, char** argv) {
  conclave::bench::Flags flags;
  if (!conclave::bench::parse(argc, argv, flags)) {
    std::fprintf(
        stderr,
        "router_bench [--streams N] [--seconds N] [--rate N] [--threads N] [--route chat|completions]\n");
    return 2;
  }
  return conclave::bench::run(flags);
}
