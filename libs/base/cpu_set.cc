#include "libs/base/cpu_set.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>

namespace conclave {
namespace {

constexpr uint32_t kMaxCpus = CPU_SETSIZE;

bool number(std::string_view text, uint32_t& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

// A list as the kernel writes it; false when it is none.
bool parse_list(std::string_view text, std::vector<uint32_t>& out) {
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    const size_t dash = part.find('-');
    uint32_t first = 0;
    uint32_t last = 0;
    if (!number(part.substr(0, dash), first)) return false;
    last = first;
    if (dash != std::string_view::npos && !number(part.substr(dash + 1), last)) return false;
    if (last < first || last >= kMaxCpus) return false;
    for (uint32_t cpu = first; cpu <= last; ++cpu) out.push_back(cpu);
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return !out.empty();
}

}  // namespace

StatusOr<std::vector<uint32_t>> parse_cpus(std::string_view text, std::string_view field) {
  constexpr std::string_view kNuma = "numa:";
  std::string list(text);
  if (text.starts_with(kNuma)) {
    uint32_t node = 0;
    if (!number(text.substr(kNuma.size()), node)) {
      return invalid_field(field, "must be a list as 0-3,8 or numa:N, not '" + list + "'");
    }
    std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
    if (!std::getline(file, list)) {
      return invalid_field(field, "this machine has no memory node " + std::to_string(node));
    }
  }
  std::vector<uint32_t> cpus;
  if (!parse_list(list, cpus)) {
    return invalid_field(field, "must be a list as 0-3,8 or numa:N with processors below " +
                                    std::to_string(kMaxCpus) + ", not '" + list + "'");
  }
  return cpus;
}

Status bind_to_cpus(std::span<const uint32_t> cpus, std::string_view field) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const uint32_t cpu : cpus) {
    if (cpu < kMaxCpus) CPU_SET(cpu, &set);
  }
  if (sched_setaffinity(0, sizeof(set), &set) == 0) return OkStatus();
  return invalid_field(field, std::string("cannot run on these processors: ") + std::strerror(errno));
}

std::vector<uint32_t> allowed_cpus() {
  std::vector<uint32_t> out;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return out;
  for (uint32_t cpu = 0; cpu < kMaxCpus; ++cpu) {
    if (CPU_ISSET(cpu, &set)) out.push_back(cpu);
  }
  return out;
}

}  // namespace conclave
