// conclave-test-relay: network namespaces of this run, joined by TUN devices whose packets this program
// carries, with delay, loss and cuts for each link. For tests; needs root, `ip` and /dev/net/tun.
//
//   conclave-test-relay SEED NODE...
//
// A namespace for each node, and a device on the host, which is the node "host". Prints one line
// "node NAME NAMESPACE DEVICE ADDRESS" for each, then "ready"; or "cannot REASON", and ends with 77. Commands
// come as lines on its standard input, each answered by one line:
//
//   set A B DELAY_US LOSS CUT     both directions of the link; LOSS is a share, CUT 0 or 1: "ok"
//   counts A B                    packets from A to B: "FORWARDED LOST CUT"
//
// At the end of its input, or at SIGTERM, it ends the processes in its namespaces and removes them. Names
// carry its process id: whatever a killed run left behind, the next one removes.
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "tests/cluster/relay/link_model.h"

extern char** environ;

namespace conclave {
namespace {

namespace fs = std::filesystem;

constexpr int kCannot = 77;
constexpr int kMtu = 65000;
constexpr int kPacketsPerTurn = 64;
constexpr size_t kMaxHeldBytes = 256u << 20;  // of packets that wait for their delay; past it they are lost
constexpr char kPrefix[] = "cv";              // of namespaces and devices: cv<pid>n<node>
constexpr char kNamespaces[] = "/run/netns";

[[noreturn]] void cannot(const std::string& why) {
  std::printf("cannot %s\n", why.c_str());
  std::fflush(stdout);
  std::exit(kCannot);
}

// Runs a program without output; whether it ended well.
bool run(std::vector<std::string> words) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  pid_t pid = -1;
  const int error = posix_spawnp(&pid, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  int status = 0;
  return error == 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool ip(std::vector<std::string> words) {
  words.insert(words.begin(), "ip");
  return run(std::move(words));
}

// Ends every process whose network is this namespace, and takes its name away.
void remove_namespace(const std::string& name) {
  std::error_code error;
  const fs::path path = fs::path(kNamespaces) / name;
  struct stat wanted {};
  if (stat(path.c_str(), &wanted) == 0) {
    for (const auto& entry : fs::directory_iterator("/proc", error)) {
      const std::string id = entry.path().filename();
      if (id.find_first_not_of("0123456789") != std::string::npos) continue;
      struct stat its {};
      if (stat((entry.path() / "ns/net").c_str(), &its) != 0) continue;
      if (its.st_ino == wanted.st_ino && its.st_dev == wanted.st_dev) kill(std::atoi(id.c_str()), SIGKILL);
    }
  }
  ip({"netns", "del", name});
}

// Namespaces of runs that are gone: their process id is no relay any more.
void remove_left_behind() {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error).filename();
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(kNamespaces, error)) {
    const std::string name = entry.path().filename();
    unsigned pid = 0, node = 0;
    int read = 0;
    const std::string format = std::string(kPrefix) + "%un%u%n";
    if (std::sscanf(name.c_str(), format.c_str(), &pid, &node, &read) != 2 ||
        static_cast<size_t>(read) != name.size()) {
      continue;
    }
    std::error_code gone;
    const fs::path program = fs::read_symlink("/proc/" + std::to_string(pid) + "/exe", gone).filename();
    if (gone || program != self) left.push_back(name);
  }
  for (const std::string& name : left) remove_namespace(name);
}

// A /24 of the range for benchmarks (RFC 2544) that no device of the host has.
std::string free_network() {
  std::set<std::string> taken;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) == 0) {
    for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
      if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET) continue;
      std::array<char, INET_ADDRSTRLEN> text{};
      inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr, text.data(),
                text.size());
      const std::string address = text.data();
      taken.insert(address.substr(0, address.rfind('.')));
    }
    freeifaddrs(list);
  }
  for (int i = 0; i < 512; ++i) {
    const int n = (getpid() + i) % 512;
    const std::string network = "198." + std::to_string(18 + n / 256) + "." + std::to_string(n % 256);
    if (!taken.contains(network)) return network;
  }
  cannot("find a free network");
}

struct Node {
  std::string name;
  std::string device;  // the namespace is called the same; the host's node has none
  std::string address;
  int fd = -1;
};

int open_tun(const std::string& name) {
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return -1;
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
  if (ioctl(fd, TUNSETIFF, &request) == 0) return fd;
  close(fd);
  return -1;
}

class Relay {
 public:
  Relay(uint64_t seed, const std::vector<std::string>& names)
      : model_(seed, static_cast<uint32_t>(names.size())) {
    const std::string network = free_network();
    for (size_t i = 0; i < names.size(); ++i) {
      nodes_.push_back({names[i], kPrefix + std::to_string(getpid()) + "n" + std::to_string(i),
                        network + "." + std::to_string(i + 1), -1});
    }
  }
  ~Relay() {
    for (const Node& node : nodes_) {
      if (node.name != "host") remove_namespace(node.device);
      if (node.fd >= 0) close(node.fd);
    }
  }

  // What could not be done; empty: all of it was.
  std::string set_up() {
    for (Node& node : nodes_) {
      node.fd = open_tun(node.device);
      if (node.fd < 0) return std::string("make a TUN device: ") + std::strerror(errno);
      std::vector<std::string> in;
      if (node.name != "host") {
        if (!ip({"netns", "add", node.device})) return "add a network namespace";
        if (!ip({"link", "set", node.device, "netns", node.device})) return "move a device to its namespace";
        in = {"-n", node.device};
        if (!ip({"-n", node.device, "link", "set", "lo", "up"})) return "use a namespace's loopback";
      }
      const auto there = [&](std::vector<std::string> words) {
        words.insert(words.begin(), in.begin(), in.end());
        return ip(std::move(words));
      };
      if (!there({"addr", "add", node.address + "/24", "dev", node.device}) ||
          !there({"link", "set", node.device, "mtu", std::to_string(kMtu), "txqueuelen", "10000", "up"})) {
        return "configure a device";
      }
    }
    return "";
  }

