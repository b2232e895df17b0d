// Looks after the processes of a cluster as a supervisor does, and knows what it costs: what ended is started
// again, and after a fault everything must be back where it was.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/cluster/cluster.h"

namespace conclave {

// A process starts again so long after its end, as under `conclave up` (supervisor.restart_min_ms).
inline constexpr Nanos kRestartPause = 100 * kMillisecond;

// What a process holds at a moment.
struct Holdings {
  pid_t pid = -1;
  size_t descriptors = 0;
  uint64_t anonymous_bytes = 0;
};

class Keeper {
 public:
  explicit Keeper(ProcessCluster& cluster, bool with_router = false)
      : cluster_(cluster), with_router_(with_router) {}

  // scheduler, worker, worker1, ..., shard0, ..., router
  std::vector<std::string> names() const;
  Process& process(const std::string& name);
  void start(const std::string& name);
  // SIGKILL; tend() starts it again after kRestartPause.
  void kill(const std::string& name);
  // A process that was told to end, and stays so.
  void let_go(const std::string& name) { gone_.insert(name); }
  void expect(const std::string& name) { gone_.erase(name); }

  // Starts again what ended and whose pause is over.
  void tend();
  // Tends until it holds; false after `limit`.
  bool tend_until(const std::function<bool()>& reached, Nanos limit);
  void tend_for(Nanos time);

  // Processes that ended though nobody ended them (UCX with assertions may take the survivor of a dying peer
  // with it), with the last lines of their logs.
  const std::vector<std::string>& unexpected() const { return unexpected_; }

  // What keeps the cluster from being whole and idle: a process that is no ready member, a page in use, a
  // request or an endpoint too many. Empty: nothing.
  std::string unsettled();
  // Tends until it is whole and idle; what is not, after `limit`.
  std::string settle(Nanos limit);

  std::map<std::string, Holdings> holdings();
  // Of processes that lived through it: descriptors and memory beyond what they had. Empty: nothing.
  std::string grown(const std::map<std::string, Holdings>& before, uint64_t more_bytes);

 private:
  ProcessCluster& cluster_;
  const bool with_router_;
  std::set<std::string> gone_;
  std::map<std::string, TimePoint> due_;  // of those that ended
  std::set<std::string> killed_;          // by us, not seen by tend() yet
  std::vector<std::string> unexpected_;
  int commands_ = 0;
};

}  // namespace conclave
