// The control plane over mutual TLS: who is let in, who is not, and why, and certificates that change.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>

#include "conclave/v1/cluster.grpc.pb.h"
#include "libs/base/address.h"
#include "libs/rpc/tls_credentials.h"
#include "libs/tls/identity.h"
#include "tests/rpc/cluster_fixture.h"
#include "tests/tls/certificates.h"

namespace conclave::scheduler {
namespace {

using ::testing::HasSubstr;
using tls::Refusal;
namespace pb = ::conclave::v1;

// Handshakes of this program that failed before there was a certificate to judge.
std::array<std::atomic<uint64_t>, tls::kRefusals> g_failed;

AcceptedRequest request(uint64_t id, uint32_t prompt, uint32_t max_tokens) {
  AcceptedRequest r = Harness::request(id, prompt, max_tokens, id * 17 + 1);
  r.id = RequestId{id, 99};
  return r;
}

class TlsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory = ::testing::TempDir() + "conclave_rpc_tls_" + std::to_string(getpid()) + "_" +
                ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::create_directories(directory);
  }
  void TearDown() override {
    host.reset();
    std::filesystem::remove_all(directory);
  }

  std::shared_ptr<tls::Identity> identity(const std::string& name, const std::string& authorities,
                                          const tls::Leaf& leaf, tls::Use use, tls::Options more = {}) {
    tls::Options options = tls::write_files(directory + "/" + name, authorities, leaf);
    options.server_name = more.server_name;
    options.client_names = more.client_names;
    options.reload_interval = kSecond;
    auto made = tls::Identity::load(options, use);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }
  // A scheduler that asks for certificates.
  void start(const tls::Options& more = {}, const tls::Wish& wish = {}) {
    server = identity("server", ca.pem(), ca.issue(wish), tls::Use::kServer, more);
    GrpcServerOptions options;
    options.tls = server;
    host = std::make_unique<SchedulerHost>(quick_options(), options);
    // After the host, which drops gRPC's lines.
    rpc::route_grpc_logs([](const char*, int, const char* line) {
      if (const auto refusal = rpc::failed_handshake(line)) ++g_failed[static_cast<size_t>(*refusal)];
    });
  }
  rpc::ClientOptions client(std::shared_ptr<tls::Identity> own) const {
    rpc::ClientOptions options = host->client();
    options.tls = std::move(own);
    return options;
  }
  std::shared_ptr<tls::Identity> member() {
    return identity("member", ca.pem(), ca.issue(), tls::Use::kClient);
  }
  // One call with credentials of gRPC's own, as a stranger would make it.
  grpc::Status ask(const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto stub =
        pb::Cluster::NewStub(grpc::CreateCustomChannel(host->client().target, credentials, own));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    pb::StatusReply reply;
    return stub->Status(&context, {}, &reply);
  }
  std::shared_ptr<grpc::ChannelCredentials> credentials(const tls::Leaf& leaf) const {
    return grpc::SslCredentials({ca.pem(), leaf.key, leaf.certificate});
  }
  uint64_t refused(Refusal reason) const {
    return server->figures().refused[static_cast<size_t>(reason)] + g_failed[static_cast<size_t>(reason)];
  }
  // The call fails, and the scheduler knows why.
  void expect_refused(const std::shared_ptr<grpc::ChannelCredentials>& stranger, Refusal reason) {
    const uint64_t before = refused(reason), streams = host->grpc->metrics().streams_opened;
    const grpc::Status status = ask(stranger);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE)
        << refusal_name(reason) << ": " << status.error_message();
    EXPECT_TRUE(eventually([&] { return refused(reason) > before; })) << refusal_name(reason);
    EXPECT_EQ(host->grpc->metrics().streams_opened, streams);
  }
  void serve(rpc::SchedulerClient& gateway, uint64_t first, uint64_t count) {
    ASSERT_TRUE(eventually([&] { return gateway.fleet().ready; })) << gateway.fleet().not_ready;
    std::vector<std::pair<AcceptedRequest, std::shared_ptr<Collector>>> all;
    for (uint64_t i = first; i < first + count; ++i) {
      all.push_back({request(i, static_cast<uint32_t>(1 + i % 40), 12), std::make_shared<Collector>()});
      gateway.submit(all.back().first, all.back().second);
    }
    for (auto& [r, seen] : all) {
      ASSERT_TRUE(seen->wait_end());
      EXPECT_EQ(seen->tokens, oracle_answer(r.prompt, r.sampling));
      EXPECT_EQ(seen->faults, 0);
    }
  }

  std::string directory;
  tls::Authority ca{"authority"};
  std::shared_ptr<tls::Identity> server;
  std::unique_ptr<SchedulerHost> host;
};

