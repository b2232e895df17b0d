// Round trips of the data plane: a dispatch out, a combine of the same number of rows back, one at a time.
//
//   transport_bench [rounds]        prints one line per transport and size: p50 and p99 in microseconds
//
// loopback: two threads of one process. ucx: two processes over TCP on lo, started by this program. Rows are
// BF16 of 3,072 elements, so 6 KiB is one token, 96 KiB is 16 and 1.5 MiB is 256. Medians of a shared machine
// move by tens of percent; compare within one run.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "libs/base/random.h"
#include "libs/runtime/loop_executor.h"
#include "libs/transport/loopback_transport.h"
#include "libs/transport/ucx_transport.h"

extern char** environ;

namespace conclave {
namespace {

constexpr uint32_t kHidden = 3072;

TransportOptions options() {
  TransportOptions o;
  o.self = make_incarnation();
  o.secret = "bench";
  o.fleet = "bench";
  return o;
}

// Answers every dispatch with as many rows.
class Echo {
 public:
  explicit Echo(ExpertTransport& transport) : transport_(transport) {
    transport_.set_ready([this] {
      events_.clear();
      transport_.poll(events_);
      for (auto& e : events_) {
        auto* d = std::get_if<TransportEvent::Dispatch>(&e.what);
        if (d == nullptr) continue;
        CombineBatch c;
        c.id = d->batch.id;
        c.shard = transport_.self();
        c.hidden = d->batch.hidden;
        c.dtype = d->batch.dtype;
        for (uint32_t i = 0; i < d->batch.row_count(); ++i) c.items.push_back(i);
        c.outputs = std::move(d->batch.rows);
        (void)transport_.reply(e.peer, c);
      }
    });
  }

 private:
  ExpertTransport& transport_;
  std::vector<TransportEvent> events_;
};

// Drives `transport` on `loop` (this thread) against an echo.
void measure(const char* name, LoopExecutor& loop, ExpertTransport& transport, Incarnation peer,
             const std::string& address, int rounds) {
  std::vector<TransportEvent> events;
  bool up = false, down = false;
  uint64_t combines = 0;
  transport.set_ready([&] {
    events.clear();
    transport.poll(events);
    for (const auto& e : events) {
      up |= std::holds_alternative<TransportEvent::PeerUp>(e.what);
      down |= std::holds_alternative<TransportEvent::PeerDown>(e.what);
      combines += std::holds_alternative<TransportEvent::Combine>(e.what);
    }
  });
  transport.connect(peer, address);
  if (!loop.run_until([&] { return up || down; }, 5 * kSecond) || !up) {
    std::printf("%-9s no connection\n", name);
    return;
  }
  uint64_t seq = 0;
  for (uint32_t rows : {1u, 16u, 256u}) {
    DispatchBatch d;
    d.id.worker = transport.self();
    d.hidden = kHidden;
    for (uint32_t r = 0; r <= rows; ++r) d.expert_begin.push_back(r);
    d.expert_ids.assign(rows, 7);
    d.rows = std::make_shared<std::vector<std::byte>>(rows * d.row_bytes());
    std::vector<Nanos> times;
    for (int i = 0; i < rounds + rounds / 10; ++i) {
      d.id.seq = ++seq;
      const uint64_t want = combines + 1;
      const TimePoint start = steady_now();
      if (!transport.submit(peer, d).ok() ||
          !loop.run_until([&] { return combines == want || down; }, kSecond)) {
        std::printf("%-9s %u rows: lost\n", name, rows);
        return;
      }
      if (i >= rounds / 10) times.push_back(steady_now() - start);
    }
    std::sort(times.begin(), times.end());
    const double kib = rows * kHidden * 2 / 1024.0;
    std::printf("%-9s %7.0f KiB each way  p50 %9.1f us  p99 %9.1f us\n", name, kib,
                static_cast<double>(times[times.size() / 2]) / 1e3,
                static_cast<double>(times[times.size() * 99 / 100]) / 1e3);
    std::fflush(stdout);
  }
}

int echo_process() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  LoopExecutor loop;
  auto made = UcxTransport::create(loop, UcxTransport::with_defaults(options()));
  if (!made.ok()) return 1;
  Echo echo(**made);
  const std::string address = (*made)->address();
  const uint64_t head[2] = {(*made)->self().value, address.size()};
  std::string hello(reinterpret_cast<const char*>(head), 16);
  hello += address;
  if (::write(3, hello.data(), hello.size()) != static_cast<ssize_t>(hello.size())) return 1;
  loop.run();
  return 0;
}

void loopback(int rounds) {
  auto hub = std::make_shared<LoopbackHub>();
  LoopThread thread;
  std::unique_ptr<LoopbackTransport> far;
  std::unique_ptr<Echo> echo;
  thread.loop().call([&] {
    far = std::make_unique<LoopbackTransport>(hub, thread.loop(), options());
    echo = std::make_unique<Echo>(*far);
  });
  LoopExecutor loop;
  {
    LoopbackTransport near(hub, loop, options());
    measure("loopback", loop, near, far->self(), far->address(), rounds);
  }
  thread.loop().call([&] {
    echo.reset();
    far.reset();
  });
}

int ucx(int rounds) {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) return 1;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fds[1], 3);
  char name[] = "/proc/self/exe", mode[] = "--echo";
  char* argv[] = {name, mode, nullptr};
  pid_t pid = -1;
  const int rc = posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(fds[1]);
  if (rc != 0) return 1;
  std::string got;
  char buffer[4096];
  uint64_t head[2] = {0, 0};
  for (ssize_t n; got.size() < 16 || got.size() < 16 + head[1];) {
    if ((n = ::read(fds[0], buffer, sizeof buffer)) <= 0) return 1;
    got.append(buffer, static_cast<size_t>(n));
    if (got.size() >= 16) std::memcpy(head, got.data(), 16);
  }
  {
    LoopExecutor loop;
    auto made = UcxTransport::create(loop, UcxTransport::with_defaults(options()));
    if (made.ok()) {
      measure("ucx", loop, **made, Incarnation(head[0]), got.substr(16, head[1]), rounds);
    } else {
      std::printf("ucx: %s\n", message_of(made.status()).c_str());
    }
  }
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  ::close(fds[0]);
  return 0;
}

}  // namespace
}  // namespace conclave

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--echo") == 0) return conclave::echo_process();
  const int rounds = argc > 1 ? std::max(10, std::atoi(argv[1])) : 500;
  conclave::loopback(rounds);
  return conclave::ucx(rounds);
}
