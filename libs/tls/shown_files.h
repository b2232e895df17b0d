// The certificates that gRPC is to show, as files that are always whole. gRPC takes files only, looks at them
// when it likes, and ends the process when it meets an empty one, as a file is for a moment that is written
// in place. So it gets copies in memory of what was read and found good. Not for several threads at once.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "libs/base/status.h"

namespace conclave::tls {

class ShownFiles {
 public:
  ShownFiles() = default;
  ~ShownFiles();
  ShownFiles(const ShownFiles&) = delete;
  ShownFiles& operator=(const ShownFiles&) = delete;

  // From now on the paths lead to these texts. RESOURCE_EXHAUSTED: there is no memory or descriptor for them,
  // and what was shown before is shown still.
  Status show(std::string_view ca, std::string_view certificate, std::string_view key);

  // Of this process alone; they stay the same. Empty before the first show().
  const std::string& ca_path() const { return paths_[0]; }
  const std::string& certificate_path() const { return paths_[1]; }
  const std::string& key_path() const { return paths_[2]; }

 private:
  std::array<int, 3> files_ = {-1, -1, -1};
  std::array<std::string, 3> paths_;
};

}  // namespace conclave::tls