TEST_F(TlsTest, AFleetServesRequests) {
  start();
  const auto own = member();
  RemoteMember worker(client(own), Role::kAttention);
  RemoteMember shard(client(own), Role::kExpert);
  rpc::SchedulerClient gateway(client(own), "router", make_incarnation());
  serve(gateway, 1, 40);
  EXPECT_EQ(worker.breach(), "");
  for (const uint64_t count : server->figures().refused) EXPECT_EQ(count, 0u);
  for (const uint64_t count : own->figures().refused) EXPECT_EQ(count, 0u);
}

TEST_F(TlsTest, StrangersAreRefusedAndCountedByReason) {
  start();
  ASSERT_TRUE(ask(credentials(ca.issue())).ok()) << "who has a certificate is let in";
  expect_refused(grpc::InsecureChannelCredentials(), Refusal::kNotTls);
  expect_refused(grpc::SslCredentials({ca.pem(), "", ""}), Refusal::kNoCertificate);
  expect_refused(credentials(tls::Authority("another").issue()), Refusal::kUnknownCa);
  expect_refused(credentials(tls::Authority("authority").issue()), Refusal::kUnknownCa);
  tls::Wish wish;
  wish.ends_s = -1;
  expect_refused(credentials(ca.issue(wish)), Refusal::kExpired);
  wish = {};
  wish.begins_s = 3600;
  expect_refused(credentials(ca.issue(wish)), Refusal::kNotYetValid);
  wish = {};
  wish.usage = "serverAuth";
  expect_refused(credentials(ca.issue(wish)), Refusal::kBadCertificate);
  EXPECT_TRUE(ask(credentials(ca.issue())).ok());
}

TEST_F(TlsTest, OnlyClientsOfTheListAreLetIn) {
  tls::Options more;
  more.client_names = "conclave-member";
  start(more);
  expect_refused(credentials(ca.issue()), Refusal::kWrongName);
  tls::Wish wish;
  wish.dns = {"conclave-member"};
  EXPECT_TRUE(ask(credentials(ca.issue(wish))).ok());
}

TEST_F(TlsTest, ByteSoupIsCutOffAndCounted) {
  start();
  const auto address = parse_host_port(host->client().target);
  ASSERT_TRUE(address.ok());
  SplitMix64 random(7);
  const uint64_t before = refused(Refusal::kNotTls) + refused(Refusal::kOther);
  constexpr int kConnections = 20;
  for (int i = 0; i < kConnections; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(address->port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
    char bytes[4096];
    for (char& byte : bytes) byte = static_cast<char>(random.next());
    if (i % 2 == 0) {  // a TLS record that claims more than there is
      bytes[0] = 22;
      bytes[1] = 3;
      bytes[2] = 1;
    }
    ASSERT_EQ(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof bytes));
    // Until the server closes; where it waits for the rest of a record, it sees that none comes.
    shutdown(fd, SHUT_WR);
    while (read(fd, bytes, sizeof bytes) > 0) {
    }
    close(fd);
  }
  EXPECT_TRUE(eventually([&] { return refused(Refusal::kNotTls) + refused(Refusal::kOther) > before; }));
  EXPECT_TRUE(ask(credentials(ca.issue())).ok());
}

TEST_F(TlsTest, AMemberRefusesASchedulerThatIsNotItsOwn) {
  start();
  const auto expect_not_joined = [&](const std::shared_ptr<tls::Identity>& own, Refusal reason) {
    RemoteMember stranger(client(own), Role::kAttention);
    EXPECT_TRUE(eventually([&] {
      return own->figures().refused[static_cast<size_t>(reason)] > 0 &&
             stranger.client->not_joined().find("no connection to the scheduler") != std::string::npos;
    })) << refusal_name(reason);
    EXPECT_EQ(stranger.watch.read(stranger.welcomes), 0);
  };
  tls::Options more;
  more.server_name = "another-scheduler";
  expect_not_joined(identity("a", ca.pem(), ca.issue(), tls::Use::kClient, more), Refusal::kWrongName);
  const tls::Authority other("another");
  expect_not_joined(identity("b", other.pem(), other.issue(), tls::Use::kClient), Refusal::kUnknownCa);
  // By the name in the certificate, not by the address.
  more.server_name = "localhost";
  RemoteMember friendly(client(identity("c", ca.pem(), ca.issue(), tls::Use::kClient, more)),
                        Role::kAttention);
  EXPECT_TRUE(friendly.wait_joined());
}

