// What mutual TLS costs on the control plane: a new connection, and plans going round between a real
// scheduler and a worker that answers at once, both over loopback in this process.
//
//   control_bench [rounds]        prints medians of so many alternating rounds, in clear and over TLS
//
// Elapsed time means something on an idle machine only; processor time, of both ends together, anywhere.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <vector>

#include "conclave/v1/cluster.grpc.pb.h"
#include "libs/tls/identity.h"
#include "tests/rpc/cluster_fixture.h"
#include "tests/tls/certificates.h"

namespace conclave::scheduler {
namespace {

constexpr int kConnections = 50;  // of one round
constexpr uint32_t kTokens = 2000;

[[noreturn]] void give_up(const std::string& why) {
  std::fprintf(stderr, "control_bench: %s\n", why.c_str());
  std::exit(1);
}

struct Cost {
  double elapsed_us = 0;
  double cpu_us = 0;
};

Nanos process_cpu() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

// What `work` takes for each of `count`.
Cost cost_of(double count, const std::function<void()>& work) {
  const TimePoint begin = steady_now();
  const Nanos cpu = process_cpu();
  work();
  return {static_cast<double>(steady_now() - begin) * 1e-3 / count,
          static_cast<double>(process_cpu() - cpu) * 1e-3 / count};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Side {
  explicit Side(std::shared_ptr<tls::Identity> server, std::shared_ptr<tls::Identity> client) {
    GrpcServerOptions options;
    options.tls = std::move(server);
    SchedulerOptions patient = quick_options();
    patient.dead_after_ms = patient.dead_after_trouble_ms = 600'000;  // however busy the machine is
    host = std::make_unique<SchedulerHost>(patient, options);
    connect = host->client();
    connect.tls = std::move(client);
    worker = std::make_unique<RemoteMember>(connect, Role::kAttention);
    shard = std::make_unique<RemoteMember>(connect, Role::kExpert);
    gateway = std::make_unique<rpc::SchedulerClient>(connect, "router", make_incarnation());
    if (!eventually([this] { return gateway->fleet().ready; })) give_up(gateway->fleet().not_ready);
  }

  // From nothing to the first answer of a new connection.
  Cost connection() {
    return cost_of(kConnections, [this] {
      for (int i = 0; i < kConnections; ++i) {
        const auto stub = v1::Cluster::NewStub(rpc::make_channel(connect));
        grpc::ClientContext context;
        v1::StatusReply reply;
        const grpc::Status status = stub->Status(&context, {}, &reply);
        if (!status.ok()) give_up("a connection failed: " + status.error_message());
      }
    });
  }

  // One token of each of `streams` sequences that run together: the plan goes to the worker, its result back,
  // and the tokens to the router.
  Cost tokens(uint64_t streams) {
    const uint32_t tokens = kTokens / static_cast<uint32_t>(streams);
    return cost_of(tokens, [this, streams, tokens] {
      std::vector<std::shared_ptr<Collector>> all;
      for (uint64_t i = 0; i < streams; ++i) {
        ++next_;
        AcceptedRequest request = Harness::request(next_, 8, tokens, next_);
        request.id = RequestId{next_, 7};
        all.push_back(std::make_shared<Collector>());
        gateway->submit(std::move(request), all.back());
      }
      for (auto& one : all) {
        if (!one->wait_end()) {
          give_up("a request does not end: " + std::to_string(one->watch.read(one->tokens).size()) + " of " +
                  std::to_string(tokens) + " tokens, " + (connect.tls == nullptr ? "in clear" : "over TLS") +
                  "; fleet: " + gateway->fleet().not_ready + "; worker: " + worker->client->not_joined() +
                  "; it went down: " + message_of(worker->watch.read(worker->down_cause)) +
                  "; breach: " + worker->breach());
        }
        if (one->tokens.size() != tokens)
          give_up("a request ended early: " + message_of(one->refused) + one->error);
      }
    });
  }

  std::unique_ptr<SchedulerHost> host;
  rpc::ClientOptions connect;
  std::unique_ptr<RemoteMember> worker, shard;
  std::unique_ptr<rpc::SchedulerClient> gateway;
  uint64_t next_ = 0;
};

int run(int rounds) {
  const std::string directory =
      (std::filesystem::temp_directory_path() / ("control_bench_" + std::to_string(getpid()))).string();
  const tls::Authority ca("authority");
  const tls::Options files = tls::write_files(directory, ca.pem(), ca.issue());
  const auto identity = [&](tls::Use use) { return tls::Identity::load(files, use).value(); };
  Side clear(nullptr, nullptr), secure(identity(tls::Use::kServer), identity(tls::Use::kClient));
  struct Row {
    const char* what;
    std::function<Cost(Side&)> measure;
    std::vector<double> elapsed[2], cpu[2];  // in clear, over TLS
  };
  std::vector<Row> rows;
  rows.push_back({"new connection, first answer", [](Side& side) { return side.connection(); }, {}, {}});
  rows.push_back({"a step of 1 stream", [](Side& side) { return side.tokens(1); }, {}, {}});
  rows.push_back({"a step of 16 streams", [](Side& side) { return side.tokens(16); }, {}, {}});
  rows.push_back({"a step of 64 streams", [](Side& side) { return side.tokens(64); }, {}, {}});
  for (int round = 0; round < rounds; ++round) {
    for (Row& row : rows) {
      for (int i : {0, 1}) {
        const Cost cost = row.measure(i == 0 ? clear : secure);
        row.elapsed[i].push_back(cost.elapsed_us);
        row.cpu[i].push_back(cost.cpu_us);
      }
    }
  }
  std::printf("%-30s %10s %10s %8s %10s %10s %8s\n", "", "CPU us", "with TLS", "ratio", "elapsed us",
              "with TLS", "ratio");
  for (const Row& row : rows) {
    const double cpu[] = {median(row.cpu[0]), median(row.cpu[1])};
    const double elapsed[] = {median(row.elapsed[0]), median(row.elapsed[1])};
    std::printf("%-30s %10.1f %10.1f %8.3f %10.1f %10.1f %8.3f\n", row.what, cpu[0], cpu[1], cpu[1] / cpu[0],
                elapsed[0], elapsed[1], elapsed[1] / elapsed[0]);
  }
  std::filesystem::remove_all(directory);
  std::filesystem::remove_all(directory + ".1");
  return 0;
}

}  // namespace
}  // namespace conclave::scheduler

int main(int argc, char** argv) {
  return conclave::scheduler::run(argc > 1 ? std::max(1, std::atoi(argv[1])) : 9);
}
