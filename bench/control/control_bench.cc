// What mutual TLS costs on the control plane: a new connection, and plans going round between a real
// scheduler and a worker that answers at once, both over loopback in this process.
//
//   control_bench [rounds]        prints medians of so many alternating rounds, in clear and over TLS
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Side {
  explicit Side(std::shared_ptr<tls::Identity> server, std::shared_ptr<tls::Identity> client) {
    GrpcServerOptions options;
    options.tls = std::move(server);
    host = std::make_unique<SchedulerHost>(quick_options(), options);
    connect = host->client();
    connect.tls = std::move(client);
    worker = std::make_unique<RemoteMember>(connect, Role::kAttention);
    shard = std::make_unique<RemoteMember>(connect, Role::kExpert);
    gateway = std::make_unique<rpc::SchedulerClient>(connect, "router", make_incarnation());
    if (!eventually([this] { return gateway->fleet().ready; })) std::abort();
  }

  // Microseconds from nothing to the first answer of a new connection.
  double connection() {
    const TimePoint begin = steady_now();
    for (int i = 0; i < kConnections; ++i) {
      const auto stub = v1::Cluster::NewStub(rpc::make_channel(connect));
      grpc::ClientContext context;
      v1::StatusReply reply;
      if (!stub->Status(&context, {}, &reply).ok()) std::abort();
    }
    return static_cast<double>(steady_now() - begin) * 1e-3 / kConnections;
  }

  // Microseconds a token of one of `streams` sequences that run together: each plan goes to the worker and
  // its result, and each token to the router.
  double tokens(uint64_t streams) {
    std::vector<std::shared_ptr<Collector>> all;
    const TimePoint begin = steady_now();
    const uint32_t tokens = kTokens / static_cast<uint32_t>(streams);
    for (uint64_t i = 0; i < streams; ++i) {
      ++next_;
      AcceptedRequest request = Harness::request(next_, 8, tokens, next_);
      request.id = RequestId{next_, 7};
      all.push_back(std::make_shared<Collector>());
      gateway->submit(std::move(request), all.back());
    }
    for (auto& one : all)
      if (!one->wait_end() || one->tokens.size() != tokens) std::abort();
    return static_cast<double>(steady_now() - begin) * 1e-3 / tokens;
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
    std::function<double(Side&)> measure;
    std::vector<double> clear, secure;
  };
  std::vector<Row> rows;
  rows.push_back({"new connection and first answer", [](Side& side) { return side.connection(); }, {}, {}});
  rows.push_back({"one token, 1 stream", [](Side& side) { return side.tokens(1); }, {}, {}});
  rows.push_back({"one step, 16 streams", [](Side& side) { return side.tokens(16); }, {}, {}});
  rows.push_back({"one step, 64 streams", [](Side& side) { return side.tokens(64); }, {}, {}});
  for (int round = 0; round < rounds; ++round) {
    for (Row& row : rows) {
      row.clear.push_back(row.measure(clear));
      row.secure.push_back(row.measure(secure));
    }
  }
  std::printf("%-34s %12s %12s %8s\n", "", "clear, us", "TLS, us", "ratio");
  for (const Row& row : rows) {
    const double a = median(row.clear), b = median(row.secure);
    std::printf("%-34s %12.1f %12.1f %8.3f\n", row.what, a, b, b / a);
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
