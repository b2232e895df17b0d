// A cluster of processes with mutual TLS and a secret: it serves as any other, and strangers get nowhere.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <ctime>
#include <fstream>

#include "conclave/v1/cluster.grpc.pb.h"
#include "libs/tls/identity.h"
#include "tests/cluster/cluster.h"
#include "tests/cluster/completions.h"
#include "tests/tls/certificates.h"

namespace conclave {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

constexpr char kSecret[] = "the secret of this cluster";
constexpr char kNextSecret[] = "the secret of tomorrow";
constexpr char kReadAgain[] = "the cluster's secret was read again";

std::string path_of(const std::string& name) {
  return ClusterEnvironment::directory() + "/" +
         ::testing::UnitTest::GetInstance()->current_test_info()->name() + "-" + name;
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new", std::ios::trunc) << text;
  std::filesystem::rename(path + ".new", path);
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

std::vector<std::string> flags_of(const tls::Options& files) {
  return {"--set", "tls.ca_file=" + files.ca_file,  "--set", "tls.cert_file=" + files.cert_file,
          "--set", "tls.key_file=" + files.key_file};
}

class SecurityTest : public ::testing::Test {
 protected:
  ClusterShape shape() {
    files = tls::write_files(path_of("tls"), ca.pem(), ca.issue());
    write(path_of("worker-secret"), std::string(kSecret) + "\n");
    write(path_of("shard-secret"), std::string(kSecret) + "\n");
    ClusterShape out;
    out.arguments = flags_of(files);
    out.worker_arguments.insert(out.worker_arguments.end(),
                                {"--set", "transport.secret_file=" + path_of("worker-secret")});
    out.shard_arguments = {"--set", "transport.secret_file=" + path_of("shard-secret")};
    auto identity = tls::Identity::load(files, tls::Use::kClient);
    EXPECT_TRUE(identity.ok()) << identity.status();
    if (identity.ok()) out.tls = *std::move(identity);
    return out;
  }
  static std::string tls_metric(tls::Refusal reason) {
    return "conclave_tls_refused_handshakes_total{reason=\"" + std::string(refusal_name(reason)) + "\"}";
  }
  static std::string command(const std::vector<std::string>& arguments, int code,
                             std::vector<std::string> environment = {}) {
    static int count = 0;
    Surroundings where;
    where.environment = std::move(environment);
    Process process =
        Process::start("conclave", arguments, path_of("command" + std::to_string(++count) + ".log"), where);
    EXPECT_EQ(process.wait(60 * kSecond).value_or(-1), code) << process.log();
    return process.log();
  }

  tls::Authority ca{"authority of the cluster"};
  tls::Options files;
};

constexpr char kJoinedMetric[] = "conclave_scheduler_joined_members_total";
constexpr char kRefusedMetric[] = "conclave_scheduler_refused_members_total";
constexpr char kSecretMetric[] = "conclave_transport_refused_hellos_total{reason=\"secret\"}";

TEST_F(SecurityTest, AnswersAreThoseOfAClusterInClear) {
  ProcessCluster cluster(shape());
  ASSERT_TRUE(cluster.wait_ready());
  Streams(cluster, 8, 24).check(cluster);
  cluster.start_router();
  ASSERT_TRUE(cluster.wait_router_ready());
  const std::string over_http = complete(cluster.http_address(), 3, 24, true);
  EXPECT_THAT(over_http, Not(HasSubstr("failed")));
  EXPECT_EQ(complete(cluster.http_address(), 3, 24, false), over_http);
  for (const char* process : {"scheduler", "worker", "shard0", "shard1", "router"}) {
    for (size_t i = 0; i < tls::kRefusals; ++i)
      EXPECT_EQ(cluster.metric(process, tls_metric(static_cast<tls::Refusal>(i))), 0) << process;
    EXPECT_GT(cluster.metric(process, "conclave_tls_certificate_expiry_seconds"), std::time(nullptr))
        << process;
  }
  for (const char* process : {"worker", "shard0", "shard1"})
    EXPECT_EQ(cluster.metric(process, kSecretMetric), 0) << process;

  // The command line, by flags and by the environment; and without either.
  const std::string scheduler = cluster.scheduler_address();
  EXPECT_THAT(command({"status", "--scheduler", scheduler, "--tls-ca", files.ca_file, "--tls-cert",
                       files.cert_file, "--tls-key", files.key_file},
                      0),
              HasSubstr("shard1"));
  const std::vector<std::string> environment = {
      "CONCLAVE_SCHEDULER_ADDRESS=" + scheduler, "CONCLAVE_TLS_CA_FILE=" + files.ca_file,
      "CONCLAVE_TLS_CERT_FILE=" + files.cert_file, "CONCLAVE_TLS_KEY_FILE=" + files.key_file};
  EXPECT_THAT(command({"shards"}, 0, environment), HasSubstr("shard1"));
  EXPECT_THAT(command({"status", "--scheduler", scheduler}, 1), HasSubstr("where it asks for certificates"));
  EXPECT_THAT(command({"status", "--scheduler", scheduler, "--tls-ca", files.ca_file}, 2),
              HasSubstr("--tls-cert: is not given"));
  EXPECT_THAT(command({"status", "--scheduler", scheduler, "--tls-ca", files.ca_file, "--tls-cert",
                       files.cert_file, "--tls-key", files.ca_file},
                      2),
              HasSubstr("tls.key_file"));
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST_F(SecurityTest, StrangersAreRefusedLoggedAndCounted) {
  ProcessCluster cluster(shape());
  ASSERT_TRUE(cluster.wait_ready());
  const auto ask = [&](const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    const auto stub = v1::Cluster::NewStub(grpc::CreateChannel(cluster.scheduler_address(), credentials));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    v1::StatusReply reply;
    return stub->Status(&context, {}, &reply);
  };
  const auto shown = [&](const tls::Leaf& leaf) {
    return grpc::SslCredentials({ca.pem(), leaf.key, leaf.certificate});
  };
  ASSERT_TRUE(ask(shown(ca.issue())).ok());
  tls::Wish expired;
  expired.ends_s = -1;
  const std::pair<tls::Refusal, std::shared_ptr<grpc::ChannelCredentials>> strangers[] = {
      {tls::Refusal::kNotTls, grpc::InsecureChannelCredentials()},
      {tls::Refusal::kNoCertificate, grpc::SslCredentials({ca.pem(), "", ""})},
      {tls::Refusal::kUnknownCa, shown(tls::Authority("another").issue())},
      {tls::Refusal::kExpired, shown(ca.issue(expired))},
  };
  for (const auto& [reason, credentials] : strangers) {
    const std::string name(refusal_name(reason));
    EXPECT_EQ(ask(credentials).error_code(), grpc::StatusCode::UNAVAILABLE) << name;
    EXPECT_TRUE(eventually([&] { return cluster.metric("scheduler", tls_metric(reason)) >= 1; })) << name;
    EXPECT_THAT(cluster.scheduler.log(),
                AllOf(HasSubstr("a TLS connection was refused"), HasSubstr("\"reason\":\"" + name + "\"")));
  }
  EXPECT_THAT(cluster.scheduler.log(), HasSubstr("CN=node (issued by CN=another)"));
  // However often they come, the log does not grow with them.
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(ask(grpc::InsecureChannelCredentials()).ok());
  EXPECT_LE(count_of(cluster.scheduler.log(), "\"reason\":\"not_tls\""), 5u);

  // A worker of another authority, which believes ours: it does not become a part of the fleet, and says so.
  const tls::Authority other("another");
  const auto flags = flags_of(tls::write_files(path_of("other"), ca.pem() + other.pem(), other.issue()));
  ClusterShape more = cluster.shape();
  std::vector<std::string> arguments = {
      "--model",      ClusterEnvironment::model(), "--name",       "stranger",
      "--scheduler",  cluster.scheduler_address(), "--ops-listen", "127.0.0.1:0",
      "--ready-file", path_of("stranger.ready")};
  arguments.insert(arguments.end(), more.worker_arguments.begin(), more.worker_arguments.end());
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  Process stranger = Process::start("conclave-attention", arguments, path_of("stranger.log"));
  std::map<std::string, std::string> ready;
  ASSERT_TRUE(eventually([&] { return !(ready = read_ready_file(path_of("stranger.ready"))).empty(); }));
  EXPECT_TRUE(eventually([&] {
    const auto answer = http_get(ready["ops"], "/readyz");
    return answer.ok() && answer->code == 503 &&
           answer->body.find("no connection to the scheduler") != std::string::npos;
  })) << stranger.log();
  EXPECT_EQ(cluster.metric("scheduler", "conclave_scheduler_workers"), 1);
  Streams(cluster, 4, 16).check(cluster);
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST_F(SecurityTest, AWorkerWithoutTheSecretIsRefusedUntilItLearnsIt) {
  ClusterShape with = shape();
  write(path_of("worker-secret"), "not the secret of this cluster");
  ProcessCluster cluster(with);
  for (const char* shard : {"shard0", "shard1"})
    ASSERT_TRUE(eventually([&] { return cluster.metric(shard, kSecretMetric) >= 1; })) << shard;
  EXPECT_THAT(cluster.shards[0].log(), AllOf(HasSubstr("a peer of the data plane was refused"),
                                             HasSubstr("does not prove the cluster's secret")));
  EXPECT_EQ(cluster.metric("worker", "conclave_attention_connected_shards"), 0);
  for (const Process* process : {&cluster.worker, &cluster.shards[0], &cluster.shards[1]})
    EXPECT_THAT(process->log(), Not(AnyOf(HasSubstr(kSecret), HasSubstr("not the secret of")))) << "a log";

  // A file with a fault changes nothing.
  write(path_of("worker-secret"), "short");
  cluster.worker.signal(SIGHUP);
  ASSERT_TRUE(eventually([&] { return count_of(cluster.worker.log(), "was not read again") >= 1; }))
      << cluster.worker.log();
  write(path_of("worker-secret"), kSecret);
  cluster.worker.signal(SIGHUP);
  ASSERT_TRUE(cluster.wait_ready());
  Streams(cluster, 4, 16).check(cluster);
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

// It is refused before it is given an expert, so no stream waits for it; and it is let in once it knows the secret.
TEST_F(SecurityTest, AShardWithAnotherSecretDoesNotBecomeAMember) {
  ProcessCluster cluster(shape());
  ASSERT_TRUE(cluster.wait_ready());
  const double joined = cluster.metric("scheduler", kJoinedMetric);
  EXPECT_EQ(joined, 3);
  Streams streams(cluster, 6, 200);
  streams.wait_tokens(4);
  write(path_of("stranger-secret"), "not the secret of this cluster");
  std::vector<std::string> arguments = flags_of(files);
  arguments.insert(arguments.end(), {"--model", ClusterEnvironment::model(), "--name", "stranger", "--scheduler",
                                     cluster.scheduler_address(), "--ops-listen", "127.0.0.1:0", "--set",
                                     "transport.secret_file=" + path_of("stranger-secret")});
  Process stranger = Process::start("conclave-expert", arguments, path_of("stranger.log"));
  ASSERT_TRUE(eventually([&] { return cluster.metric("scheduler", kRefusedMetric) >= 2; })) << stranger.log();
  EXPECT_THAT(stranger.log(), AllOf(HasSubstr("not a part of the fleet"), HasSubstr("transport.secret_file")));
  streams.check(cluster);
  EXPECT_EQ(cluster.metric("scheduler", "conclave_scheduler_shards"), 2);
  EXPECT_EQ(cluster.metric("scheduler", kJoinedMetric), joined);
  EXPECT_EQ(cluster.metric("worker", kSecretMetric), 0) << "nobody was sent to it";

  write(path_of("stranger-secret"), kSecret);
  stranger.signal(SIGHUP);
  ASSERT_TRUE(eventually([&] { return cluster.metric("scheduler", "conclave_scheduler_shards") == 3; }))
      << stranger.log();
  Streams(cluster, 4, 16).check(cluster);
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST_F(SecurityTest, TheSecretIsChangedUnderTraffic) {
  ProcessCluster cluster(shape());
  ASSERT_TRUE(cluster.wait_ready());
  ASSERT_TRUE(
      eventually([&] { return cluster.metric("scheduler", "conclave_scheduler_short_experts") == 0; }));
  Streams streams(cluster, 6, 600);
  streams.wait_tokens(4);
  // Shards first, then the worker; a shard starts anew after each, so that others meet it as they are.
  size_t restarted = 0;
  const auto renew = [&] {
    const size_t shard = restarted++ % 2;
    cluster.shards[shard].kill();
    cluster.start_shard(shard);
    const std::string name = "shard" + std::to_string(shard);
    ASSERT_TRUE(eventually([&] {
      return cluster.metric("worker", "conclave_attention_connected_shards") == 2 &&
             cluster.metric("scheduler", "conclave_scheduler_shards") == 2 &&
             cluster.metric("scheduler", "conclave_scheduler_short_experts") == 0 &&
             cluster.metric(name, "conclave_transport_peers") == 1;
    })) << cluster.shards[shard].log();
  };
  const auto take = [&](Process& process, size_t times) {
    process.signal(SIGHUP);
    ASSERT_TRUE(eventually([&] { return count_of(process.log(), kReadAgain) >= times; })) << process.log();
  };
  const std::string steps[] = {std::string(kSecret) + "\n" + kNextSecret + "\n",
                               std::string(kNextSecret) + "\n" + kSecret + "\n",
                               std::string(kNextSecret) + "\n"};
  size_t step = 0;
  for (const std::string& text : steps) {
    ++step;
    std::vector<size_t> before;  // a process looks by itself now and then, too
    for (const Process& shard : cluster.shards) before.push_back(count_of(shard.log(), kReadAgain));
    write(path_of("shard-secret"), text);
    for (size_t i = 0; i < before.size(); ++i) take(cluster.shards[i], before[i] + 1);
    renew();
    write(path_of("worker-secret"), text);
    take(cluster.worker, step);
    renew();
  }
  streams.check(cluster);
  for (const char* process : {"worker", "shard0", "shard1"})
    EXPECT_EQ(cluster.metric(process, kSecretMetric), 0) << process;
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST_F(SecurityTest, ServicesThatCannotBeSecureDoNotStart) {
  const tls::Options good = tls::write_files(path_of("good"), ca.pem(), ca.issue());
  const auto refused = [&](const char* service, const tls::Options& use, const std::string& why,
                           std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = flags_of(use);
    arguments.insert(arguments.end(), {"--ops-listen", "127.0.0.1:0"});
    if (std::string(service) != "conclave-scheduler")
      arguments.insert(arguments.end(), {"--model", ClusterEnvironment::model()});
    arguments.insert(arguments.end(), more.begin(), more.end());
    Process process = Process::start(service, arguments, path_of("refused.log"));
    EXPECT_EQ(process.wait(30 * kSecond).value_or(-1), 2) << service;
    EXPECT_THAT(process.log(), AllOf(HasSubstr(std::string(service) + ": "), HasSubstr(why))) << service;
  };
  tls::Wish expired;
  expired.ends_s = -1;
  tls::Leaf mixed = ca.issue();
  mixed.key = ca.issue().key;
  const std::pair<tls::Options, const char*> cases[] = {
      {tls::write_files(path_of("expired"), ca.pem(), ca.issue(expired)), "tls.cert_file: "},
      {tls::write_files(path_of("mixed"), ca.pem(), mixed), "tls.key_file: "},
      {tls::write_files(path_of("other"), tls::Authority("x").pem(), ca.issue()), "tls.cert_file: "},
      {tls::write_files(path_of("empty"), "", ca.issue()), "tls.ca_file: "},
  };
  for (const char* service :
       {"conclave-scheduler", "conclave-router", "conclave-attention", "conclave-expert"}) {
    refused(service, cases[0].first, cases[0].second);
    tls::Options half = good;
    half.key_file.clear();
    refused(service, half, "tls.key_file is not set");
  }
  for (const auto& [options, why] : cases) refused("conclave-scheduler", options, why);
  write(path_of("secret"), "short");
  for (const char* service : {"conclave-attention", "conclave-expert"}) {
    refused(service, good, "transport.secret_file", {"--set", "transport.secret_file=" + path_of("secret")});
    refused(service, good, "transport.secret_file", {"--set", "transport.secret_file=/nowhere/secret"});
  }
}

}  // namespace
}  // namespace conclave
