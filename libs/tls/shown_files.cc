#include "libs/tls/shown_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace conclave::tls {
namespace {

// A file in memory with the text; -1 and errno where there can't be one.
int memory_file(std::string_view text) {
  const int file = memfd_create("conclave-tls", MFD_CLOEXEC);
  if (file < 0) return -1;
  while (!text.empty()) {
    const ssize_t wrote = write(file, text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) {
      close(file);
      return -1;
    }
    text.remove_prefix(static_cast<size_t>(wrote));
  }
  return file;
}

}  // namespace

ShownFiles::~ShownFiles() {
  for (const int file : files_) {
    if (file >= 0) close(file);
  }
}

Status ShownFiles::show(std::string_view ca, std::string_view certificate, std::string_view key) {
  std::array<int, 3> next = {memory_file(ca), memory_file(certificate), memory_file(key)};
  for (const int file : next) {
    if (file >= 0) continue;
    const std::string why = std::strerror(errno);
    for (const int made : next) {
      if (made >= 0) close(made);
    }
    return resource_exhausted("cannot keep certificates in memory: " + why);
  }
  for (size_t i = 0; i < next.size(); ++i) {
    if (files_[i] < 0) {
      files_[i] = next[i];
      paths_[i] = "/proc/self/fd/" + std::to_string(next[i]);
    } else {
      // The number stays and leads to the new file at once: nobody meets half of one.
      dup3(next[i], files_[i], O_CLOEXEC);
      close(next[i]);
    }
  }
  return OkStatus();
}

}  // namespace conclave::tls
