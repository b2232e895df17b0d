#include "libs/telemetry/host_facts.h"

#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "libs/base/cpu_set.h"
#include "libs/base/json_escape.h"

namespace conclave {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxFile = 1 << 20;  // of any one file that is read here
constexpr std::array<std::string_view, 15> kFeatures = {
    "f16c",        "fma",         "avx2",     "avx512f",  "avx512bw", "avx512vl", "avx512dq", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "sve",      "asimd"};
constexpr std::array<std::string_view, 12> kSettings = {"net.core.somaxconn",
                                                        "net.core.rmem_max",
                                                        "net.core.wmem_max",
                                                        "net.ipv4.tcp_rmem",
                                                        "net.ipv4.tcp_wmem",
                                                        "net.ipv4.ip_local_port_range",
                                                        "net.ipv4.tcp_slow_start_after_idle",
                                                        "vm.overcommit_memory",
                                                        "vm.max_map_count",
                                                        "vm.swappiness",
                                                        "vm.zone_reclaim_mode",
                                                        "kernel.numa_balancing"};

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  std::string text(kMaxFile, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

std::optional<uint64_t> number_in(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  return value;
}

// The rest of the line that begins with `key`, without what separates them.
std::optional<std::string_view> line_of(std::string_view text, std::string_view key) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line = text.substr(at, end - at);
    at = end + 1;
    if (!line.starts_with(key)) continue;
    line.remove_prefix(key.size());
    const size_t begin = line.find_first_not_of(" \t:");
    return begin == std::string_view::npos ? std::string_view() : line.substr(begin);
  }
  return std::nullopt;
}

// "0-3,8" as the kernel writes lists of processors.
std::vector<uint32_t> cpu_list(std::string_view text) {
  std::vector<uint32_t> out;
  while (!text.empty()) {
    const size_t end = std::min(text.find(','), text.size());
    const std::string_view part = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const auto first = number_in(part);
    if (!first) continue;
    const size_t dash = part.find('-');
    const auto last = dash == std::string_view::npos ? first : number_in(part.substr(dash + 1));
    for (uint64_t cpu = *first; last && cpu <= *last && out.size() < 65536; ++cpu)
      out.push_back(static_cast<uint32_t>(cpu));
  }
  return out;
}

std::optional<HostFacts::Limit> limit_of(__rlimit_resource_t what) {
  rlimit value{};
  if (getrlimit(what, &value) != 0) return std::nullopt;
  const auto plain = [](rlim_t v) { return v == RLIM_INFINITY ? UINT64_MAX : static_cast<uint64_t>(v); };
  return HostFacts::Limit{plain(value.rlim_cur), plain(value.rlim_max)};
}

void read_cpus(HostFacts& out, const std::string& root) {
  if (const auto text = read_text(root + "/proc/cpuinfo")) {
    if (const auto name = line_of(*text, "model name")) out.cpu = std::string(*name);
    auto flags = line_of(*text, "flags");
    if (!flags) flags = line_of(*text, "Features");
    std::istringstream words{std::string(flags.value_or(""))};
    for (std::string word; words >> word;)
      if (std::find(kFeatures.begin(), kFeatures.end(), word) != kFeatures.end())
        out.cpu_features.push_back(word);
  }
  if (const auto text = read_text(root + "/sys/devices/system/cpu/online"))
    out.online_cpus = static_cast<uint32_t>(cpu_list(*text).size());
  for (const uint32_t cpu : allowed_cpus()) out.allowed_cpus.push_back(cpu);
  std::error_code error;
  for (fs::directory_iterator at(root + "/sys/devices/system/node", error), end; !error && at != end;
       at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with("node")) continue;
    const auto number = number_in(std::string_view(name).substr(4));
    const auto cpus = read_text(at->path().string() + "/cpulist");
    if (number && cpus) out.numa_nodes.push_back({static_cast<uint32_t>(*number), cpu_list(*cpus)});
  }
  std::sort(out.numa_nodes.begin(), out.numa_nodes.end(),
            [](const auto& a, const auto& b) { return a.number < b.number; });
  if (const auto text = read_text(root + "/sys/fs/cgroup/cpu.max")) {  // "150000 100000", or "max 100000"
    const auto quota = number_in(*text);
    const size_t space = text->find(' ');
    const auto period = space == std::string::npos ? std::nullopt : number_in(text->substr(space));
    if (quota && period && *period > 0)
      out.cpu_quota = static_cast<double>(*quota) / static_cast<double>(*period);
  }
}

