#include "cli/supervisor.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

namespace conclave::cli {
namespace {

constexpr int64_t kHurryMs = 1000;     // grace of the end that was asked for twice
constexpr size_t kMaxErrorLines = 12;  // of a child that cannot start

sigset_t waited_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

timespec to_timespec(Nanos d) {
  d = std::max<Nanos>(d, 0);
  return {d / kSecond, d % kSecond};
}

std::string describe_exit(int status) {
  if (WIFEXITED(status)) return "exit code " + std::to_string(WEXITSTATUS(status));
  if (WIFSIGNALED(status)) return std::string("signal ") + strsignal(WTERMSIG(status));
  return "unknown status";
}

}  // namespace

std::string error_lines(const std::string& path, long offset, size_t max_lines) {
  std::ifstream in(path);
  in.seekg(offset);
  std::string line, out;
  size_t lines = 0;
  while (std::getline(in, line)) {
    if (line.empty() || line.front() == '{') continue;
    if (++lines > max_lines) break;
    if (!out.empty()) out += "\n  ";
    out += line;
  }
  return out;
}

void Supervisor::block_signals() {
  const sigset_t set = waited_signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

Supervisor::~Supervisor() {
  for (auto& child : children_) {
    if (child.pid > 0) {
      kill(child.pid, SIGKILL);
      waitpid(child.pid, nullptr, 0);
    }
  }
}

Status Supervisor::start(ChildSpec spec) {
  children_.push_back({std::move(spec)});
  return spawn(children_.back());
}

Status Supervisor::spawn(Child& child) {
  // Everything the child needs is made before fork: between fork and exec only async-signal-safe calls.
  std::vector<char*> argv;
  for (auto& arg : child.spec.argv) argv.push_back(arg.data());
  argv.push_back(nullptr);
  const int log = open(child.spec.log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (log < 0)
    return failed_precondition("cannot write " + child.spec.log_path + ": " + std::strerror(errno));
  child.log_offset = std::max<long>(0, lseek(log, 0, SEEK_END));
  int failure[2];
  if (pipe2(failure, O_CLOEXEC) != 0) {
    close(log);
    return internal_error(std::string("pipe: ") + std::strerror(errno));
  }
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    setpgid(0, 0);  // Ctrl-C reaches the supervisor alone, which stops its children in order
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(null, STDIN_FILENO);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    signal(SIGPIPE, SIG_DFL);
    execv(argv[0], argv.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t n = write(failure[1], &error, sizeof error);
    _exit(127);
  }
  close(log);
  close(failure[1]);
  int error = 0;
  const bool failed = pid < 0 || read(failure[0], &error, sizeof error) == sizeof error;
  close(failure[0]);
  if (failed) {
    if (pid > 0) waitpid(pid, nullptr, 0);
    return failed_precondition("cannot start " + child.spec.argv[0] + ": " +
                               std::strerror(pid < 0 ? errno : error));
  }
  child.pid = pid;
  child.started = steady_now();
  return OkStatus();
}

Status Supervisor::reap(const std::function<void(const std::string&, const std::string&)>& on_restart) {
  for (auto& child : children_) {
    int status = 0;
    if (child.pid <= 0 || waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
    child.pid = -1;
    if (!started_ && WIFEXITED(status) && WEXITSTATUS(status) != 0) {
      return failed_precondition(child.spec.name + " cannot start: " +
                                 error_lines(child.spec.log_path, child.log_offset, kMaxErrorLines));
    }
    const TimePoint now = steady_now();
    if (now - child.started >= options_.healthy_after_ms * kMillisecond) child.backoff_ms = 0;
    child.restart_at = now + child.backoff_ms * kMillisecond;
    child.backoff_ms = std::clamp(child.backoff_ms * 2, options_.backoff_min_ms, options_.backoff_max_ms);
    on_restart(child.spec.name, describe_exit(status));
  }
  return OkStatus();
}

TimePoint Supervisor::restart_due() {
  TimePoint due = kNever;
  for (const auto& child : children_) {
    if (child.pid < 0) due = std::min(due, child.restart_at);
  }
  return due;
}

Status Supervisor::run(const std::function<void(const std::string&, const std::string&)>& on_restart,
                       const std::function<bool()>& tick, int64_t tick_ms) {
  const sigset_t set = waited_signals();
  for (;;) {
    const TimePoint now = steady_now();
    for (auto& child : children_) {
      if (child.pid < 0 && child.restart_at <= now) RETURN_IF_ERROR(spawn(child));
    }
    const TimePoint wake = std::min(restart_due(), now + tick_ms * kMillisecond);
    const timespec timeout = to_timespec(wake - now);
    const int signal = sigtimedwait(&set, nullptr, &timeout);
    if (signal == SIGINT || signal == SIGTERM) return OkStatus();
    // One SIGCHLD may stand for several children, and reaping is cheap.
    RETURN_IF_ERROR(reap(on_restart));
    if (tick()) return OkStatus();
  }
}

void Supervisor::stop() {
  if (children_.empty()) return;
  const auto front = children_.end() - 1;
  const bool waited = stop(front, children_.end(), true, options_.stop_grace_ms);
  stop(children_.begin(), children_.end(), false,
       waited ? options_.stop_grace_ms : std::min(options_.stop_grace_ms, kHurryMs));
}

bool Supervisor::stop(Children::iterator from, Children::iterator to, bool impatient, int64_t grace_ms) {
  const sigset_t set = waited_signals();
  for (auto child = to; child != from;) {
    if ((--child)->pid > 0) kill(child->pid, SIGTERM);
  }
  const TimePoint deadline = steady_now() + grace_ms * kMillisecond;
  const auto running = [&] { return std::any_of(from, to, [](auto& c) { return c.pid > 0; }); };
  for (;;) {
    for (auto child = from; child != to; ++child) {
      if (child->pid > 0 && waitpid(child->pid, nullptr, WNOHANG) == child->pid) child->pid = -1;
    }
    if (!running()) return true;
    const TimePoint now = steady_now();
    if (now >= deadline) break;
    // Wakes for each child that ends; bounded, in case a SIGCHLD was merged with one already taken.
    const timespec timeout = to_timespec(std::min<Nanos>(deadline - now, 200 * kMillisecond));
    const int signal = sigtimedwait(&set, nullptr, &timeout);
    if (impatient && (signal == SIGINT || signal == SIGTERM)) return false;
  }
  for (auto child = from; child != to; ++child) {
    if (child->pid > 0) kill(child->pid, SIGKILL);
  }
  for (auto child = from; child != to; ++child) {
    if (child->pid > 0) waitpid(child->pid, nullptr, 0);
    child->pid = -1;
  }
  return true;
}

}  // namespace conclave::cli
