#include "bench/router/stream_clients.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace conclave::bench {
namespace {

constexpr std::string_view kContent = "\"content\":\"";
constexpr std::string_view kText = "\"text\":\"";
constexpr std::string_view kDone = "data: [DONE]";

struct Stream {
  int fd = -1;
  uint32_t tokens = 0;
  std::string rest;  // of a line that has not ended
  bool done = false;
};

std::string body_of(const std::string& path, uint32_t stream, uint32_t tokens) {
  const std::string rest = ",\"seed\":" + std::to_string(stream) +
                           ",\"max_tokens\":" + std::to_string(tokens) +
                           ",\"ignore_eos\":true,\"stream\":true}";
  if (path == "/v1/chat/completions") return R"({"messages":[{"role":"user","content":"hello"}])" + rest;
  return R"({"prompt":"hello")" + rest;
}

int open_stream(uint16_t port, const std::string& path, uint32_t stream, uint32_t tokens) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    if (fd >= 0) close(fd);
    return -1;
  }
  const std::string body = body_of(path, stream, tokens);
  const std::string request = "POST " + path + " HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\n" +
                              "content-length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size()))
    return fd;
  close(fd);
  return -1;
}

// Tokens of one event's line: the length of its content.
uint32_t tokens_in(std::string_view line) {
  for (const std::string_view key : {kContent, kText}) {
    const size_t at = line.find(key);
    if (at == std::string_view::npos) continue;
    const size_t begin = at + key.size();
    return static_cast<uint32_t>(line.find('"', begin) - begin);
  }
  return 0;
}

double percentile(const std::vector<float>& sorted, double p) {
  if (sorted.empty()) return 0;
  return sorted[static_cast<size_t>(p * static_cast<double>(sorted.size() - 1))];
}

}  // namespace

ClientReport run_clients(uint16_t port, const std::string& path, const SentTimes& sent, uint32_t skip,
                         Nanos limit) {
  ClientReport report;
  std::vector<Stream> streams(sent.streams);
  std::vector<float> latencies;
  latencies.reserve(static_cast<size_t>(sent.streams) * sent.tokens);
  const int poller = epoll_create1(EPOLL_CLOEXEC);
  uint32_t open = 0;
  const TimePoint until = steady_now() + limit;
  char buffer[1 << 16];
  const auto read_one = [&](uint32_t index) {
    Stream& stream = streams[index];
    const ssize_t got = recv(stream.fd, buffer, sizeof buffer, 0);
    const TimePoint now = steady_now();
    if (got <= 0) {
      close(stream.fd);
      stream.fd = -1;
      --open;
      return;
    }
    ++report.reads;
    report.bytes += static_cast<uint64_t>(got);
    std::string_view bytes(buffer, static_cast<size_t>(got));
    if (!stream.rest.empty()) {
      stream.rest.append(bytes);
      bytes = stream.rest;
    }
    size_t end;
    while ((end = bytes.find('\n')) != std::string_view::npos) {
      const std::string_view line = bytes.substr(0, end);
      bytes.remove_prefix(end + 1);
      if (!line.starts_with("data: ")) continue;
      if (line.starts_with(kDone)) {
        stream.done = true;
        continue;
      }
      for (uint32_t i = tokens_in(line); i > 0 && stream.tokens < sent.tokens; --i) {
        const int64_t left = __atomic_load_n(&sent.at(index, stream.tokens), __ATOMIC_ACQUIRE);
        if (stream.tokens++ >= skip) latencies.push_back(static_cast<float>(now - left) / 1e6f);
      }
    }
    stream.rest = std::string(bytes);
    if (stream.done) {
      close(stream.fd);
      stream.fd = -1;
      --open;
    }
  };
  const auto poll_once = [&](int wait_ms) {
    epoll_event events[512];
    const int count = epoll_wait(poller, events, 512, wait_ms);
    for (int i = 0; i < count; ++i) read_one(events[i].data.u32);
  };
  for (uint32_t i = 0; i < sent.streams; ++i) {
    streams[i].fd = open_stream(port, path, i, sent.tokens);
    if (streams[i].fd < 0) continue;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = i;
    epoll_ctl(poller, EPOLL_CTL_ADD, streams[i].fd, &event);
    ++open;
    if (i % 16 == 0) poll_once(0);
  }
  while (open > 0 && steady_now() < until) poll_once(100);
  for (Stream& stream : streams) {
    if (stream.fd >= 0) close(stream.fd);
    if (stream.tokens < sent.tokens) ++report.broken;
  }
  close(poller);
  report.tokens = latencies.size();
  std::sort(latencies.begin(), latencies.end());
  report.p50_ms = percentile(latencies, 0.5);
  report.p90_ms = percentile(latencies, 0.9);
  report.p99_ms = percentile(latencies, 0.99);
  report.p999_ms = percentile(latencies, 0.999);
  report.max_ms = percentile(latencies, 1);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  report.cpu_seconds = static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                       static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
  return report;
}

}  // namespace conclave::bench
