// conclave-router as a process: start, refusals that are one line, readiness without a scheduler, a clean
// end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <boost/json.hpp>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "libs/base/random.h"
#include "libs/checkpoint/make.h"
#include "tests/cluster/process.h"
#include "tests/router/key_dir.h"
#include "tests/router/raw_http.h"

namespace conclave {
namespace {

using ::testing::HasSubstr;
using testing::http_call;

// The router, and what it has printed.
class Router {
 public:
  explicit Router(const std::vector<std::string>& arguments) {
    const auto name = "conclave-router-" + std::to_string(system_random_u64()) + ".log";
    log_ = (std::filesystem::temp_directory_path() / name).string();
    process_ = Process::start("conclave-router", arguments, log_);
  }
  ~Router() {
    process_.kill();
    std::filesystem::remove(log_);
  }

  // Until it has printed the text; false when it ended without it.
  bool wait_for(std::string_view text, Nanos limit = 60 * kSecond) {
    for (const TimePoint end = steady_now() + limit;;) {
      const bool running = process_.running();
      printed = process_.log();
      if (printed.find(text) != std::string::npos) return true;
      if (!running || steady_now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  int wait_exit() {
    const std::optional<int> code = process_.wait(60 * kSecond);
    printed = process_.log();
    return code.value_or(-1);
  }
  void signal(int number) { process_.signal(number); }

  std::string printed;

 private:
  std::string log_;
  Process process_;
};

class RouterProcess : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ =
        std::filesystem::temp_directory_path() / ("conclave-router-" + std::to_string(system_random_u64()));
    std::filesystem::create_directories(dir_);
    MakeOptions make;
    make.out = dir_ / "tiny";
    make.layers = 1;
    ASSERT_TRUE(make_checkpoint(make).ok());
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(dir_, ignored);
  }
  std::string config(const std::string& router_lines, const std::string& model = "") {
    const std::string path = dir_ / "cluster.yaml";
    std::ofstream out(path);
    // Port 1 of the loopback has no listener: the scheduler that is not there.
    out << "model:\n  path: " << (model.empty() ? (dir_ / "tiny").string() : model) << "\n"
        << "scheduler:\n  listen: 127.0.0.1:1\n"
        << "router:\n"
        << router_lines;
    return path;
  }
  static std::string ports(const std::string& http = "127.0.0.1:0", const std::string& ops = "127.0.0.1:0") {
    return "  http_listen: " + http +
           "\n  grpc_listen: 127.0.0.1:0\n  admin_listen: 127.0.0.1:0\n  ops_listen: " + ops +
           "\n  drain_time_s: 2\n";
  }

  std::filesystem::path dir_;
};

// The value of a key in the "listening" log line.
std::string logged(const std::string& printed, const std::string& key) {
  for (size_t at = 0; at < printed.size();) {
    const size_t end = std::min(printed.find('\n', at), printed.size());
    const std::string line = printed.substr(at, end - at);
    at = end + 1;
    boost::system::error_code error;
    const boost::json::value value = boost::json::parse(line, error);
    if (!error && value.is_object() && value.as_object().contains(key))
      return std::string(value.as_object().at(key).as_string());
  }
  return "";
}

uint16_t port_of(const std::string& address) {
  return static_cast<uint16_t>(std::atoi(address.substr(address.rfind(':') + 1).c_str()));
}

TEST_F(RouterProcess, UnreadyWithTheReasonWhileTheSchedulerIsMissingAndEndsCleanly) {
  Router process({"--config", config(ports())});
  ASSERT_TRUE(process.wait_for("\"listening\"")) << process.printed;
  ASSERT_TRUE(process.wait_for("}\n"));
  const uint16_t http = port_of(logged(process.printed, "http"));
  const uint16_t ops = port_of(logged(process.printed, "ops"));
  ASSERT_NE(http, 0) << process.printed;
  ASSERT_NE(ops, 0);
  EXPECT_EQ(http_call(ops, "GET", "/livez").status, 200);
  const auto starting = http_call(ops, "GET", "/startupz");
  EXPECT_EQ(starting.status, 503);
  EXPECT_THAT(starting.body, HasSubstr("\"phase\":\"waiting for the cluster\""));
  EXPECT_THAT(starting.body, HasSubstr("scheduler"));
  EXPECT_THAT(starting.body, HasSubstr("elapsed_seconds"));
  const auto ready = http_call(ops, "GET", "/readyz");
  EXPECT_EQ(ready.status, 503);
  EXPECT_THAT(ready.body, HasSubstr("scheduler"));
  EXPECT_THAT(http_call(ops, "GET", "/metrics").body,
              HasSubstr("conclave_router_scheduler_connections_total"));
  const auto refused = http_call(http, "POST", "/v1/completions", R"({"prompt":"hi"})");
  EXPECT_EQ(refused.status, 503);
  EXPECT_FALSE(refused.headers.at("retry-after").empty());
  EXPECT_THAT(http_call(http, "GET", "/v1/models").body, HasSubstr("\"tiny\""));
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait_exit(), 0) << process.printed;
  for (size_t at = 0; at < process.printed.size();) {  // every line is JSON
    const size_t end = process.printed.find('\n', at);
    ASSERT_NE(end, std::string::npos);
    boost::system::error_code error;
    boost::json::parse(process.printed.substr(at, end - at), error);
    EXPECT_FALSE(error) << process.printed.substr(at, end - at);
    at = end + 1;
  }
}

TEST_F(RouterProcess, SighupReadsTheKeysAgainAndARequestIsALogLine) {
  const testing::KeyDir keys;
  keys.write(format_key_line(testing::line_of("ck-alice", "alice")));
  Router process({"--config", config(ports() + "  api_keys_file: " + keys.path() + "\n")});
  ASSERT_TRUE(process.wait_for("\"listening\"") && process.wait_for("}\n")) << process.printed;
  const uint16_t http = port_of(logged(process.printed, "http"));
  const auto status = [&](const std::string& key, const std::string& id) {
    return http_call(http, "GET", "/v1/models", "",
                     "authorization: Bearer " + key + "\r\nx-request-id: " + id + "\r\n")
        .status;
  };
  EXPECT_EQ(status("ck-alice", "first"), 200);
  ASSERT_TRUE(process.wait_for("\"request_id\":\"first\"")) << process.printed;
  // In place, with the old file's time: nothing to see from outside, and the signal reads it all the same.
  const auto before = std::filesystem::last_write_time(keys.path());
  std::ofstream(keys.path()) << format_key_line(testing::line_of("ck-bobby", "alice"));
  std::filesystem::last_write_time(keys.path(), before);
  process.signal(SIGHUP);
  ASSERT_TRUE(process.wait_for("API keys read again")) << process.printed;
  EXPECT_EQ(status("ck-alice", "second"), 401);
  EXPECT_EQ(status("ck-bobby", "third"), 200);
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait_exit(), 0) << process.printed;
  EXPECT_THAT(process.printed, ::testing::Not(HasSubstr("ck-")));
}

TEST_F(RouterProcess, MistakesAreReadableLinesAndANonZeroExit) {
  const auto fails = [](const std::vector<std::string>& arguments) {
    Router process(arguments);
    EXPECT_NE(process.wait_exit(), 0);
    std::string last;
    for (size_t at = 0; at < process.printed.size();) {
      const size_t end = std::min(process.printed.find('\n', at), process.printed.size());
      last = process.printed.substr(at, end - at);
      at = end + 1;
    }
    EXPECT_THAT(last, HasSubstr("conclave-router: ")) << process.printed;
    return last;
  };
  EXPECT_THAT(fails({"--config", dir_ / "absent.yaml"}), HasSubstr("absent.yaml"));
  EXPECT_THAT(fails({"--config", config(ports() + "  colour: blue\n")}), HasSubstr("colour"));
  EXPECT_THAT(fails({"--config", config(ports(), dir_ / "nowhere")}), HasSubstr("nowhere"));
  EXPECT_THAT(fails({"--config", config(ports("127.0.0.1:notaport"))}), HasSubstr("http_listen"));
  {  // A checkpoint without a tokenizer.
    std::filesystem::copy(dir_ / "tiny", dir_ / "broken", std::filesystem::copy_options::recursive);
    std::filesystem::remove(dir_ / "broken" / "tokenizer.json");
    EXPECT_THAT(fails({"--config", config(ports(), dir_ / "broken")}), HasSubstr("tokenizer.json"));
  }
  {  // Ports in use.
    Router first({"--config", config(ports())});
    ASSERT_TRUE(first.wait_for("\"listening\"") && first.wait_for("}\n")) << first.printed;
    const std::string http = logged(first.printed, "http");
    const std::string ops = logged(first.printed, "ops");
    EXPECT_THAT(fails({"--config", config(ports(http))}), HasSubstr(http));
    EXPECT_THAT(fails({"--config", config(ports("127.0.0.1:0", ops))}), HasSubstr(ops));
    first.signal(SIGINT);
    EXPECT_EQ(first.wait_exit(), 0);
  }
}

}  // namespace
}  // namespace conclave
