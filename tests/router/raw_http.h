// A plain blocking HTTP client for tests: it can send anything, and reads responses as they come. Not for
// production.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::testing {

struct RawResponse {
  int status = 0;  // 0: the connection ended (or the wait did) without a response
  std::map<std::string, std::string> headers;
  std::string body;
  bool complete = false;
};

class RawClient {
 public:
  explicit RawClient(uint16_t port, int receive_buffer = 0) {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (receive_buffer > 0) setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) close();
  }
  ~RawClient() { close(); }
  RawClient(RawClient&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), buffer_(std::move(other.buffer_)) {}
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  bool connected() const { return fd_ >= 0; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  void finish_sending() { shutdown(fd_, SHUT_WR); }

  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }
  bool send_request(std::string_view method, std::string_view path, std::string_view body = "",
                    std::string_view extra_headers = "") {
    std::string text = std::string(method) + " " + std::string(path) + " HTTP/1.1\r\nhost: test\r\n";
    if (!body.empty() || method == "POST")
      text += "content-type: application/json\r\ncontent-length: " + std::to_string(body.size()) + "\r\n";
    text += extra_headers;
    text += "\r\n";
    text += body;
    return send(text);
  }

  // Reads what is there, waiting up to timeout_ms for the first byte; false at the end of the stream or time.
  bool receive_some(int timeout_ms) {
    pollfd p{fd_, POLLIN, 0};
    if (fd_ < 0 || poll(&p, 1, timeout_ms) <= 0) return false;
    char chunk[65536];
    const ssize_t n = recv(fd_, chunk, sizeof chunk, 0);
    if (n <= 0) {
      ended_ = true;
      return false;
    }
    buffer_.append(chunk, static_cast<size_t>(n));
    return true;
  }
  // Whether the server closed the connection within the time.
  bool wait_closed(int timeout_ms = 5000) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (!ended_ && std::chrono::steady_clock::now() < until)
      if (!receive_some(50) && ended_) break;
    return ended_;
  }

  // Waits until the received bytes hold `text`, counted from the start of what was not consumed yet.
  bool wait_for(std::string_view text, int timeout_ms = 10000) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (buffer_.find(text) == std::string::npos) {
      if (ended_ || std::chrono::steady_clock::now() > until) return false;
      receive_some(50);
    }
    return true;
  }
  const std::string& received() const { return buffer_; }

  // The next response, whole; chunked bodies are put together. `head`: it answers a HEAD request and has no
  // body.
  RawResponse read_response(int timeout_ms = 20000, bool head = false) {
    RawResponse response;
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    const auto fill = [&] {
      if (ended_ || std::chrono::steady_clock::now() > until) return false;
      receive_some(50);
      return true;
    };
    size_t end;
    while ((end = buffer_.find("\r\n\r\n")) == std::string::npos)
      if (!fill()) return response;
    const std::string top = buffer_.substr(0, end);
    buffer_.erase(0, end + 4);
    response.status = top.size() > 12 ? std::atoi(top.c_str() + 9) : 0;
    for (size_t at = top.find("\r\n"); at != std::string::npos;) {
      const size_t next = top.find("\r\n", at + 2);
      const std::string line = top.substr(at + 2, next == std::string::npos ? next : next - at - 2);
      const size_t colon = line.find(": ");
      if (colon != std::string::npos) response.headers[line.substr(0, colon)] = line.substr(colon + 2);
      at = next;
    }
    if (head || response.status == 204 || response.status == 100) {
      response.complete = true;
    } else if (response.headers.count("transfer-encoding")) {
      for (;;) {
        size_t line_end;
        while ((line_end = buffer_.find("\r\n")) == std::string::npos)
          if (!fill()) return response;
        const size_t size = std::strtoul(buffer_.c_str(), nullptr, 16);
        while (buffer_.size() < line_end + 2 + size + 2)
          if (!fill()) return response;
        response.body += buffer_.substr(line_end + 2, size);
        buffer_.erase(0, line_end + 2 + size + 2);
        if (size == 0) break;
      }
      response.complete = true;
    } else if (auto length = response.headers.find("content-length"); length != response.headers.end()) {
      const size_t size = std::strtoul(length->second.c_str(), nullptr, 10);
      while (buffer_.size() < size)
        if (!fill()) return response;
      response.body = buffer_.substr(0, size);
      buffer_.erase(0, size);
      response.complete = true;
    } else {
      while (fill()) {
      }
      response.body = std::exchange(buffer_, "");
      response.complete = ended_;
    }
    return response;
  }

 private:
  int fd_ = -1;
  std::string buffer_;
  bool ended_ = false;
};

// One request on a connection of its own.
inline RawResponse http_call(uint16_t port, std::string_view method, std::string_view path,
                             std::string_view body = "", std::string_view extra_headers = "") {
  RawClient client(port);
  if (!client.connected() || !client.send_request(method, path, body, extra_headers)) return {};
  return client.read_response(20000, method == "HEAD");
}

}  // namespace conclave::testing
