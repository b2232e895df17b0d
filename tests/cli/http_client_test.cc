#include "cli/http_client.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "cli/sampling_flags.h"
#include "gtest/gtest.h"

namespace conclave::cli {
namespace {

// Answers one connection with fixed pieces, each written when the one before was taken.
class OneShotServer {
 public:
  explicit OneShotServer(std::vector<std::string> pieces) : pieces_(std::move(pieces)) {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address);
    getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
    listen(fd_, 1);
    url_.host = "127.0.0.1";
    url_.port = std::to_string(ntohs(address.sin_port));
    thread_ = std::thread([this] { serve(); });
  }
  ~OneShotServer() {
    thread_.join();
    close(fd_);
  }
  const ServerUrl& url() const { return url_; }
  const std::string& request() const { return request_; }  // its head, once it was answered

 private:
  void serve() {
    const int peer = accept(fd_, nullptr, nullptr);
    char buffer[4096];
    while (request_.find("\r\n\r\n") == std::string::npos) {
      const ssize_t n = read(peer, buffer, sizeof buffer);
      if (n <= 0) break;
      request_.append(buffer, static_cast<size_t>(n));
    }
    for (const auto& piece : pieces_) {
      if (send(peer, piece.data(), piece.size(), MSG_NOSIGNAL) < 0) break;
    }
    shutdown(peer, SHUT_WR);
    while (read(peer, buffer, sizeof buffer) > 0) {
    }
    close(peer);
  }

  std::vector<std::string> pieces_;
  std::string request_;
  ServerUrl url_;
  int fd_ = -1;
  std::thread thread_;
};

std::string chunk(const std::string& data) {
  char head[32];
  snprintf(head, sizeof head, "%zx\r\n", data.size());
  return head + data + "\r\n";
}

constexpr char kEventStream[] =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

TEST(ParseUrlTest, AcceptsWhatPeopleType) {
  EXPECT_EQ(parse_url("http://localhost:1234/")->port, "1234");
  EXPECT_EQ(parse_url("localhost:1234")->host, "localhost");
  EXPECT_EQ(parse_url("example")->port, "8000");
  EXPECT_EQ(parse_url("[::1]:80")->host, "::1");
  EXPECT_EQ(parse_url("http://host:65535/v1/")->port, "65535");
  for (const char* bad : {"", "http://", "https://x", "host:port", "host:123456", "host:65536", "a/b:80"}) {
    EXPECT_FALSE(parse_url(bad).ok()) << bad;
  }
}

TEST(HttpStreamTest, EventsArriveHoweverTheyAreCut) {
  const std::string events = "data: one\n\n: comment\n\ndata: two\r\n\r\ndata: [DONE]\n\n";
  for (size_t cut = 1; cut < events.size(); ++cut) {
    OneShotServer server(
        {kEventStream, chunk(events.substr(0, cut)), chunk(events.substr(cut)), "0\r\n\r\n"});
    std::vector<std::string> seen;
    const auto response = http_stream(server.url(), "/x", "{}", 5 * kSecond, [&](std::string_view data) {
      seen.emplace_back(data);
      return true;
    });
    ASSERT_TRUE(response.ok()) << response.status();
    EXPECT_EQ(seen, (std::vector<std::string>{"one", "two"})) << cut;
  }
}

TEST(HttpStreamTest, ABrokenConnectionIsAnError) {
  OneShotServer server({kEventStream, chunk("data: one\n\n")});
  const auto response =
      http_stream(server.url(), "/x", "{}", 5 * kSecond, [](std::string_view) { return true; });
  EXPECT_EQ(response.status().code(), StatusCode::kUnavailable);
}

TEST(HttpStreamTest, AnErrorBodyComesBackWhole) {
  const std::string body = R"({"error":{"message":"max_tokens must be positive","param":"max_tokens"}})";
  OneShotServer server({"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: " +
                        std::to_string(body.size()) + "\r\n\r\n" + body});
  const auto response =
      http_stream(server.url(), "/x", "{}", 5 * kSecond, [](std::string_view) { return true; });
  ASSERT_TRUE(response.ok());
  const Status error = error_from(*response);
  EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(message_of(error), "the server answered 400: max_tokens must be positive");
}

TEST(ApiKeyTest, IsSentFromAFileOrTheEnvironment) {
  const std::string path = ::testing::TempDir() + "conclave_key_" + std::to_string(getpid());
  std::ofstream(path) << "key-of-file\n";
  ASSERT_EQ(setenv("CONCLAVE_API_KEY", "key-of-environment", 1), 0);
  for (const char* file : {"", path.c_str()}) {
    OneShotServer server({"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"});
    SamplingFlags flags;
    flags.url = server.url().host + ":" + server.url().port;
    flags.api_key_file = file;
    run_stream(flags, "/v1/completions", {}, [](const std::string&, bool) { return true; }).IgnoreError();
    const std::string key = *file == '\0' ? "key-of-environment" : "key-of-file";
    EXPECT_NE(server.request().find("Authorization: Bearer " + key + "\r\n"), std::string::npos) << server.request();
  }
  ASSERT_EQ(unsetenv("CONCLAVE_API_KEY"), 0);
  EXPECT_EQ(SamplingFlags().server()->api_key, "");
  std::ofstream(path) << "two words";
  SamplingFlags flags;
  for (const std::string& bad : {path, path + ".missing"}) {
    flags.api_key_file = bad;
    EXPECT_EQ(field_of(flags.server().status()), "--api-key-file");
  }
  unlink(path.c_str());
}

TEST(HttpRequestTest, NobodyThereSaysWhatToDo) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  const auto response =
      http_request({"127.0.0.1", std::to_string(ntohs(address.sin_port))}, "GET", "/", "", 5 * kSecond);
  close(fd);
  EXPECT_EQ(response.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(message_of(response.status()).find("conclave up"), std::string::npos);
}

}  // namespace
}  // namespace conclave::cli
