#include "cli/diag_judge.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <sstream>

namespace conclave::cli::diag {

namespace json = boost::json;

namespace {

// The soft limit; infinity where there is none.
std::optional<double> soft_limit(const json::value& host, const char* key) {
  const json::value limit = object(host, key);
  if (text(limit, "soft") == "unlimited") return INFINITY;
  return number(limit, "soft");
}

std::string bytes_text(double bytes) {
  if (std::isinf(bytes)) return "unlimited";
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit < 4; ++unit) bytes /= 1024;
  char out[40];
  std::snprintf(out, sizeof out, bytes < 10 && unit > 0 ? "%.1f %s" : "%.0f %s", bytes, kUnits[unit]);
  return out;
}
std::string count_text(double count) {
  char out[32];
  std::snprintf(out, sizeof out, "%.0f", count);
  return std::isinf(count) ? "unlimited" : out;
}

}  // namespace

const json::value* member(const json::value& value, const char* key) {
  return value.is_object() ? value.as_object().if_contains(key) : nullptr;
}
std::optional<double> number(const json::value& value, const char* key) {
  const json::value* found = member(value, key);
  if (found == nullptr || !found->is_number()) return std::nullopt;
  return found->to_number<double>();
}
std::string text(const json::value& value, const char* key) {
  const json::value* found = member(value, key);
  return found != nullptr && found->is_string() ? found->as_string().c_str() : "";
}
json::array list(const json::value& value, const char* key) {
  const json::value* found = member(value, key);
  return found != nullptr && found->is_array() ? found->as_array() : json::array{};
}
json::value object(const json::value& value, const char* key) {
  const json::value* found = member(value, key);
  return found != nullptr && found->is_object() ? *found : json::value(json::object{});
}
json::value parse(const std::string& document) {
  boost::system::error_code error;
  json::value value = json::parse(document, error);
  return error || !value.is_object() ? json::value(json::object{}) : value;
}

bool is_rdma(const std::string& transport) {
  for (const char* name : {"rc", "ud", "dc", "ib", "gga"})
    if (transport.starts_with(name)) return true;
  return false;
}
bool is_shared_memory(const std::string& transport) {
  for (const char* name : {"posix", "sysv", "xpmem", "cma", "knem", "sm"})
    if (transport.starts_with(name)) return true;
  return false;
}

std::string joined(const std::vector<std::string>& parts, const char* between) {
  std::string out;
  for (const std::string& part : parts) out += (out.empty() ? "" : between) + part;
  return out;
}

void Judge::add(Severity severity, std::string subject, std::string check, std::string what,
                std::string advice) {
  findings.push_back({severity, std::move(subject), std::move(check), std::move(what), std::move(advice)});
}

void Judge::ok(const std::string& subject, const char* check, const std::string& what) {
  add(Severity::kOk, subject, check, what);
}

void Judge::warn(const std::string& subject, const char* check, const std::string& what,
                 const std::string& advice) {
  add(Severity::kWarning, subject, check, what, advice);
}

void Judge::problem(const std::string& subject, const char* check, const std::string& what,
                    const std::string& advice) {
  add(Severity::kProblem, subject, check, what, advice);
}

void Judge::host(const std::string& subject, const json::value& h) {
  memory(subject, h);
  huge_pages(subject, h);
  kernel(subject, h);
  rdma_ports(subject, h);
}

void Judge::memlock(const std::string& subject, const json::value& h, bool rdma) {
  const auto limit = soft_limit(h, "memlock_bytes");
  if (!limit) return;
  const std::string what = "locked memory: " + bytes_text(*limit);
  if (!rdma) return ok(subject, "memlock", what + "; TCP locks none");
  if (std::isinf(*limit)) return ok(subject, "memlock", what);
  const std::string advice =
      "RDMA registers the buffers of rows: set LimitMEMLOCK=infinity (systemd), `ulimit -l unlimited`, or "
      "the "
      "capability IPC_LOCK in Kubernetes (deploy/kubernetes/overlays/gpu-rdma has it)";
  *limit < 256.0 * (1 << 20) ? problem(subject, "memlock", what + ", and RDMA is selected", advice)
                             : warn(subject, "memlock", what + ", and RDMA is selected", advice);
}