void read_memory(HostFacts& out, const std::string& root) {
  if (const auto text = read_text(root + "/proc/meminfo")) {
    const auto bytes = [&text](const char* key) -> std::optional<uint64_t> {
      const auto line = line_of(*text, key);
      const auto value = line ? number_in(*line) : std::nullopt;
      if (!value) return std::nullopt;
      return *value * 1024;
    };
    const auto count = [&text](const char* key) {
      const auto line = line_of(*text, key);
      return line ? number_in(*line) : std::nullopt;
    };
    out.memory_bytes = bytes("MemTotal");
    out.available_bytes = bytes("MemAvailable");
    out.huge_page_bytes = bytes("Hugepagesize");
    out.huge_pages_total = count("HugePages_Total");
    out.huge_pages_free = count("HugePages_Free");
    const auto total = bytes("SwapTotal"), free = bytes("SwapFree");
    if (total && free && *free <= *total) out.swap_used_bytes = *total - *free;
  }
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    const auto text = read_text(root + path);
    const auto value = text ? number_in(*text) : std::nullopt;
    if (value && *value < UINT64_MAX / 4) out.memory_limit_bytes = value;
  }
  if (const auto text = read_text(root + "/sys/kernel/mm/transparent_hugepage/enabled")) {
    const size_t begin = text->find('['), end = text->find(']');
    if (begin != std::string::npos && end != std::string::npos && end > begin)
      out.transparent_huge_pages = text->substr(begin + 1, end - begin - 1);
  }
  struct statvfs shm {};
  if (statvfs((root + "/dev/shm").c_str(), &shm) == 0) {
    out.shm_bytes = static_cast<uint64_t>(shm.f_blocks) * shm.f_frsize;
    out.shm_free_bytes = static_cast<uint64_t>(shm.f_bavail) * shm.f_frsize;
  }
}

// What follows ": " in "4: ACTIVE"; else all of it.
std::string after_colon(const std::string& text) {
  const size_t at = text.find(": ");
  return at == std::string::npos ? text : text.substr(at + 2);
}

void read_rdma(HostFacts& out, const std::string& root) {
  std::error_code error;
  std::vector<fs::path> devices;
  for (fs::directory_iterator at(root + "/sys/class/infiniband", error), end; !error && at != end;
       at.increment(error))
    devices.push_back(at->path());
  std::sort(devices.begin(), devices.end());
  for (const fs::path& device : devices) {
    for (uint32_t port = 1; port <= 8; ++port) {
      const std::string base = device.string() + "/ports/" + std::to_string(port);
      const auto state = read_text(base + "/state");
      if (!state) break;
      out.rdma_ports.push_back({device.filename().string(), port, after_colon(*state),
                                read_text(base + "/link_layer").value_or(""),
                                read_text(base + "/rate").value_or("")});
    }
  }
  std::error_code none;
  for (fs::directory_iterator at(root + "/dev/infiniband", none), end; !none && at != end;
       at.increment(none)) {
    if (!at->path().filename().string().starts_with("uverbs")) continue;
    const bool usable = access(at->path().c_str(), R_OK | W_OK) == 0;
    out.rdma_usable = out.rdma_usable.value_or(true) && usable;
  }
}

// --- JSON

class Object {
 public:
  void text(const char* key, std::string_view value) { add(key, json_quoted(value)); }
  void text_or_null(const char* key, const std::string& value) {
    add(key, value.empty() ? "null" : json_quoted(value));
  }
  void number(const char* key, uint64_t value) { add(key, std::to_string(value)); }
  void number(const char* key, const std::optional<uint64_t>& value) {
    add(key, value ? std::to_string(*value) : "null");
  }
  void limit(const char* key, const std::optional<HostFacts::Limit>& value) {
    const auto one = [](uint64_t v) {
      return v == UINT64_MAX ? std::string("\"unlimited\"") : std::to_string(v);
    };
    add(key, value ? "{\"soft\":" + one(value->first) + ",\"hard\":" + one(value->second) + "}" : "null");
  }
  void numbers(const char* key, const std::vector<uint32_t>& values) {
    std::string list;
    for (const uint32_t value : values) list += (list.empty() ? "" : ",") + std::to_string(value);
    add(key, "[" + list + "]");
  }
  void add(const char* key, const std::string& json) {
    text_ += (text_.empty() ? "\"" : ",\"") + std::string(key) + "\":" + json;
  }
  std::string json() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

}  // namespace

