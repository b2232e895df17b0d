// A child process of a test: started from the build's bin directory, watched, and ended with the test.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"

namespace conclave {

// Where a child runs, if not as this process does.
struct Surroundings {
  std::string netns;                     // a network namespace (tests/cluster/relay); empty: ours
  std::vector<std::string> environment;  // NAME=VALUE, beside ours
};

class Process {
 public:
  // Starts CONCLAVE_BIN_DIR/`program` with its output in `log`.
  static Process start(const std::string& program, const std::vector<std::string>& arguments,
                       const std::string& log, const Surroundings& where = {});
  Process() = default;
  ~Process();
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;

  pid_t pid() const { return pid_; }
  bool running();
  void signal(int number);
  // Waits for the end; the exit code, 128 + signal, or nothing after `limit`.
  std::optional<int> wait(Nanos limit);
  // SIGKILL, and waits.
  void kill();
  std::string log() const;

  // Of /proc: seconds of CPU used so far, and anonymous memory in bytes.
  double cpu_seconds() const;
  uint64_t anonymous_bytes() const;
  // Open file descriptors.
  size_t descriptors() const;

 private:
  pid_t pid_ = -1;
  std::optional<int> ended_;
  std::string log_;
};

// The strings of a flat JSON object as ready files have it; empty while there is none that says "started".
std::map<std::string, std::string> read_ready_file(const std::string& path);
// GET http://address/path; status code and body, or a Status when nobody answers.
struct HttpAnswer {
  int code = 0;
  std::string body;
};
// `headers`: further header lines, each with its line end. `on_bytes` is told of each piece of the answer as
// it comes, with its headers and chunk headers; `limit` is for each piece.
StatusOr<HttpAnswer> http_get(const std::string& address, const std::string& path, Nanos limit = 5 * kSecond,
                              const std::function<void(std::string_view)>& on_bytes = {},
                              const std::string& headers = "");
// POST of a JSON body, on a connection of its own; the body of the answer without its chunk headers.
StatusOr<HttpAnswer> http_post(const std::string& address, const std::string& path, const std::string& json,
                               Nanos limit, const std::function<void(std::string_view)>& on_bytes = {},
                               const std::string& headers = "");

}  // namespace conclave