void Judge::open_files(const std::string& subject, const json::value& h, double wanted,
                       const std::string& why) {
  const auto limit = soft_limit(h, "open_files");
  if (!limit) return;
  const auto open = number(h, "open_now");
  std::string what = "open files: " + (open ? count_text(*open) + " of " : "at most ") + count_text(*limit);
  const std::string advice =
      "raise the limit (LimitNOFILE of systemd, `ulimit -n`), to " + count_text(wanted) + " or more: " + why;
  if (open && *open > 0.8 * *limit) return problem(subject, "open files", what, advice);
  if (*limit < 256) return problem(subject, "open files", what, advice);
  *limit < wanted ? warn(subject, "open files", what, advice) : ok(subject, "open files", what);
}

void Judge::shared_memory(const std::string& subject, const json::value& h, bool used) {
  const auto size = number(h, "shm_bytes"), free = number(h, "shm_free_bytes");
  if (!size) return;
  const std::string what =
      "/dev/shm: " + bytes_text(*size) + (free ? ", " + bytes_text(*free) + " free" : "");
  if (!used) return ok(subject, "/dev/shm", what + "; the selected transports use none");
  const std::string advice =
      "UCX's shared memory transports keep their buffers there: give it 1 GiB or more (a memory-backed "
      "emptyDir "
      "at /dev/shm in Kubernetes), or leave them out of transport.tls: they do not survive the death of a "
      "peer";
  if (*size < 64.0 * (1 << 20)) return problem(subject, "/dev/shm", what, advice);
  *size < 1024.0 * (1 << 20) ? warn(subject, "/dev/shm", what, advice) : ok(subject, "/dev/shm", what);
}

void Judge::processors(const std::string& subject, const json::value& h, std::optional<double> threads) {
  const double allowed = static_cast<double>(list(h, "allowed_cpus").size());
  const auto online = number(h, "online_cpus");
  const auto quota = number(h, "cpu_quota");
  std::string what = "processors: " + count_text(allowed) + (online ? " of " + count_text(*online) : "");
  if (quota) {
    char text_of_quota[48];
    std::snprintf(text_of_quota, sizeof text_of_quota, ", time of %.1f", *quota);
    what += text_of_quota;
  }
  if (threads) what += ", " + count_text(*threads) + " threads compute";
  const double room = std::min(allowed, quota.value_or(allowed));
  if (threads && allowed > 0 && *threads > std::ceil(room - 1e-9)) {
    warn(subject, "processors", what,
         quota && *quota < allowed
             ? "more threads than the control group gives time for are stopped in turns, and a step waits "
               "for "
               "each: set attention.threads or experts.threads to the limit, or raise it"
             : "threads take turns: set attention.threads or experts.threads to the processors there are");
  } else {
    ok(subject, "processors", what);
  }
  // Nodes that its processors lie on.
  std::set<double> allowed_set, nodes;
  for (const json::value& cpu : list(h, "allowed_cpus"))
    if (cpu.is_number()) allowed_set.insert(cpu.to_number<double>());
  const json::array all_nodes = list(h, "numa_nodes");
  for (const json::value& node : all_nodes) {
    for (const json::value& cpu : list(node, "cpus")) {
      if (cpu.is_number() && allowed_set.contains(cpu.to_number<double>()))
        nodes.insert(number(node, "node").value_or(-1));
    }
  }
  const std::string memory = "memory nodes: " + std::to_string(all_nodes.size()) + ", it may run on " +
                             std::to_string(nodes.size()) + " of them";
  if (nodes.size() > 1 && threads) {
    warn(subject, "numa", memory,
         "one process for each node, kept to it by attention.cpus or experts.cpus (numa:0, numa:1, ...), "
         "reads "
         "its weights and cache from memory that is near");
  } else if (!all_nodes.empty()) {
    ok(subject, "numa", memory);
  }
}

void Judge::kernels_isa(const std::string& subject, const json::value& h, const std::string& isa) {
  if (isa.empty()) return;
  std::set<std::string> features;
  for (const json::value& f : list(h, "cpu_features"))
    if (f.is_string()) features.insert(f.as_string().c_str());
  const bool avx2 = features.contains("avx2") && features.contains("fma");
  const bool avx512 = avx2 && features.contains("avx512f") && features.contains("avx512bw") &&
                      features.contains("avx512dq") && features.contains("avx512vl");
  const std::string what =
      "kernels: " + isa +
      (features.empty() ? "" : "; the CPU has " + joined({features.begin(), features.end()}, " "));
  const std::string advice =
      "CONCLAVE_ISA holds it back, or the self-check of a faster class failed (see the log of the start)";
  if ((isa == "scalar" && avx2) || (isa == "avx2" && avx512)) return warn(subject, "isa", what, advice);
  if (isa == "scalar")
    return warn(subject, "isa", what, "without AVX2 a step takes many times as long: use other machines");
  ok(subject, "isa", what);
}

