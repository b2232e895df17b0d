// One child process that renders templates, and the frames to and from it.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/text/chat_template.h"

namespace conclave::text {

// An answer of the child: the kind (see template_child.py) and what follows it.
struct ChildAnswer {
  char kind = 0;
  std::string body;
};

// Not thread-safe. The process is killed and reaped by the destructor.
class TemplateProcess {
 public:
  // Starts a child and hands it `config` (a JSON text). Call it from a thread that outlives the child: the
  // kernel kills the child when that thread ends. Gives up with CANCELLED when `cancel_fd` becomes readable.
  static StatusOr<std::unique_ptr<TemplateProcess>> spawn(const ChatTemplateOptions& options,
                                                          const std::string& config, int cancel_fd);
  ~TemplateProcess();
  TemplateProcess(const TemplateProcess&) = delete;
  TemplateProcess& operator=(const TemplateProcess&) = delete;

  // Sends `flags` and `document` and waits for the answer. After any error the process is of no more use.
  StatusOr<ChildAnswer> call(char flags, std::string_view document, TimePoint deadline);
  // False when the idle child has died or said something unasked.
  bool healthy() const;
  int pid() const { return pid_; }

 private:
  TemplateProcess(int pid, int fd, size_t max_frame_bytes)
      : pid_(pid), fd_(fd), max_frame_bytes_(max_frame_bytes) {}
  Status wait_for(short events, TimePoint deadline, int cancel_fd) const;
  Status send_frame(std::string_view head, std::string_view body, TimePoint deadline, int cancel_fd);
  Status receive_exactly(char* out, size_t n, TimePoint deadline, int cancel_fd);
  StatusOr<ChildAnswer> receive_frame(TimePoint deadline, int cancel_fd);
  Status died();

  int pid_;
  int fd_;
  size_t max_frame_bytes_;
};

}  // namespace conclave::text
