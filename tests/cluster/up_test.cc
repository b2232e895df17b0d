// `conclave up`: its supervisor replaces what is killed, and it ends with all of its children.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <fstream>
#include <sstream>
#include <thread>

#include "tests/cluster/cluster.h"
#include "tests/cluster/completions.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;

const auto* const g_environment = ::testing::AddGlobalTestEnvironment(new ClusterEnvironment);

std::string file_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

// Direct children of a process that run `program`.
std::vector<pid_t> children(pid_t parent, const std::string& program) {
  const std::string id = std::to_string(parent);
  std::istringstream list(file_text("/proc/" + id + "/task/" + id + "/children"));
  std::vector<pid_t> out;
  for (pid_t child = 0; list >> child;) {
    const std::string command = file_text("/proc/" + std::to_string(child) + "/cmdline");
    if (command.substr(0, command.find('\0')).ends_with(program)) out.push_back(child);
  }
  return out;
}

// What the command says that `conclave up` printed as "  NAME  conclave NAME ...", with `id` for its ID.
std::string printed(const std::string& log, const std::string& name, const std::string& id = "") {
  const std::string head = "conclave " + name;
  const size_t at = log.find(head);
  if (at == std::string::npos) return "there is no line of '" + head + "' in: " + log;
  std::istringstream words(log.substr(at, log.find('\n', at) - at));
  std::vector<std::string> arguments;
  for (std::string word; words >> word;) arguments.push_back(word == "ID" ? id : word);
  Process process = Process::start("conclave", {arguments.begin() + 1, arguments.end()},
                                   ClusterEnvironment::directory() + "/printed-" + name + ".log");
  EXPECT_EQ(process.wait(60 * kSecond), 0) << process.log();
  return process.log();
}

TEST(UpTest, MistakesOnTheCommandLineNameTheFlag) {
  struct Case {
    std::vector<std::string> arguments;
    const char* wanted;
  };
  const std::string model = ClusterEnvironment::model();
  const Case cases[] = {
      {{"up", "--model", model, "--http", "nonsense"}, "--http"},
      {{"up", "--model", model, "--http", ""}, "--http"},
      {{"up", "--model", model, "--grpc", "127.0.0.1:99999"}, "--grpc"},
      {{"up", "--model", model, "--set", "router.trace_share"}, "--set: 'router.trace_share': write"},
      {{"up", "--model", model, "--set", "router.trace_sharp=1"}, "did you mean 'router.trace_share'?"},
      {{"up", "--model", model, "--set", "router.trace_share=2"}, "--set: router.trace_share: "},
      {{"model", "make", "--layers", "0", "--out", ClusterEnvironment::directory() + "/none"}, "--layers"},
      {{"bench", "--requests", "1", "--json", "/nowhere/report.json"}, "--json"},
      {{"key", "--name", "a/b"}, "--name"},
  };
  for (size_t i = 0; i < std::size(cases); ++i) {
    Process process = Process::start("conclave", cases[i].arguments,
                                     ClusterEnvironment::directory() + "/mistake" + std::to_string(i));
    const auto code = process.wait(20 * kSecond);
    ASSERT_TRUE(code.has_value()) << cases[i].wanted;
    EXPECT_NE(*code, 0) << cases[i].wanted;
    EXPECT_THAT(process.log(), HasSubstr(cases[i].wanted));
  }
}

TEST(UpTest, AKeyIsShownOnceAndItsLineIsAppended) {
  const std::string file = ClusterEnvironment::directory() + "/keys";
  for (const char* name : {"alice", "bob"}) {
    Process made = Process::start("conclave",
                                  {"key", "--name", name, "--tokens-per-minute", "1000", "--append-to", file},
                                  ClusterEnvironment::directory() + "/key-" + name);
    EXPECT_EQ(made.wait(20 * kSecond), 0) << made.log();
    EXPECT_THAT(made.log(), ::testing::StartsWith("ck-"));
    EXPECT_THAT(file_text(file), ::testing::Not(HasSubstr("ck-")));
  }
  EXPECT_THAT(file_text(file), ::testing::AllOf(HasSubstr("name=alice tokens_per_minute=1000\n"),
                                                HasSubstr("name=bob tokens_per_minute=1000\n")));
}

