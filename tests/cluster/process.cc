#include "tests/cluster/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>

#include "libs/base/address.h"
#include "libs/base/check.h"

extern char** environ;

namespace conclave {
namespace {

std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

}  // namespace

Process Process::start(const std::string& program, const std::vector<std::string>& arguments,
                       const std::string& log, const Surroundings& where) {
  const char* directory = std::getenv("CONCLAVE_BIN_DIR");
  CONCLAVE_CHECK(directory != nullptr);
  const std::string path = std::string(directory) + "/" + program;
  std::vector<std::string> words = {path};
  // `ip` becomes the program: the process id is the child's own.
  if (!where.netns.empty()) words = {"ip", "netns", "exec", where.netns, path};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::vector<std::string> more = where.environment;
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  for (std::string& entry : more) environment.push_back(entry.data());
  environment.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  Process process;
  process.log_ = log;
  const int error = posix_spawnp(&process.pid_, argv[0], &actions, nullptr, argv.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  CONCLAVE_CHECK(error == 0);
  return process;
}

Process::~Process() { kill(); }

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), ended_(other.ended_), log_(std::move(other.log_)) {}

Process& Process::operator=(Process&& other) noexcept {
  if (this != &other) {
    kill();
    pid_ = std::exchange(other.pid_, -1);
    ended_ = other.ended_;
    log_ = std::move(other.log_);
  }
  return *this;
}

bool Process::running() { return pid_ > 0 && !wait(0).has_value(); }

void Process::signal(int number) {
  if (running()) ::kill(pid_, number);
}

std::optional<int> Process::wait(Nanos limit) {
  if (pid_ <= 0 || ended_) return ended_;
  // A descriptor of the process is readable once it has ended.
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  if (fd >= 0) {
    pollfd waiter{fd, POLLIN, 0};
    poll(&waiter, 1, static_cast<int>(limit / kMillisecond));
    close(fd);
  }
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) == pid_) {
    ended_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  return ended_;
}

void Process::kill() {
  if (pid_ <= 0 || ended_) return;
  ::kill(pid_, SIGKILL);
  wait(10 * kSecond);
}

std::string Process::log() const { return slurp(log_); }

double Process::cpu_seconds() const {
  const std::string stat = slurp("/proc/" + std::to_string(pid_) + "/stat");
  const size_t close = stat.rfind(')');
  if (close == std::string::npos) return 0;
  std::istringstream rest(stat.substr(close + 2));
  std::string word;
  double ticks = 0;
  for (int field = 3; field <= 15 && rest >> word; ++field) {
    if (field >= 14) ticks += std::stod(word);
  }
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

uint64_t Process::anonymous_bytes() const {
  std::istringstream status(slurp("/proc/" + std::to_string(pid_) + "/status"));
  std::string word;
  while (status >> word) {
    if (word == "RssAnon:") {
      uint64_t kib = 0;
      status >> kib;
      return kib * 1024;
    }
  }
  return 0;
}

size_t Process::descriptors() const {
  std::error_code error;
  size_t count = 0;
  for (std::filesystem::directory_iterator at("/proc/" + std::to_string(pid_) + "/fd", error), end;
       !error && at != end; at.increment(error)) {
    ++count;
  }
  return count;
}

std::map<std::string, std::string> read_ready_file(const std::string& path) {
  const std::string text = slurp(path);
  std::map<std::string, std::string> out;
  if (text.find("\"started\":true") == std::string::npos) return out;
  size_t at = 0;
  const auto next = [&]() -> std::string {
    const size_t open = text.find('"', at);
    if (open == std::string::npos) return "";
    const size_t close = text.find('"', open + 1);
    if (close == std::string::npos) return "";
    at = close + 1;
    return text.substr(open + 1, close - open - 1);
  };
  for (std::string key = next(); !key.empty(); key = next()) {
    if (text.compare(at, 2, ":\"") == 0) out[key] = next();
  }
  return out;
}

namespace {

// The payload of a chunked body; INTERNAL when the chunks are not whole.
StatusOr<std::string> dechunk(std::string_view body) {
  std::string out;
  for (;;) {
    const size_t line = body.find("\r\n");
    if (line == std::string_view::npos) return internal_error("the answer ends inside a chunk header");
    const size_t size = std::strtoul(std::string(body.substr(0, line)).c_str(), nullptr, 16);
    body.remove_prefix(line + 2);
    if (size == 0) return out;
    if (body.size() < size + 2) return internal_error("the answer ends inside a chunk");
    out += body.substr(0, size);
    body.remove_prefix(size + 2);
  }
}

StatusOr<HttpAnswer> exchange(const std::string& address, const std::string& request, Nanos limit,
                              const std::function<void(std::string_view)>& on_bytes) {
  ASSIGN_OR_RETURN(const HostPort to, parse_host_port(address));
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return internal_error("no socket");
  timeval wait{static_cast<time_t>(limit / kSecond), 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
  sockaddr_in peer{};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(to.port);
  inet_pton(AF_INET, to.host.c_str(), &peer.sin_addr);
  std::string answer;
  bool sent = connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)) == 0 &&
              send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size());
  char buffer[4096];
  for (ssize_t n = 0; sent && (n = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
    answer.append(buffer, static_cast<size_t>(n));
    if (on_bytes) on_bytes({buffer, static_cast<size_t>(n)});
  }
  close(fd);
  const size_t body = answer.find("\r\n\r\n");
  if (answer.size() < 12 || body == std::string::npos) return unavailable("no answer from " + address);
  HttpAnswer out{std::atoi(answer.c_str() + 9), answer.substr(body + 4)};
  std::string head = answer.substr(0, body);
  for (char& c : head) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (head.find("transfer-encoding: chunked") != std::string::npos) {
    ASSIGN_OR_RETURN(out.body, dechunk(out.body));
  }
  return out;
}

}  // namespace

StatusOr<HttpAnswer> http_get(const std::string& address, const std::string& path, Nanos limit,
                              const std::function<void(std::string_view)>& on_bytes,
                              const std::string& headers) {
  return exchange(address,
                  "GET " + path + " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n" + headers + "\r\n",
                  limit, on_bytes);
}

StatusOr<HttpAnswer> http_post(const std::string& address, const std::string& path, const std::string& json,
                               Nanos limit, const std::function<void(std::string_view)>& on_bytes,
                               const std::string& headers) {
  return exchange(address,
                  "POST " + path +
                      " HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Type: application/json" +
                      "\r\n" + headers + "Content-Length: " + std::to_string(json.size()) + "\r\n\r\n" + json,
                  limit, on_bytes);
}

}  // namespace conclave
