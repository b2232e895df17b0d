// Collects what is wrong with a checkpoint, so that one message tells it all. Bounded: a broken file of a
// hundred thousand tensors must not make a message of a hundred thousand lines.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"

namespace conclave {

// Faults whose text is kept and shown; further ones are only counted.
inline constexpr size_t kMaxFaultsListed = 100;

class FaultList {
 public:
  // `where` names the tensor, config field or file at fault.
  void add(std::string_view where, std::string_view what);
  bool empty() const { return count_ == 0; }
  // All faults, those beyond kMaxFaultsListed included.
  size_t count() const { return count_; }
  // "where: what", at most kMaxFaultsListed.
  const std::vector<std::string>& lines() const { return lines_; }
  // OK when empty; otherwise INVALID_ARGUMENT whose field is the first `where` and whose message is
  // `subject`, the count, and one line a fault.
  Status to_status(std::string_view subject) const;

 private:
  size_t count_ = 0;
  std::string first_where_;
  std::vector<std::string> lines_;
};

// A name from a file, safe to print: at most 200 bytes, control characters replaced.
std::string printable(std::string_view text);

}  // namespace conclave
