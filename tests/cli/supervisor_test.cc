#include "cli/supervisor.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace conclave::cli {
namespace {

class SupervisorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Supervisor::block_signals();
    std::string pattern = (std::filesystem::temp_directory_path() / "supervisor-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  ChildSpec shell(const std::string& name, const std::string& script) {
    return {name, {"/bin/sh", "-c", script}, (directory_ / (name + ".log")).string()};
  }
  std::string log(const std::string& name) const {
    std::ifstream in(directory_ / (name + ".log"));
    return {std::istreambuf_iterator<char>(in), {}};
  }

  std::filesystem::path directory_;
};

TEST_F(SupervisorTest, RestartsWhatDiesAndSaysHow) {
  Supervisor supervisor({.backoff_min_ms = 1, .backoff_max_ms = 4});
  ASSERT_TRUE(supervisor.start(shell("child", "echo run; kill -9 $$")).ok());
  int restarts = 0;
  const Status status = supervisor.run(
      [&](const std::string& name, const std::string& how) {
        EXPECT_EQ(name, "child");
        EXPECT_EQ(how, "signal Killed");
        ++restarts;
      },
      [&] { return restarts >= 5; }, 1000);
  EXPECT_TRUE(status.ok());
  EXPECT_GE(restarts, 5);
}

TEST_F(SupervisorTest, BackOffGrows) {
  Supervisor supervisor({.backoff_min_ms = 40, .backoff_max_ms = 80});
  supervisor.started();
  ASSERT_TRUE(supervisor.start(shell("child", "exit 1")).ok());
  int restarts = 0;
  const TimePoint start = steady_now();
  ASSERT_TRUE(supervisor.run([&](auto&, auto&) { ++restarts; }, [&] { return restarts >= 5; }, 1000).ok());
  // Waits of 0, 40, 80 and 80 ms lie between five deaths.
  EXPECT_GE(steady_now() - start, 200 * kMillisecond);
}

TEST_F(SupervisorTest, AFailedStartIsFinalAndShowsTheChildsOwnLine) {
  Supervisor supervisor({});
  ASSERT_TRUE(
      supervisor
          .start(shell("child",
                       "echo '{\"level\":\"info\"}'; echo the port is taken; echo take another; exit 1"))
          .ok());
  const Status status = supervisor.run([](auto&, auto&) { ADD_FAILURE(); }, [] { return false; }, 1000);
  EXPECT_EQ(message_of(status), "child cannot start: the port is taken\n  take another");
}

TEST_F(SupervisorTest, AnErrorAfterTheStartIsRetried) {
  Supervisor supervisor({});
  supervisor.started();
  ASSERT_TRUE(supervisor.start(shell("child", "exit 2")).ok());
  int restarts = 0;
  EXPECT_TRUE(supervisor.run([&](auto&, auto&) { ++restarts; }, [&] { return restarts >= 2; }, 1000).ok());
}

TEST_F(SupervisorTest, AMissingProgramIsAnError) {
  Supervisor supervisor({});
  const Status status =
      supervisor.start({"child", {"/nonexistent/program"}, (directory_ / "child.log").string()});
  EXPECT_NE(message_of(status).find("cannot start /nonexistent/program"), std::string::npos);
}

TEST_F(SupervisorTest, StopsPolitelyThenForcefully) {
  Supervisor supervisor({.stop_grace_ms = 300});
  ASSERT_TRUE(
      supervisor.start(shell("polite", "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.01; done"))
          .ok());
  ASSERT_TRUE(
      supervisor.start(shell("stubborn", "trap '' TERM; echo up; while :; do sleep 0.01; done")).ok());
  ASSERT_TRUE(supervisor
                  .run([](auto&, auto&) { ADD_FAILURE(); },
                       [&] { return log("polite") == "up\n" && log("stubborn") == "up\n"; }, 5)
                  .ok());
  const TimePoint start = steady_now();
  supervisor.stop();
  EXPECT_GE(steady_now() - start, 250 * kMillisecond);
  EXPECT_LT(steady_now() - start, 10 * kSecond);
  EXPECT_EQ(log("polite"), "up\nbye\n");
}

// What takes requests is started last and stopped first, alone; a second signal is enough of that.
TEST_F(SupervisorTest, TheLastStartedEndsBeforeTheOthersAreTold) {
  for (const bool hurry : {false, true}) {
    Supervisor supervisor({.stop_grace_ms = hurry ? 60'000 : 20'000});
    const std::string mark = (directory_ / "front-ended").string();
    const std::string back = hurry ? "back2" : "back", front = hurry ? "front2" : "front";
    ASSERT_TRUE(supervisor
                    .start(shell(back, "trap 'test -e " + mark +
                                           " && echo after || echo before; exit 0' TERM; echo up; "
                                           "while :; do sleep 0.01; done"))
                    .ok());
    ASSERT_TRUE(supervisor
                    .start(shell(front, hurry ? "trap '' TERM; echo up; while :; do sleep 0.01; done"
                                              : "trap 'sleep 0.2; touch " + mark +
                                                    "; exit 0' TERM; echo up; while :; do sleep 0.01; done"))
                    .ok());
    ASSERT_TRUE(supervisor
                    .run([](auto&, auto&) { ADD_FAILURE(); },
                         [&] { return log(back) == "up\n" && log(front) == "up\n"; }, 5)
                    .ok());
    const TimePoint start = steady_now();
    if (hurry) {
      std::filesystem::remove(mark);
      kill(getpid(), SIGINT);
    }
    supervisor.stop();
    EXPECT_EQ(log(back), hurry ? "up\nbefore\n" : "up\nafter\n");
    EXPECT_LT(steady_now() - start, 30 * kSecond);
  }
}

TEST_F(SupervisorTest, SigtermEndsTheWait) {
  Supervisor supervisor({});
  ASSERT_TRUE(supervisor.start(shell("child", "sleep 100")).ok());
  kill(getpid(), SIGTERM);
  EXPECT_TRUE(supervisor.run([](auto&, auto&) {}, [] { return false; }, 100'000).ok());
  supervisor.stop();
}

}  // namespace
}  // namespace conclave::cli
