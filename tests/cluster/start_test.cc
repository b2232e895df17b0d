// How services start: bad configuration, taken ports, broken checkpoints, absent peers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <fstream>

#include "tests/cluster/cluster.h"

namespace conclave {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

std::string path_of(const std::string& name) { return ClusterEnvironment::directory() + "/" + name; }

// Runs to its end; one line of output and a code that is not zero is what a refusal must be.
struct Refused {
  Refused(const std::string& program, const std::vector<std::string>& arguments) {
    Process process = Process::start(program, arguments, path_of("refused.log"));
    const auto ended = process.wait(30 * kSecond);
    code = ended.value_or(-1);
    std::istringstream lines(process.log());
    for (std::string line; std::getline(lines, line);) {
      if (line.empty() || line[0] == '{') continue;  // a log line
      ++count;
      text += line + "\n";
    }
  }
  int code = 0;
  int count = 0;
  std::string text;
};

const char* const kServices[] = {"conclave-scheduler", "conclave-attention", "conclave-expert"};

TEST(StartTest, AnUnknownKeyIsOneLine) {
  const std::string config = path_of("bad.yaml");
  std::ofstream(config) << "scheduler:\n  lisen: 127.0.0.1:0\n";
  for (const char* service : kServices) {
    const Refused refused(service, {"--config", config});
    EXPECT_EQ(refused.code, 2) << service;
    EXPECT_EQ(refused.count, 1) << refused.text;
    EXPECT_THAT(refused.text,
                AllOf(HasSubstr(std::string(service) + ": " + config + ":2: unknown key 'scheduler.lisen'"),
                      HasSubstr("did you mean 'listen'?")));
  }
}

TEST(StartTest, WrongFlagsValuesAndFilesAreRefused) {
  EXPECT_EQ(Refused("conclave-scheduler", {"--nonsense"}).code, 2);
  EXPECT_THAT(Refused("conclave-scheduler", {"--config", "/nowhere.yaml"}).text, HasSubstr("cannot be read"));
  EXPECT_THAT(Refused("conclave-scheduler", {"--listen", "somewhere"}).text,
              HasSubstr("scheduler.listen: 'somewhere' lacks a port"));
  EXPECT_THAT(Refused("conclave-expert", {"--threads", "many"}).text,
              HasSubstr("experts.threads: 'many' is not"));
  EXPECT_THAT(Refused("conclave-expert", {"--set", "experts.thread=1"}).text,
              HasSubstr("did you mean 'experts.threads'?"));
  EXPECT_THAT(Refused("conclave-scheduler", {"--set", "scheduler.dead_after_ms=100"}).text,
              HasSubstr("scheduler.dead_after_ms"));
}

TEST(StartTest, APortInUseIsOneLine) {
  const std::string ready = path_of("first.ready");
  Process first = Process::start(
      "conclave-scheduler", {"--listen", "127.0.0.1:0", "--ops-listen", "127.0.0.1:0", "--ready-file", ready},
      path_of("first.log"));
  ASSERT_TRUE(eventually([&] { return !read_ready_file(ready).empty(); })) << first.log();
  auto addresses = read_ready_file(ready);
  const Refused grpc("conclave-scheduler", {"--listen", addresses["grpc"], "--ops-listen", "127.0.0.1:0"});
  EXPECT_EQ(grpc.code, 2);
  EXPECT_EQ(grpc.count, 1) << grpc.text;
  EXPECT_THAT(grpc.text,
              AllOf(HasSubstr("cannot listen on " + addresses["grpc"]), HasSubstr("scheduler.listen")));
  const Refused ops("conclave-scheduler", {"--listen", "127.0.0.1:0", "--ops-listen", addresses["ops"]});
  EXPECT_EQ(ops.code, 2);
  EXPECT_EQ(ops.count, 1) << ops.text;
  EXPECT_THAT(ops.text, AllOf(HasSubstr(addresses["ops"]), HasSubstr("scheduler.ops_listen")));
  EXPECT_TRUE(first.running());
}

TEST(StartTest, AMissingOrBrokenCheckpointIsOneLine) {
  for (const char* service : {"conclave-attention", "conclave-expert"}) {
    const Refused none(service, {"--ops-listen", "127.0.0.1:0"});
    EXPECT_EQ(none.code, 2);
    EXPECT_THAT(none.text, HasSubstr("model.path is not set"));
    const Refused missing(service, {"--model", "/nowhere", "--ops-listen", "127.0.0.1:0"});
    EXPECT_EQ(missing.code, 2);
    EXPECT_EQ(missing.count, 1) << missing.text;
    EXPECT_THAT(missing.text, AllOf(HasSubstr("model.path"), HasSubstr("/nowhere")));
  }
  const std::string broken = path_of("broken");
  std::filesystem::copy(ClusterEnvironment::model(), broken, std::filesystem::copy_options::recursive);
  for (const auto& file : std::filesystem::directory_iterator(broken)) {
    if (file.path().extension() == ".safetensors") {
      std::filesystem::resize_file(file.path(), std::filesystem::file_size(file.path()) / 2);
    }
  }
  const Refused truncated("conclave-expert", {"--model", broken, "--ops-listen", "127.0.0.1:0"});
  EXPECT_EQ(truncated.code, 2);
  EXPECT_THAT(truncated.text, AllOf(HasSubstr("model.path"), HasSubstr(".safetensors")));
}

// "fraction":0.1234 of an answer of /startupz; -1 where it is null.
double fraction_of(const std::string& body) {
  const size_t at = body.find("\"fraction\":");
  return at == std::string::npos || body.compare(at + 11, 4, "null") == 0 ? -1
                                                                          : std::atof(body.c_str() + at + 11);
}

TEST(StartTest, TheRouterShowsHowFarItsClusterIs) {
  ClusterShape shape;
  shape.start_members = false;
  ProcessCluster cluster(shape);
  cluster.start_router();
  const auto startup = [&] {
    auto answer = http_get(cluster.ops("router"), "/startupz");
    EXPECT_TRUE(answer.ok()) << answer.status();
    return answer.ok() ? std::pair(answer->code, answer->body) : std::pair(0, std::string());
  };
  const auto shows = [&](const std::string& phase, const std::string& detail, double from, double to) {
    return eventually([&] {
      const auto [code, body] = startup();
      const double fraction = fraction_of(body);
      return code == 503 && body.find("\"phase\":\"" + phase) != std::string::npos &&
             body.find(detail) != std::string::npos && fraction >= from && fraction <= to;
    });
  };
  EXPECT_TRUE(shows("waiting for the cluster", "no attention worker", 0.04, 0.06)) << startup().second;
  cluster.start_worker();  // and reads its weights: half of all there is to do
  EXPECT_TRUE(shows("loading weights", "no expert shard", 0.45, 0.55)) << startup().second;
  EXPECT_THAT(startup().second, HasSubstr("\"elapsed_seconds\":"));
  auto ready = http_get(cluster.ops("router"), "/readyz");
  ASSERT_TRUE(ready.ok());
  EXPECT_EQ(ready->code, 503);
  cluster.start_shard(0);
  cluster.start_shard(1);
  EXPECT_TRUE(eventually([&] { return startup().first == 200; })) << startup().second;
  EXPECT_EQ(fraction_of(startup().second), 1);
  EXPECT_TRUE(cluster.wait_router_ready());
  EXPECT_EQ(cluster.unexpected_ends(), "");
}

TEST(StartTest, AServiceWithoutPeersIsUnreadySaysWhyAndRetries) {
  const std::string ready = path_of("lonely.ready");
  // A port that nobody listens on: taken from a scheduler that has ended.
  std::string address;
  {
    const std::string own = path_of("ended.ready");
    Process ended = Process::start(
        "conclave-scheduler", {"--listen", "127.0.0.1:0", "--ops-listen", "127.0.0.1:0", "--ready-file", own},
        path_of("ended.log"));
    ASSERT_TRUE(eventually([&] { return !read_ready_file(own).empty(); }));
    address = read_ready_file(own)["grpc"];
    // Without members it is not ready either.
    auto answer = http_get(read_ready_file(own)["ops"], "/readyz");
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->code, 503);
    EXPECT_THAT(answer->body, HasSubstr("no attention worker"));
    ended.signal(SIGTERM);
    EXPECT_EQ(ended.wait(10 * kSecond), 0) << ended.log();
  }
  Process shard = Process::start("conclave-expert",
                                 {"--model", ClusterEnvironment::model(), "--scheduler", address,
                                  "--ops-listen", "127.0.0.1:0", "--ready-file", ready, "--threads", "1"},
                                 path_of("lonely.log"));
  ASSERT_TRUE(eventually([&] { return !read_ready_file(ready).empty(); })) << shard.log();
  const std::string ops = read_ready_file(ready)["ops"];
  EXPECT_TRUE(eventually([&] {
    auto answer = http_get(ops, "/readyz");
    return answer.ok() && answer->code == 503 &&
           answer->body.find("no connection to the scheduler at " + address) != std::string::npos;
  })) << http_get(ops, "/readyz")->body;
  EXPECT_EQ(http_get(ops, "/livez")->code, 200);
  Process scheduler = Process::start(
      "conclave-scheduler", {"--listen", address, "--ops-listen", "127.0.0.1:0"}, path_of("late.log"));
  EXPECT_TRUE(eventually([&] {
    auto answer = http_get(ops, "/readyz");
    return answer.ok() && answer->code == 200;
  })) << shard.log();
}

TEST(StartTest, AMemberOfAnotherModelIsRefusedAndSaysSo) {
  ProcessCluster cluster;
  ASSERT_TRUE(cluster.wait_ready());
  const std::string ready = path_of("other.ready");
  Process other = Process::start(
      "conclave-expert",
      {"--model", ClusterEnvironment::model(), "--set", "model.precision=f32", "--scheduler",
       cluster.scheduler_address(), "--ops-listen", "127.0.0.1:0", "--ready-file", ready, "--threads", "1"},
      path_of("other.log"));
  ASSERT_TRUE(eventually([&] { return !read_ready_file(ready).empty(); })) << other.log();
  EXPECT_TRUE(eventually([&] {
    auto answer = http_get(read_ready_file(ready)["ops"], "/readyz");
    return answer.ok() && answer->code == 503 &&
           answer->body.find("refused this member") != std::string::npos &&
           answer->body.find("numerics_id") != std::string::npos;
  })) << other.log();
  EXPECT_TRUE(other.running());
  EXPECT_TRUE(cluster.gateway->fleet().ready);
}

}  // namespace
}  // namespace conclave
