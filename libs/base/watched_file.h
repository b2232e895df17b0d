// A small file that people or an orchestrator replace while we run: a file of keys, a certificate, a secret.
// It may lie on any kind of file system and be replaced by renames and links (as Kubernetes does with
// Secrets), so there is no notification: who wants to know looks.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "libs/base/status.h"

namespace conclave {

// Not thread-safe.
class WatchedFile {
 public:
  // `field`: the config key that errors name.
  WatchedFile(std::string path, std::string field, uint64_t max_bytes)
      : path_(std::move(path)), field_(std::move(field)), max_bytes_(max_bytes) {}

  const std::string& path() const { return path_; }
  const std::string& field() const { return field_; }

  // INVALID_ARGUMENT naming the field when it cannot be read or has more than max_bytes.
  StatusOr<std::string> read();
  // Whether it looks other than at the last read(); true before the first.
  bool changed() const;

 private:
  struct Mark {
    int64_t modified_ns = 0;
    uint64_t inode = 0;
    int64_t size = -1;  // -1: not there
    bool operator==(const Mark&) const = default;
  };
  Mark look() const;

  std::string path_;
  std::string field_;
  uint64_t max_bytes_;
  Mark mark_;
  bool read_ = false;
};

}  // namespace conclave
