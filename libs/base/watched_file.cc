#include "libs/base/watched_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace conclave {

WatchedFile::Mark WatchedFile::look() const {
  struct stat info {};
  Mark mark;
  if (stat(path_.c_str(), &info) != 0) return mark;
  mark.modified_ns = static_cast<int64_t>(info.st_mtim.tv_sec) * 1'000'000'000 + info.st_mtim.tv_nsec;
  mark.inode = info.st_ino;
  mark.size = info.st_size;
  return mark;
}

bool WatchedFile::changed() const { return !read_ || look() != mark_; }

StatusOr<std::string> WatchedFile::read() {
  mark_ = look();  // before reading: a change in between is seen at the next look
  read_ = true;
  // Without waiting for whoever might write to a pipe.
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return invalid_field(field_, "cannot read " + path_ + ": " + std::strerror(errno));
  struct stat what;
  if (::fstat(fd, &what) != 0 || !S_ISREG(what.st_mode)) {
    ::close(fd);
    return invalid_field(field_, path_ + " is no regular file");
  }
  std::string text;
  char chunk[16384];
  ssize_t got;
  while ((got = ::read(fd, chunk, sizeof chunk)) > 0 && text.size() <= max_bytes_)
    text.append(chunk, static_cast<size_t>(got));
  const int error = errno;
  ::close(fd);
  if (got < 0) return invalid_field(field_, "cannot read " + path_ + ": " + std::strerror(error));
  if (text.size() > max_bytes_)
    return invalid_field(field_, path_ + " has more than " + std::to_string(max_bytes_) + " bytes");
  return text;
}

}  // namespace conclave
