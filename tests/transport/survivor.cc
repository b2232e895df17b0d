#include "tests/transport/survivor.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>

#include "libs/base/random.h"
#include "libs/runtime/loop_executor.h"
#include "libs/transport/ucx_transport.h"
#include "tests/transport/peer_process.h"
#include "tests/transport/transport_rig.h"

namespace conclave::testing {
namespace {

constexpr size_t kStartedAhead = 3;  // peers starting while others are being killed

class Survivor {
 public:
  explicit Survivor(uint64_t seed) : random_(seed) {}

  bool start() {
    auto made = UcxTransport::create(loop_, process_options(make_incarnation()));
    if (!made.ok()) {
      std::fprintf(stderr, "survivor: %s\n", message_of(made.status()).c_str());
      return false;
    }
    transport_ = std::move(*made);
    small_ = make_dispatch(transport_->self(), 0, 1, 3072, 1);
    large_ = make_dispatch(transport_->self(), 0, 16, 3072, 1);
    transport_->set_ready([this] { on_ready(); });
    return true;
  }
  void stop() {
    for (auto& p : ahead_) p.reap();
    ahead_.clear();
  }

  // One peer's life; false when something went otherwise than it must.
  bool round(bool traffic, int number) {
    while (ahead_.size() < kStartedAhead) ahead_.push_back(PeerProcess::start());
    PeerProcess peer = ahead_.front();
    ahead_.pop_front();
    if (!peer.learn()) return complain("the peer did not start", peer);
    up_ = down_ = false;
    combines_ = 0;
    peer_ = peer.id;
    transport_->connect(peer.id, peer.address);
    if (traffic) {
      if (!loop_.run_until([&] { return up_ || down_; }, 5 * kSecond) || !up_) {
        return complain("no connection", peer);
      }
      for (int i = 0; i < 8; ++i) submit();
      const int enough = 2 + static_cast<int>(random_.below(20));
      if (!loop_.run_until([&] { return combines_ >= enough || down_; }, 5 * kSecond) || down_) {
        return complain("no traffic", peer);
      }
    } else {
      const Nanos wait = static_cast<Nanos>(random_.below(4 * kMillisecond));
      loop_.run_until([] { return false; }, wait);
    }
    const TimePoint killed = steady_now();
    peer.kill(SIGKILL);
    // During connect, the deadline (2 s) is the last resort.
    if (!loop_.run_until([&] { return down_; }, 4 * kSecond)) return complain("no PeerDown", peer);
    const Nanos took = steady_now() - killed;
    if (transport_->is_up(peer.id)) return complain("still up", peer);
    peer.reap();
    std::printf("round %d down_us %lld\n", number, static_cast<long long>(took / kMicrosecond));
    std::fflush(stdout);
    return true;
  }

  bool settled() {
    return loop_.run_until(
        [&] { return transport_->closing_links() == 0 && transport_->pending_sends() == 0; }, 3 * kSecond);
  }

 private:
  bool complain(const char* what, PeerProcess& peer) {
    std::fprintf(stderr, "survivor: %s\n", what);
    peer.reap();
    return false;
  }
  void submit() {
    DispatchBatch& batch = random_.chance(0.5) ? small_ : large_;
    batch.id.seq = ++seq_;
    (void)transport_->submit(peer_, batch);
  }
  void on_ready() {
    events_.clear();
    transport_->poll(events_);
    for (auto& e : events_) {
      if (e.peer != peer_) continue;
      if (std::holds_alternative<TransportEvent::PeerUp>(e.what)) up_ = true;
      if (std::holds_alternative<TransportEvent::PeerDown>(e.what)) down_ = true;
      if (std::holds_alternative<TransportEvent::Combine>(e.what)) {
        ++combines_;
        submit();
      }
    }
  }

  SplitMix64 random_;
  LoopExecutor loop_;
  std::unique_ptr<UcxTransport> transport_;
  DispatchBatch small_, large_;
  std::deque<PeerProcess> ahead_;
  std::vector<TransportEvent> events_;
  Incarnation peer_;
  uint64_t seq_ = 0;
  bool up_ = false, down_ = false;
  int combines_ = 0;
};

long anonymous_kb() {
  long kb = -1;
  char line[256];
  if (FILE* f = std::fopen("/proc/self/status", "r")) {
    while (std::fgets(line, sizeof line, f)) std::sscanf(line, "RssAnon: %ld", &kb);
    std::fclose(f);
  }
  return kb;
}

}  // namespace

int run_survivor(int argc, char** argv) {
  if (argc < 5) return 2;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const bool traffic = std::string(argv[2]) == "traffic";
  const int rounds = std::atoi(argv[3]);
  Survivor survivor(std::strtoull(argv[4], nullptr, 10));
  if (!survivor.start()) return 1;
  bool good = true;
  for (int i = 1; i <= rounds && good; ++i) {
    good = survivor.round(traffic, i);
    if (i == 20 || i == rounds) std::printf("memory_kb %ld\n", anonymous_kb());
  }
  if (good && !survivor.settled()) {
    std::fprintf(stderr, "survivor: links or sends never completed\n");
    good = false;
  }
  survivor.stop();
  std::fflush(stdout);
  return good ? 0 : 1;
}

}  // namespace conclave::testing