void Judge::data_plane(const std::string& subject, const std::string& words, const std::string& tls,
                       const std::string& interface, const json::value& h, bool many_hosts) {
  const UcxTransports seen = ucx_transports(words);
  const std::string settings = "transport.tls " + tls + ", transport.interface " + interface;
  if (seen.available.empty())
    return problem(subject, "data plane", "UCX found nothing to use (" + settings + ")",
                   "transport.interface must name a device that is up here");
  std::string what = "UCX may use " + joined(seen.available) + "; ";
  what += seen.in_use.empty() ? "no peer is connected" : "its connections use " + joined(seen.in_use);
  const std::vector<std::string>& used = seen.in_use.empty() ? seen.available : seen.in_use;
  size_t active = 0;
  std::string ports;
  for (const json::value& port : list(h, "rdma_ports")) {
    if (text(port, "state") != "ACTIVE") continue;
    ++active;
    ports += (ports.empty() ? "" : ",") + text(port, "device") + ":" +
             count_text(number(port, "port").value_or(0));
  }
  if (active > 0 && !std::any_of(used.begin(), used.end(), is_rdma)) {
    return warn(subject, "data plane", what + ", though " + ports + " is active",
                "set transport.interface: " + ports + " and transport.tls: rc,ud (docs/tuning.md)");
  }
  const bool loopback = std::all_of(seen.available.begin(), seen.available.end(),
                                    [](const std::string& one) { return one.ends_with("/lo"); });
  if (loopback && many_hosts) {
    return problem(subject, "data plane", what + ", and members are on several hosts",
                   "transport.interface: lo reaches this host only; name the network's device");
  }
  ok(subject, "data plane", what);
}

void Judge::clocks(const std::vector<ProcessReport>& processes) {
  double low = INFINITY, high = -INFINITY, bound = 0;
  std::string lowest, highest;
  size_t measured = 0;
  for (const ProcessReport& one : processes) {
    if (!one.clock) continue;
    ++measured;
    bound = std::max(bound, one.clock->bound_s);
    if (one.clock->offset_s < low) low = one.clock->offset_s, lowest = one.process.name;
    if (one.clock->offset_s > high) high = one.clock->offset_s, highest = one.process.name;
  }
  if (measured == 0) return;
  const auto ms = [](double s) {
    char out[32];
    std::snprintf(out, sizeof out, std::fabs(s) < 0.1 ? "%.2f ms" : "%.0f ms", s * 1000);
    return std::string(out);
  };
  // Ours is one of them.
  if (low > 0) low = 0, lowest = "this process";
  if (high < 0) high = 0, highest = "this process";
  const double apart = high - low;
  const std::string what = "clocks of " + std::to_string(measured) + " processes are within " + ms(apart) +
                           ", each known to " + ms(bound) + " (half of a round trip)";
  // What is certain.
  const double certain = apart - 2 * bound;
  const std::string advice =
      "between " + lowest + " and " + highest +
      ": run a time service (chrony, systemd-timesyncd) on both hosts; logs and timelines "
      "of several processes are put together by their clocks";
  if (certain > kSkewProblem_s) return problem("cluster", "clocks", what, advice);
  certain > kSkewWarning_s ? warn("cluster", "clocks", what, advice) : ok("cluster", "clocks", what);
}

void Judge::memory(const std::string& subject, const json::value& h) {
  const auto all = number(h, "memory_bytes"), free = number(h, "available_bytes");
  if (!all || !free) return;
  const auto limit = number(h, "memory_limit_bytes");
  const auto swap = number(h, "swap_used_bytes");
  std::string what = "memory: " + bytes_text(*free) + " of " + bytes_text(*all) + " available";
  if (limit) what += ", the control group allows " + bytes_text(*limit);
  if (*free < 0.03 * *all)
    return problem(
        subject, "memory", what,
        "weights are mapped files: once their pages are pushed out, steps wait for the disk. More memory, "
        "fewer processes here, or a smaller attention.kv_bytes");
  if (swap && *swap > 0.01 * *all)
    return warn(subject, "memory", what + ", " + bytes_text(*swap) + " swapped out",
                "a process that waits for swap misses its lease: turn swap off, or set vm.swappiness to 1");
  ok(subject, "memory", what);
}

