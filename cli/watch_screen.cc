#include "cli/watch_screen.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

namespace conclave::cli {
namespace {

// The alternate screen, no cursor; and back.
constexpr std::string_view kEnter = "\x1b[?1049h\x1b[?25l\x1b[2J";
constexpr std::string_view kLeave = "\x1b[?25h\x1b[?1049l";

sigset_t watch_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGWINCH, SIGTSTP}) sigaddset(&set, number);
  return set;
}

// False when nobody reads.
bool write_all(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(STDOUT_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      pollfd out{STDOUT_FILENO, POLLOUT, 0};
      if (poll(&out, 1, 1000) <= 0) return true;  // a terminal that was stopped: this page is lost, not we
      continue;
    }
    if (n <= 0) return false;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

size_t number_of(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  size_t value = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  return error == std::errc() && *end == '\0' && value > 0 && value <= 10'000 ? value : otherwise;
}

bool wants_colour() {
  const char* no = std::getenv("NO_COLOR");
  return no == nullptr || *no == '\0';
}

bool has_screen() {
  if (isatty(STDOUT_FILENO) == 0) return false;
  const char* kind = std::getenv("TERM");
  return kind != nullptr && *kind != '\0' && std::strcmp(kind, "dumb") != 0;
}

// A terminal while a page fills it.
class Screen {
 public:
  explicit Screen(bool colour) : colour_(colour) {}
  ~Screen() { leave(); }

  void enter() {
    if (entered_) return;
    entered_ = true;
    has_mode_ = isatty(STDIN_FILENO) != 0 && tcgetattr(STDIN_FILENO, &mode_) == 0;
    if (has_mode_) {
      termios quiet = mode_;
      quiet.c_lflag &= ~static_cast<tcflag_t>(ECHO | ICANON);
      quiet.c_cc[VMIN] = 0;
      quiet.c_cc[VTIME] = 0;
      tcsetattr(STDIN_FILENO, TCSANOW, &quiet);
    }
    write_all(kEnter);
  }
  void leave() {
    if (!entered_) return;
    entered_ = false;
    write_all(kLeave);
    if (has_mode_) tcsetattr(STDIN_FILENO, TCSANOW, &mode_);
  }
  bool draw(const StatusView& view) {
    winsize now{};
    PageSize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &now) == 0 && now.ws_col > 0 && now.ws_row > 0) {
      size.width = now.ws_col;
      size.height = now.ws_row;
    }
    std::string out = "\x1b[H";
    size_t lines = 0;
    for (const PageLine& line : render_status(view, size)) {
      // A terminal smaller than the smallest page shows its upper left part.
      if (lines >= size.height) break;
      if (lines++ > 0) out += "\r\n";
      out += line_text(line, colour_) + "\x1b[K";
    }
    // No line break wraps, where the terminal is narrower than the page.
    return write_all("\x1b[?7l" + out + "\x1b[J\x1b[?7h");
  }

 private:
  const bool colour_;
  bool entered_ = false;
  bool has_mode_ = false;
  termios mode_{};
};

// Looks, on a thread of its own.
class Looker {
 public:
  explicit Looker(const std::function<StatusView()>& look) : look_(look), thread_([this] { run(); }) {}
  ~Looker() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    asked_changed_.notify_all();
    thread_.join();
    close(ready_);
  }

  int ready() const { return ready_; }  // readable when a view is there
  void ask() {
    {
      std::lock_guard lock(mutex_);
      asked_ = true;
    }
    asked_changed_.notify_all();
  }
  std::optional<StatusView> take() {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = read(ready_, &count, sizeof count);
    std::lock_guard lock(mutex_);
    return std::exchange(view_, std::nullopt);
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      asked_changed_.wait(lock, [this] { return asked_ || stopping_; });
      if (stopping_) return;
      asked_ = false;
      lock.unlock();
      StatusView view = look_();
      lock.lock();
      view_ = std::move(view);
      const uint64_t one = 1;
      [[maybe_unused]] const ssize_t n = write(ready_, &one, sizeof one);
    }
  }

  const std::function<StatusView()>& look_;
  const int ready_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::mutex mutex_;
  std::condition_variable asked_changed_;
  bool asked_ = false;
  bool stopping_ = false;
  std::optional<StatusView> view_;
  std::thread thread_;  // last: it uses everything above
};

std::string page_of(const StatusView& view) {
  PageSize size;
  size.width = number_of("COLUMNS", 80);
  size.height = 0;
  std::string out;
  for (const PageLine& line : render_status(view, size)) out += line_text(line, false) + "\n";
  return out;
}

}  // namespace

void block_watch_signals() {
  const sigset_t set = watch_signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

Status run_watch(const WatchOptions& options, const std::function<StatusView()>& look) {
  const bool full = !options.json && has_screen();
  const int keys = full && isatty(STDIN_FILENO) != 0 ? STDIN_FILENO : -1;
  const sigset_t set = watch_signals();
  const int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  const std::shared_ptr<void> closer(nullptr, [signals](void*) { close(signals); });
  Looker looker(look);
  // After the looker: the terminal is itself again before a last look has ended.
  Screen screen(wants_colour());
  if (full) screen.enter();
  std::optional<StatusView> shown;
  uint64_t looks = 0;
  TimePoint next = steady_now();
  bool asked = false;
  for (;;) {
    const TimePoint now = steady_now();
    if (!asked && now >= next) {
      asked = true;
      next = std::max(next + options.interval, now);
      looker.ask();
    }
    const Nanos wait = asked ? 10 * kSecond : std::max<Nanos>(next - now, 0);
    pollfd fds[] = {{signals, POLLIN, 0}, {looker.ready(), POLLIN, 0}, {keys, POLLIN, 0}};
    const timespec timeout{wait / kSecond, wait % kSecond};
    if (ppoll(fds, 3, &timeout, nullptr) < 0 && errno != EINTR) return internal_error(std::strerror(errno));
    bool redraw = false;
    signalfd_siginfo signal{};
    while (read(signals, &signal, sizeof signal) == static_cast<ssize_t>(sizeof signal)) {
      const auto number = static_cast<int>(signal.ssi_signo);
      if (number == SIGTSTP) {
        screen.leave();
        raise(SIGSTOP);
        if (full) screen.enter();
      } else if (number != SIGWINCH) {
        return OkStatus();
      }
      redraw = true;
    }
    if ((fds[2].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
      char key = 0;
      const ssize_t n = read(STDIN_FILENO, &key, 1);
      if (n == 0 || key == 'q' || key == 'Q' || key == 3) return OkStatus();
      if (n < 0 && errno != EAGAIN && errno != EINTR) return OkStatus();  // the terminal is gone
    }
    if (auto view = looker.take()) {
      asked = false;
      shown = std::move(view);
      redraw = true;
      ++looks;
      if (!full) {
        if (!write_all(options.json ? status_json(*shown) + "\n" : (looks > 1 ? "\n" : "") + page_of(*shown)))
          return OkStatus();  // nobody reads any more
      }
      if (options.count > 0 && looks >= options.count) {
        if (full) {
          screen.leave();
          if (!write_all(page_of(*shown))) return OkStatus();  // nobody reads any more
        }
        return OkStatus();
      }
    }
    if (full && redraw && shown && !screen.draw(*shown)) return OkStatus();  // nobody reads any more
  }
}

}  // namespace conclave::cli
