#include "libs/text/template_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "template_child_script.h"

namespace conclave::text {
namespace {

constexpr int kExecFailed = 127;

Status system_error(std::string_view what) {
  return unavailable(std::string(what) + ": " + std::strerror(errno));
}

// Runs between fork and exec, so it may call async-signal-safe functions only, and never returns.
[[noreturn]] void become_child(int fd, pid_t parent, const ChatTemplateOptions& options, char* const* argv,
                               char* const* environment) {
  // The kernel ends the child when the parent's starting thread ends, however that happens.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kExecFailed);
  rlimit memory = {};
  memory.rlim_cur = memory.rlim_max = options.memory_bytes;
  if (setrlimit(RLIMIT_AS, &memory) != 0) _exit(kExecFailed);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  if (dup2(fd, 0) < 0) _exit(kExecFailed);
  const int null = open("/dev/null", O_RDWR);
  if (null < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0) _exit(kExecFailed);
  // Whatever else is open here, close-on-exec or not, is none of the child's business.
  close_range(3, ~0u, 0);
  if (chdir("/") != 0) _exit(kExecFailed);
  execve(argv[0], argv, environment);
  _exit(kExecFailed);
}

}  // namespace

StatusOr<std::unique_ptr<TemplateProcess>> TemplateProcess::spawn(const ChatTemplateOptions& options,
                                                                  const std::string& config, int cancel_fd) {
  if (access(options.python.c_str(), X_OK) != 0) {
    return failed_precondition("chat templates need " + options.python +
                               ": install it with 'apt-get install python3 python3-jinja2'");
  }
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return system_error("socketpair");
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  std::string python = options.python;
  std::string arguments[] = {"-I", "-B", "-c", kTemplateChildScript};
  char* argv[] = {python.data(),       arguments[0].data(), arguments[1].data(),
                  arguments[2].data(), arguments[3].data(), nullptr};
  // Nothing of our environment but the time zone.
  std::string locale = "LANG=C.UTF-8";
  const char* zone = std::getenv("TZ");
  std::string zone_variable = zone == nullptr ? "" : std::string("TZ=") + zone;
  char* environment[] = {locale.data(), zone == nullptr ? nullptr : zone_variable.data(), nullptr};
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) become_child(ends[1], parent, options, argv, environment);
  close(ends[1]);
  if (pid < 0) {
    const Status status = system_error("fork");
    close(ends[0]);
    return status;
  }
  std::unique_ptr<TemplateProcess> out(
      new TemplateProcess(pid, ends[0], options.max_output_bytes + (1u << 20)));
  const TimePoint deadline = steady_now() + options.start_timeout;
  RETURN_IF_ERROR(out->send_frame({}, config, deadline, cancel_fd));
  ASSIGN_OR_RETURN(const ChildAnswer answer, out->receive_frame(deadline, cancel_fd));
  switch (answer.kind) {
    case 'r':
      return out;
    case 'x':
      return failed_precondition(answer.body);
    case 'c':
      return invalid_field("chat_template", answer.body);
    default:
      return unavailable("the template process does not speak our protocol");
  }
}

TemplateProcess::~TemplateProcess() {
  close(fd_);
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

// Reaps the child, which has closed its end, and says how it ended.
Status TemplateProcess::died() {
  int state = 0;
  kill(pid_, SIGKILL);
  pid_t reaped = 0;
  while ((reaped = waitpid(pid_, &state, 0)) < 0 && errno == EINTR) {
  }
  pid_ = 0;
  std::string how = "without a trace";
  if (reaped > 0 && WIFEXITED(state)) how = "with exit code " + std::to_string(WEXITSTATUS(state));
  if (reaped > 0 && WIFSIGNALED(state)) how = "by signal " + std::to_string(WTERMSIG(state));
  return unavailable("the template process ended " + how);
}

Status TemplateProcess::wait_for(short events, TimePoint deadline, int cancel_fd) const {
  for (;;) {
    const TimePoint now = steady_now();
    if (now >= deadline) return deadline_exceeded("the template process did not answer in time");
    // Rounded up, so that the last wait is not a busy loop.
    const Nanos left = std::min<Nanos>((deadline - now) / kMillisecond + 1, 60'000);
    pollfd fds[2] = {{fd_, events, 0}, {cancel_fd, POLLIN, 0}};
    const int ready = poll(fds, cancel_fd >= 0 ? 2 : 1, static_cast<int>(left));
    if (ready < 0 && errno != EINTR) return system_error("poll");
    if (ready <= 0) continue;
    if (cancel_fd >= 0 && fds[1].revents != 0) return cancelled("the template pool is shutting down");
    if (fds[0].revents != 0) return OkStatus();
  }
}

Status TemplateProcess::send_frame(std::string_view head, std::string_view body, TimePoint deadline,
                                   int cancel_fd) {
  const auto size = static_cast<uint32_t>(head.size() + body.size());
  std::string prefix;
  for (int shift = 0; shift < 32; shift += 8) prefix.push_back(static_cast<char>((size >> shift) & 0xff));
  prefix.append(head);
  for (std::string_view part : {std::string_view(prefix), body}) {
    while (!part.empty()) {
      const ssize_t sent = send(fd_, part.data(), part.size(), MSG_NOSIGNAL);
      if (sent >= 0) {
        part.remove_prefix(static_cast<size_t>(sent));
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        RETURN_IF_ERROR(wait_for(POLLOUT, deadline, cancel_fd));
      } else if (errno != EINTR) {
        return died();
      }
    }
  }
  return OkStatus();
}

Status TemplateProcess::receive_exactly(char* out, size_t n, TimePoint deadline, int cancel_fd) {
  while (n > 0) {
    const ssize_t got = recv(fd_, out, n, 0);
    if (got > 0) {
      out += got;
      n -= static_cast<size_t>(got);
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      RETURN_IF_ERROR(wait_for(POLLIN, deadline, cancel_fd));
    } else if (got == 0 || errno != EINTR) {
      return died();
    }
  }
  return OkStatus();
}

StatusOr<ChildAnswer> TemplateProcess::receive_frame(TimePoint deadline, int cancel_fd) {
  unsigned char prefix[4];
  RETURN_IF_ERROR(receive_exactly(reinterpret_cast<char*>(prefix), sizeof(prefix), deadline, cancel_fd));
  const size_t size =
      prefix[0] | (prefix[1] << 8) | (prefix[2] << 16) | (static_cast<size_t>(prefix[3]) << 24);
  if (size == 0 || size > max_frame_bytes_)
    return unavailable("the template process does not speak our protocol");
  ChildAnswer out;
  RETURN_IF_ERROR(receive_exactly(&out.kind, 1, deadline, cancel_fd));
  out.body.resize(size - 1);
  RETURN_IF_ERROR(receive_exactly(out.body.data(), size - 1, deadline, cancel_fd));
  return out;
}

StatusOr<ChildAnswer> TemplateProcess::call(char flags, std::string_view document, TimePoint deadline) {
  RETURN_IF_ERROR(send_frame({&flags, 1}, document, deadline, -1));
  return receive_frame(deadline, -1);
}

bool TemplateProcess::healthy() const {
  pollfd fd = {fd_, POLLIN, 0};
  return poll(&fd, 1, 0) == 0;
}

}  // namespace conclave::text