void Judge::huge_pages(const std::string& subject, const json::value& h) {
  const double reserved = number(h, "huge_pages_total").value_or(0);
  const double page = number(h, "huge_page_bytes").value_or(0);
  const std::string mode = text(h, "transparent_huge_pages");
  std::string what = "huge pages: " + count_text(reserved) + " reserved";
  if (!mode.empty()) what += ", transparent ones: " + mode;
  if (reserved * page > 64.0 * (1 << 20) && number(h, "huge_pages_free").value_or(0) >= reserved * 0.9) {
    return warn(
        subject, "huge pages", what + ", of which none is used",
        "weights are mapped from files and use none of them: " + bytes_text(reserved * page) +
            " are lost to the page cache; set vm.nr_hugepages to 0, unless something else needs them");
  }
  ok(subject, "huge pages", what);
}

void Judge::kernel(const std::string& subject, const json::value& h) {
  const json::value settings = object(h, "settings");
  const auto value = [&settings](const char* name) -> std::optional<double> {
    const std::string words = text(settings, name);
    if (words.empty()) return std::nullopt;
    std::istringstream in(words);
    double first = 0;
    in >> first;
    return in ? std::optional<double>(first) : std::nullopt;
  };
  const auto last = [&settings](const char* name) -> std::optional<double> {
    std::istringstream in(text(settings, name));
    std::optional<double> out;
    for (double one; in >> one;) out = one;
    return out;
  };
  bool quiet = true;
  const auto note = [&](const char* name, const std::string& why) {
    quiet = false;
    warn(subject, "kernel", std::string(name) + " is " + text(settings, name), why);
  };
  if (const auto v = value("net.core.somaxconn"); v && *v < 1024)
    note("net.core.somaxconn", "many clients that connect at once are turned away: set it to 4096");
  if (const auto v = last("net.ipv4.tcp_rmem"); v && *v < 4.0 * (1 << 20))
    note("net.ipv4.tcp_rmem",
         "a dispatch of a large batch does not fit: let the third number be 6 MiB or more");
  if (const auto v = last("net.ipv4.tcp_wmem"); v && *v < 2.0 * (1 << 20))
    note("net.ipv4.tcp_wmem",
         "a dispatch of a large batch does not fit: let the third number be 4 MiB or more");
  if (const auto v = value("vm.overcommit_memory"); v && *v == 2)
    note("vm.overcommit_memory",
         "the KV cache is reserved at the start and used as it fills: set it to 0 or 1");
  if (const auto v = value("vm.zone_reclaim_mode"); v && *v != 0)
    note("vm.zone_reclaim_mode", "pages of weights are dropped while other nodes have room: set it to 0");
  const std::string clock = text(h, "clock_source");
  if (clock == "hpet" || clock == "acpi_pm" || clock == "jiffies") {
    quiet = false;
    warn(subject, "kernel", "the clock source is " + clock,
         "reading the clock is slow there, and each step reads it many times: use tsc (or the hypervisor's "
         "own)");
  }
  if (quiet) ok(subject, "kernel", "kernel " + text(h, "kernel") + ", its settings suit");
}

void Judge::rdma_ports(const std::string& subject, const json::value& h) {
  const json::array ports = list(h, "rdma_ports");
  if (ports.empty()) return ok(subject, "rdma", "no RDMA device; the data plane uses TCP");
  std::vector<std::string> shown;
  bool up = false;
  for (const json::value& port : ports) {
    up = up || text(port, "state") == "ACTIVE";
    shown.push_back(text(port, "device") + ":" + count_text(number(port, "port").value_or(0)) + " " +
                    text(port, "state") + " " + text(port, "link_layer") + " " + text(port, "rate"));
  }
  const json::value* usable = member(h, "rdma_usable");
  if (!up)
    return warn(subject, "rdma", joined(shown), "no port is active: cables, the subnet manager, the switch");
  if (usable == nullptr || !usable->is_bool() || !usable->as_bool())
    return problem(
        subject, "rdma", joined(shown) + "; /dev/infiniband cannot be opened",
        "give the process the device (rdma/* resources in Kubernetes, --device=/dev/infiniband in Docker)");
  ok(subject, "rdma", joined(shown));
}

}  // namespace conclave::cli::diag
