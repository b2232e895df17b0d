#include "tests/cluster/relay/network.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "libs/base/check.h"

extern char** environ;

namespace conclave {
namespace {

constexpr int kAnswerLimitMs = 20000;  // only bounds a failing test

}  // namespace

StatusOr<std::unique_ptr<Network>> Network::start(uint64_t seed, const std::vector<std::string>& nodes) {
  const char* directory = std::getenv("CONCLAVE_BIN_DIR");
  CONCLAVE_CHECK(directory != nullptr);
  std::vector<std::string> words = {std::string(directory) + "/../tests/conclave-test-relay",
                                    std::to_string(seed)};
  words.insert(words.end(), nodes.begin(), nodes.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  // Closed in every other child, so that the relay sees the end of its input when this process is gone.
  int in[2], out[2];
  CONCLAVE_CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], 0);
  posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  std::unique_ptr<Network> network(new Network);
  const int error = posix_spawn(&network->pid_, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  network->to_ = in[1];
  network->from_ = out[0];
  if (error != 0) {
    network->pid_ = -1;
    return internal_error("cannot start " + words[0]);
  }
  for (;;) {
    ASSIGN_OR_RETURN(const std::string said, network->line());
    if (said == "ready") return network;
    if (said.starts_with("cannot ")) return failed_precondition("the relay cannot " + said.substr(7));
    std::istringstream parts(said);
    std::string what, name;
    NetworkNode node;
    parts >> what >> name >> node.netns >> node.device >> node.address;
    if (node.netns == "-") node.netns.clear();
    network->nodes_[name] = node;
  }
}

Network::~Network() {
  if (to_ >= 0) close(to_);  // the end of its input
  if (from_ >= 0) close(from_);
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
}

StatusOr<std::string> Network::line() {
  for (;;) {
    if (const size_t end = read_.find('\n'); end != std::string::npos) {
      std::string out = read_.substr(0, end);
      read_.erase(0, end + 1);
      return out;
    }
    pollfd wait{from_, POLLIN, 0};
    std::array<char, 4096> text;
    if (poll(&wait, 1, kAnswerLimitMs) != 1) return internal_error("the relay does not answer");
    const ssize_t size = read(from_, text.data(), text.size());
    if (size <= 0) return internal_error("the relay ended");
    read_.append(text.data(), static_cast<size_t>(size));
  }
}

StatusOr<std::string> Network::ask(const std::string& command) {
  const std::string text = command + "\n";
  if (write(to_, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    return internal_error("the relay ended");
  }
  return line();
}

Status Network::set(const std::string& a, const std::string& b, const LinkFault& fault) {
  std::ostringstream command;
  command << "set " << a << " " << b << " " << fault.delay / kMicrosecond << " " << fault.loss << " "
          << fault.cut;
  ASSIGN_OR_RETURN(const std::string answer, ask(command.str()));
  if (answer != "ok") return internal_error("the relay says: " + answer);
  return OkStatus();
}

Status Network::set_all(const std::string& name, const LinkFault& fault, bool host) {
  for (const auto& [other, node] : nodes_) {
    if (other == name || (other == "host" && !host)) continue;
    RETURN_IF_ERROR(set(name, other, fault));
  }
  return OkStatus();
}

StatusOr<LinkCounts> Network::counts(const std::string& from, const std::string& to) {
  ASSIGN_OR_RETURN(const std::string answer, ask("counts " + from + " " + to));
  std::istringstream parts(answer);
  LinkCounts out;
  if (!(parts >> out.forwarded >> out.lost >> out.cut)) return internal_error("the relay says: " + answer);
  return out;
}

int socket_in(const std::string& netns, int type) {
  int fd = -1;
  // A thread of its own: it stays in the namespace to its end.
  std::thread there([&] {
    if (!netns.empty()) {
      const int space = open(("/run/netns/" + netns).c_str(), O_RDONLY | O_CLOEXEC);
      if (space < 0) return;
      const bool entered = setns(space, CLONE_NEWNET) == 0;
      close(space);
      if (!entered) return;
    }
    fd = socket(AF_INET, type | SOCK_CLOEXEC, 0);
  });
  there.join();
  return fd;
}

}  // namespace conclave