TEST(UpTest, ItsSupervisorReplacesAKilledShardUnderSixteenStreams) {
  const std::string ready = ClusterEnvironment::directory() + "/up.ready";
  Process up =
      Process::start("conclave",
                     {"up", "--model", ClusterEnvironment::model(), "--http", "127.0.0.1:0", "--grpc",
                      "127.0.0.1:0", "--ready-file", ready, "--set", "router.trace_share=1"},
                     ClusterEnvironment::directory() + "/up.log");
  ASSERT_TRUE(eventually([&] { return !file_text(ready).empty() || !up.running(); })) << up.log();
  std::string address = file_text(ready);
  ASSERT_TRUE(address.starts_with("http://")) << up.log();
  address = address.substr(7, address.find_last_not_of("\n/") - 6);

  // What it prints is how to ask it: without an address where it is the first cluster of the machine.
  EXPECT_THAT(printed(up.log(), "status"), HasSubstr("attention-0"));
  // Only because of the share that was set is the request followed at all.
  const auto followed = http_post(address, "/v1/completions", completion_body(0, 4, false), kCompletionLimit,
                                  {}, "x-request-id: followed\r\n");
  ASSERT_TRUE(followed.ok()) << followed.status();
  EXPECT_THAT(printed(up.log(), "timeline", "followed"), HasSubstr("\"traceEvents\""));

  const uint32_t kStreams = 16, kTokens = 480;
  std::vector<std::string> expected;
  for (uint32_t i = 0; i < kStreams; ++i) {
    expected.push_back(complete(address, i, kTokens, false));
    ASSERT_THAT(expected.back(), ::testing::Not(HasSubstr("failed: ")));
  }
  std::vector<pid_t> shards = children(up.pid(), "conclave-expert");
  ASSERT_EQ(shards.size(), 2u);
  std::vector<std::string> answers(kStreams);
  std::atomic<uint32_t> ended{0};
  std::vector<std::thread> clients;
  for (uint32_t i = 0; i < kStreams; ++i) {
    clients.emplace_back([&, i] {
      answers[i] = complete(address, i, kTokens, true);
      ++ended;
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(80));  // somewhere inside the streams
  EXPECT_EQ(::kill(shards[0], SIGKILL), 0);
  EXPECT_LT(ended, kStreams) << "the streams were over before the kill";
  for (std::thread& client : clients) client.join();
  for (uint32_t i = 0; i < kStreams; ++i) EXPECT_EQ(answers[i], expected[i]) << "stream " << i;
  EXPECT_TRUE(eventually([&] {
    const std::vector<pid_t> now = children(up.pid(), "conclave-expert");
    return now.size() == 2 && now[0] != shards[0] && now[1] != shards[0];
  })) << up.log();
  EXPECT_THAT(up.log(), HasSubstr("restarting it"));

  const std::vector<pid_t> last = children(up.pid(), "");
  EXPECT_EQ(last.size(), 5u);
  up.signal(SIGINT);
  EXPECT_EQ(up.wait(30 * kSecond), 0) << up.log();
  for (pid_t child : last) EXPECT_NE(::kill(child, 0), 0) << child << " is left behind";
}

// Ctrl-C lets open streams end, since the router goes first; a second one does not wait for them.
TEST(UpTest, OneSignalLetsOpenStreamsEndAndTwoDoNot) {
  for (const bool twice : {false, true}) {
    const std::string name = ClusterEnvironment::directory() + (twice ? "/twice" : "/once");
    Process up = Process::start("conclave",
                                {"up", "--model", ClusterEnvironment::model(), "--http", "127.0.0.1:0",
                                 "--grpc", "127.0.0.1:0", "--ready-file", name + ".ready"},
                                name + ".log");
    ASSERT_TRUE(eventually([&] { return !file_text(name + ".ready").empty() || !up.running(); })) << up.log();
    std::string address = file_text(name + ".ready");
    ASSERT_TRUE(address.starts_with("http://")) << up.log();
    address = address.substr(7, address.find_last_not_of("\n/") - 6);
    const uint32_t kStreams = 4, kTokens = twice ? 1800 : 300;
    std::vector<std::string> answers(kStreams);
    std::vector<std::thread> clients;
    std::atomic<uint32_t> ended{0};
    for (uint32_t i = 0; i < kStreams; ++i) {
      clients.emplace_back([&, i] {
        answers[i] = complete(address, i, kTokens, true);
        ++ended;
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(80));  // somewhere inside the streams
    const std::vector<pid_t> last = children(up.pid(), "");
    const TimePoint begin = steady_now();
    up.signal(SIGINT);
    EXPECT_LT(ended, kStreams) << "the streams were over before the signal";
    if (twice) {
      EXPECT_FALSE(up.wait(100 * kMillisecond).has_value());
      up.signal(SIGINT);
    }
    EXPECT_EQ(up.wait(30 * kSecond), 0) << up.log();
    EXPECT_LT(steady_now() - begin, (twice ? 8 : 30) * kSecond);
    for (std::thread& client : clients) client.join();
    for (size_t i = 0; !twice && i < kStreams; ++i) {
      EXPECT_THAT(answers[i], ::testing::Not(HasSubstr("failed: ")));
    }
    for (pid_t child : last) EXPECT_NE(::kill(child, 0), 0) << child << " is left behind";
  }
}

}  // namespace
}  // namespace conclave