HostFacts read_host_facts(const std::string& root) {
  HostFacts out;
  char host[256] = "";
  if (gethostname(host, sizeof host - 1) == 0) out.host = host;
  out.kernel = read_text(root + "/proc/sys/kernel/osrelease").value_or("");
  read_cpus(out, root);
  read_memory(out, root);
  out.memlock_bytes = limit_of(RLIMIT_MEMLOCK);
  out.open_files = limit_of(RLIMIT_NOFILE);
  out.core_bytes = limit_of(RLIMIT_CORE);
  std::error_code error;
  uint64_t open = 0, threads = 0;
  for (fs::directory_iterator at("/proc/self/fd", error), end; !error && at != end; at.increment(error))
    ++open;
  if (!error && open > 0) out.open_now = open - 1;  // not our look
  for (fs::directory_iterator at("/proc/self/task", error), end; !error && at != end; at.increment(error))
    ++threads;
  out.threads = static_cast<uint32_t>(threads);
  for (const std::string_view name : kSettings) {
    std::string path(name);
    std::replace(path.begin(), path.end(), '.', '/');
    if (auto value = read_text(root + "/proc/sys/" + path)) {
      std::replace(value->begin(), value->end(), '\t', ' ');
      out.settings.emplace_back(name, *value);
    }
  }
  out.clock_source =
      read_text(root + "/sys/devices/system/clocksource/clocksource0/current_clocksource").value_or("");
  read_rdma(out, root);
  return out;
}

std::string host_facts_json(const HostFacts& facts) {
  Object out;
  out.text("host", facts.host);
  out.text_or_null("kernel", facts.kernel);
  out.text_or_null("cpu", facts.cpu);
  std::string list;
  for (const std::string& feature : facts.cpu_features)
    list += (list.empty() ? "" : ",") + json_quoted(feature);
  out.add("cpu_features", "[" + list + "]");
  out.numbers("allowed_cpus", facts.allowed_cpus);
  out.number("online_cpus", facts.online_cpus);
  char quota[32] = "null";
  if (facts.cpu_quota) std::snprintf(quota, sizeof quota, "%.3f", *facts.cpu_quota);
  out.add("cpu_quota", quota);
  list.clear();
  for (const HostFacts::Node& node : facts.numa_nodes) {
    Object one;
    one.number("node", node.number);
    one.numbers("cpus", node.cpus);
    list += (list.empty() ? "" : ",") + one.json();
  }
  out.add("numa_nodes", "[" + list + "]");
  out.limit("memlock_bytes", facts.memlock_bytes);
  out.limit("open_files", facts.open_files);
  out.limit("core_bytes", facts.core_bytes);
  out.number("open_now", facts.open_now);
  out.number("threads", facts.threads);
  out.number("memory_bytes", facts.memory_bytes);
  out.number("memory_limit_bytes", facts.memory_limit_bytes);
  out.number("available_bytes", facts.available_bytes);
  out.number("swap_used_bytes", facts.swap_used_bytes);
  out.number("huge_pages_total", facts.huge_pages_total);
  out.number("huge_pages_free", facts.huge_pages_free);
  out.number("huge_page_bytes", facts.huge_page_bytes);
  out.text_or_null("transparent_huge_pages", facts.transparent_huge_pages);
  out.number("shm_bytes", facts.shm_bytes);
  out.number("shm_free_bytes", facts.shm_free_bytes);
  Object settings;
  for (const auto& [name, value] : facts.settings) settings.text(name.c_str(), value);
  out.add("settings", settings.json());
  out.text_or_null("clock_source", facts.clock_source);
  list.clear();
  for (const HostFacts::RdmaPort& port : facts.rdma_ports) {
    Object one;
    one.text("device", port.device);
    one.number("port", port.port);
    one.text("state", port.state);
    one.text("link_layer", port.link_layer);
    one.text("rate", port.rate);
    list += (list.empty() ? "" : ",") + one.json();
  }
  out.add("rdma_ports", "[" + list + "]");
  out.add("rdma_usable", facts.rdma_usable ? (*facts.rdma_usable ? "true" : "false") : "null");
  return out.json();
}

}  // namespace conclave