TEST_F(TlsTest, AMemberDoesNotSpeakInClear) {
  start();
  SchedulerHost plain;
  const uint64_t before = g_failed[static_cast<size_t>(Refusal::kNotTls)];
  rpc::ClientOptions options = plain.client();
  options.tls = member();
  RemoteMember worker(options, Role::kAttention);
  EXPECT_TRUE(eventually([&] { return g_failed[static_cast<size_t>(Refusal::kNotTls)] > before; }));
  EXPECT_EQ(worker.watch.read(worker.welcomes), 0);
  EXPECT_EQ(plain.grpc->metrics().streams_opened, 0u);
}

// A file written in place is empty for a moment: gRPC, which ends the process over that, must not see it.
TEST_F(TlsTest, FilesThatAreEmptyOrTornChangeNothingUntilTheyAreWhole) {
  start();
  const auto own = member();
  rpc::SchedulerClient gateway(client(own), "router", make_incarnation());
  RemoteMember worker(client(own), Role::kAttention, kMillisecond);
  RemoteMember shard(client(own), Role::kExpert);
  serve(gateway, 1, 4);
  const auto write = [&](const std::string& of, const std::string& text) {
    for (const auto& entry : std::filesystem::directory_iterator(directory + "/" + of))
      std::ofstream(entry.path(), std::ios::trunc) << text;
  };
  for (const char* text : {"", "-----BEGIN CERTIFICATE-----\nMIIB"}) {
    const uint64_t faults = server->figures().failed_reloads, own_faults = own->figures().failed_reloads;
    write("server", text);
    write("member", text);
    ASSERT_TRUE(eventually([&] {
      return server->figures().failed_reloads > faults && own->figures().failed_reloads > own_faults;
    }));
    // gRPC has looked too by the time that it would have taken a new set.
    RemoteMember late(client(own), Role::kExpert);
    EXPECT_TRUE(late.wait_joined()) << "the set before serves on: " << late.client->not_joined();
  }
  const uint64_t taken = server->figures().reloads;
  tls::write_files(directory + "/server", ca.pem(), ca.issue());
  tls::write_files(directory + "/member", ca.pem(), ca.issue());
  EXPECT_TRUE(eventually([&] { return server->figures().reloads > taken; }));
  RemoteMember late(client(own), Role::kExpert);
  EXPECT_TRUE(late.wait_joined()) << late.client->not_joined();
  serve(gateway, 100, 4);
}

TEST_F(TlsTest, CertificatesAndAuthorityChangeUnderTraffic) {
  const tls::Authority next("next authority");
  start();
  const auto own = member();
  RemoteMember worker(client(own), Role::kAttention, kMillisecond);
  RemoteMember shard(client(own), Role::kExpert);
  rpc::SchedulerClient gateway(client(own), "router", make_incarnation());
  serve(gateway, 1, 10);
  const auto long_one = std::make_shared<Collector>();
  gateway.submit(request(1000, 5, 3000), long_one);
  ASSERT_TRUE(long_one->wait_tokens(1));

  // A stranger of the next authority, who also checks the server by it alone: served once both have changed.
  const tls::Leaf leaf = next.issue();
  const auto of_next = grpc::SslCredentials({next.pem(), leaf.key, leaf.certificate});
  ASSERT_FALSE(ask(of_next).ok());
  // First both authorities are believed, then certificates of the next one are shown.
  tls::write_files(directory + "/member", ca.pem() + next.pem(), ca.issue());
  tls::write_files(directory + "/server", ca.pem() + next.pem(), ca.issue());
  ASSERT_TRUE(eventually([&] {
    return ask(grpc::SslCredentials({ca.pem(), leaf.key, leaf.certificate})).ok();
  }));
  ASSERT_TRUE(eventually([&] { return own->figures().reloads == 1; }));
  tls::write_files(directory + "/server", ca.pem() + next.pem(), next.issue());
  tls::write_files(directory + "/member", ca.pem() + next.pem(), next.issue());
  ASSERT_TRUE(eventually([&] { return ask(of_next).ok(); }));

  // Connections that were up have noticed nothing, and new ones are made.
  serve(gateway, 100, 10);
  EXPECT_EQ(gateway.metrics().connections, 1u);
  EXPECT_EQ(worker.watch.read(worker.downs), 0);
  RemoteMember late(client(own), Role::kExpert);
  EXPECT_TRUE(late.wait_joined()) << late.client->not_joined();
  gateway.cancel(request(1000, 5, 3000).id);
  ASSERT_TRUE(long_one->wait_end());
  EXPECT_EQ(long_one->faults, 0);
}

}  // namespace
}  // namespace conclave::scheduler
