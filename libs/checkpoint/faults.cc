#include "libs/checkpoint/faults.h"

namespace conclave {

std::string printable(std::string_view text) {
  constexpr size_t kMaxBytes = 200;
  std::string out(text.substr(0, kMaxBytes));
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  if (text.size() > kMaxBytes) out += "...";
  return out;
}

void FaultList::add(std::string_view where, std::string_view what) {
  if (count_++ == 0) first_where_ = printable(where);
  if (lines_.size() < kMaxFaultsListed) lines_.push_back(printable(where) + ": " + std::string(what));
}

Status FaultList::to_status(std::string_view subject) const {
  if (count_ == 0) return OkStatus();
  std::string message(subject);
  message += ": " + std::to_string(count_) + (count_ == 1 ? " fault" : " faults");
  for (const std::string& line : lines_) message += "\n  " + line;
  if (count_ > lines_.size()) message += "\n  ... and " + std::to_string(count_ - lines_.size()) + " more";
  return invalid_field(first_where_, message);
}

}  // namespace conclave
