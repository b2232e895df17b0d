// Looks at a cluster again and again: the scheduler's status, and the histograms of it and its routers.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/cluster_control.h"
#include "cli/prom_text.h"
#include "cli/status_view.h"

namespace conclave::cli {

// What the answer says, without rates and latencies. `address` is where the scheduler was asked.
StatusView view_of(const v1::StatusReply& reply, const std::string& address);

// Differences of two answers of one scheduler, by its own clock; unknown where they are of two, or of one
// moment.
Rates rates_between(const v1::StatusReply& before, const v1::StatusReply& now);

// Where a process is found whose operations port listens on every interface: at `host`, where somebody else
// of its host was found. Empty when `announced` is.
std::string ops_address_at(const std::string& announced, const std::string& host);

// One thread at a time.
class ClusterWatch {
 public:
  // Asks the routers and the scheduler for their histograms unless `latencies` is false.
  ClusterWatch(std::string address, std::unique_ptr<ClusterControl> control, bool latencies = true);

  // A look now. Blocks for at most about kLookLimit + kScrapeLimit. What could not be reached is said in the
  // view: it never fails.
  StatusView look();

  static constexpr Nanos kLookLimit = 1500 * kMillisecond;
  static constexpr Nanos kScrapeLimit = 700 * kMillisecond;
  static constexpr Nanos kWindow = 60 * kSecond;  // of latencies
  static constexpr size_t kMaxRouters = 32;       // whose histograms are read

 private:
  void add_latencies(StatusView& view);

  const std::string address_;
  const std::unique_ptr<ClusterControl> control_;
  const bool latencies_;
  std::optional<v1::StatusReply> before_;
  std::optional<StatusView> last_;  // the last one with an answer
  std::optional<TimePoint> lost_at_;
  std::string lost_clock_;
  std::vector<LatencyWindow> windows_;  // of each histogram that is read
};

}  // namespace conclave::cli
