#include "tests/transport/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "libs/base/check.h"
#include "libs/base/random.h"
#include "libs/runtime/loop_executor.h"
#include "libs/transport/ucx_transport.h"
#include "tests/transport/transport_rig.h"

extern char** environ;

namespace conclave::testing {

TransportOptions process_options(Incarnation self) {
  TransportOptions o;
  o.self = self;
  o.secret = "secret of the process tests";
  o.fleet = "process tests";
  return UcxTransport::with_defaults(o);
}

PeerProcess PeerProcess::start() {
  int fds[2];
  CONCLAVE_CHECK(::pipe2(fds, O_CLOEXEC) == 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fds[1], 3);
  char name[] = "/proc/self/exe", mode[] = "--peer";
  char* argv[] = {name, mode, nullptr};
  PeerProcess p;
  CONCLAVE_CHECK(posix_spawn(&p.pid, "/proc/self/exe", &actions, nullptr, argv, environ) == 0);
  posix_spawn_file_actions_destroy(&actions);
  ::close(fds[1]);
  p.out = fds[0];
  return p;
}

bool PeerProcess::learn() {
  std::string got;
  for (;;) {
    pollfd fd{out, POLLIN, 0};
    if (::poll(&fd, 1, 10'000) <= 0) return false;
    char buffer[4096];
    const ssize_t n = ::read(out, buffer, sizeof buffer);
    if (n <= 0) return false;
    got.append(buffer, static_cast<size_t>(n));
    // Incarnation, length, address.
    if (got.size() < 16) continue;
    uint64_t head[2];
    std::memcpy(head, got.data(), 16);
    if (got.size() < 16 + head[1]) continue;
    id = Incarnation(head[0]);
    address = got.substr(16, head[1]);
    return true;
  }
}

void PeerProcess::kill(int signal) { ::kill(pid, signal); }

void PeerProcess::reap() {
  if (pid <= 0) return;
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  ::close(out);
  pid = -1;
}

int run_peer() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() == 1) return 1;
  LoopExecutor loop;
  auto made = UcxTransport::create(loop, process_options(make_incarnation()));
  if (!made.ok()) {
    std::fprintf(stderr, "peer: %s\n", message_of(made.status()).c_str());
    return 1;
  }
  UcxTransport& transport = **made;
  std::vector<TransportEvent> events;
  std::vector<std::pair<Incarnation, CombineBatch>> waiting;  // for room; bounded by the dispatches in flight
  const auto flush = [&] {
    std::erase_if(waiting, [&](auto& w) {
      return transport.reply(w.first, w.second).code() != StatusCode::kResourceExhausted;
    });
  };
  transport.set_ready([&] {
    events.clear();
    transport.poll(events);
    for (auto& e : events) {
      if (auto* d = std::get_if<TransportEvent::Dispatch>(&e.what)) {
        CombineBatch c;
        c.id = d->batch.id;
        c.shard = transport.self();
        c.layer = d->batch.layer;
        c.hidden = d->batch.hidden;
        c.dtype = d->batch.dtype;
        for (uint32_t i = 0; i < d->batch.row_count(); ++i) c.items.push_back(i);
        c.outputs = d->batch.rows;  // one output row a row: an echo
        waiting.emplace_back(e.peer, std::move(c));
      }
    }
    flush();
  });
  const std::string address = transport.address();
  const uint64_t head[2] = {transport.self().value, address.size()};
  std::string hello(reinterpret_cast<const char*>(head), 16);
  hello += address;
  if (::write(3, hello.data(), hello.size()) != static_cast<ssize_t>(hello.size())) return 1;
  loop.run();
  return 1;
}

}  // namespace conclave::testing