  void announce() const {
    for (const Node& node : nodes_) {
      std::printf("node %s %s %s %s\n", node.name.c_str(), node.name == "host" ? "-" : node.device.c_str(),
                  node.device.c_str(), node.address.c_str());
    }
    std::printf("ready\n");
    std::fflush(stdout);
  }

  // Until the end of the input or a signal.
  void serve(int signals) {
    std::vector<pollfd> waits = {{0, POLLIN, 0}, {signals, POLLIN, 0}};
    for (const Node& node : nodes_) waits.push_back({node.fd, POLLIN, 0});
    for (;;) {
      timespec timeout{};
      if (!held_.empty()) {
        const Nanos wait = std::max<Nanos>(held_.begin()->first - steady_now(), 0);
        timeout = {wait / kSecond, wait % kSecond};
      }
      ppoll(waits.data(), waits.size(), held_.empty() ? nullptr : &timeout, nullptr);
      if (waits[1].revents != 0 || (waits[0].revents != 0 && !read_commands())) return;
      for (uint32_t i = 0; i < nodes_.size(); ++i) {
        if (waits[i + 2].revents != 0) read_packets(i);
      }
      const TimePoint now = steady_now();
      while (!held_.empty() && held_.begin()->first <= now) {
        const Held& packet = held_.begin()->second;
        put(packet.to, packet.bytes.data(), packet.bytes.size());
        held_bytes_ -= packet.bytes.size();
        held_.erase(held_.begin());
      }
    }
  }

 private:
  struct Held {
    uint32_t to;
    std::vector<char> bytes;
  };

  void put(uint32_t to, const char* data, size_t size) {
    // A device that takes nothing loses the packet, as a network would.
    [[maybe_unused]] const ssize_t written = write(nodes_[to].fd, data, size);
  }

  void read_packets(uint32_t from) {
    for (int i = 0; i < kPacketsPerTurn; ++i) {
      const ssize_t size = read(nodes_[from].fd, buffer_.data(), buffer_.size());
      if (size < 20) return;
      if ((buffer_[0] & 0xf0) != 0x40) continue;  // IPv4 only: nobody of ours speaks anything else
      const auto last = static_cast<uint8_t>(buffer_[19]);
      if (last == 0 || last > nodes_.size()) continue;
      const uint32_t to = last - 1u;
      const TimePoint now = steady_now();
      const auto due = model_.send(from, to, now);
      if (!due) continue;
      if (*due <= now) {
        put(to, buffer_.data(), static_cast<size_t>(size));
      } else if (held_bytes_ + static_cast<size_t>(size) <= kMaxHeldBytes) {
        held_bytes_ += static_cast<size_t>(size);
        // Equal times keep the order in which they were put in.
        held_.emplace(*due, Held{to, {buffer_.data(), buffer_.data() + size}});
      }
    }
  }

  // False at the end.
  bool read_commands() {
    std::array<char, 4096> text;
    const ssize_t size = read(0, text.data(), text.size());
    if (size <= 0) return false;
    input_.append(text.data(), static_cast<size_t>(size));
    for (size_t end; (end = input_.find('\n')) != std::string::npos; input_.erase(0, end + 1)) {
      std::printf("%s\n", command(input_.substr(0, end)).c_str());
    }
    std::fflush(stdout);
    return true;
  }

  std::string command(const std::string& line) {
    std::istringstream words(line);
    std::string what, a, b;
    words >> what >> a >> b;
    const int from = index(a), to = index(b);
    if (from < 0 || to < 0) return "no such node";
    if (what == "counts") {
      const LinkCounts& counts = model_.counts(from, to);
      return std::to_string(counts.forwarded) + " " + std::to_string(counts.lost) + " " +
             std::to_string(counts.cut);
    }
    LinkFault fault;
    int64_t delay_us = 0;
    if (what != "set" || !(words >> delay_us >> fault.loss >> fault.cut)) return "no such command";
    fault.delay = delay_us * kMicrosecond;
    model_.set(from, to, fault);
    model_.set(to, from, fault);
    return "ok";
  }

  int index(const std::string& name) const {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i].name == name) return static_cast<int>(i);
    }
    return -1;
  }

  LinkModel model_;
  std::vector<Node> nodes_;
  std::multimap<TimePoint, Held> held_;
  size_t held_bytes_ = 0;
  std::array<char, 1 << 16> buffer_;
  std::string input_;
};

int serve(int argc, char** argv) {
  if (argc < 3) cannot("start: SEED NODE...");
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGHUP);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getuid() != 0) cannot("make network namespaces without being root");
  remove_left_behind();
  std::vector<std::string> names = {"host"};
  names.insert(names.end(), argv + 2, argv + argc);
  auto relay = std::make_unique<Relay>(std::strtoull(argv[1], nullptr, 10), names);
  if (const std::string failed = relay->set_up(); !failed.empty()) {
    relay.reset();
    cannot(failed);
  }
  relay->announce();
  relay->serve(signalfd(-1, &set, SFD_CLOEXEC));
  return 0;
}

}  // namespace
}  // namespace conclave

int main(int argc, char** argv) { return conclave::serve(argc, argv); }
