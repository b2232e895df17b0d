// Random requests and random misfortune for the simulated cluster, and what must come of it.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tests/sim/cluster_sim.h"

namespace conclave::scheduler {

// Greedy and sampled ones, short and long, some with a stop token, several choices, penalties. From
// kShortRequests on they are short, to be answered by the thousand.
inline constexpr uint64_t kShortRequests = 1000;
AcceptedRequest sim_request(uint64_t n);
// The answer to it of a cluster that nothing happens to; each computed once.
const Stream& expected(uint64_t n);
// The first difference between a stream that has ended and the undisturbed one, of which a client that
// cancelled may have got a part; empty: none.
std::string difference(const Stream& got);

struct ChaosOutcome {
  std::string violation;  // empty: every rule held
  uint64_t trace = 0;
  std::map<std::string, uint64_t> coverage;
};

// A cluster of a size, with requests and faults by the seed: kills, stops, slow and parted processes, members
// that join and leave, a lossy network and a faulty data plane, all at once; then they end, every stream must
// come to its end, and all must become idle.
struct PlantedInCluster {
  ExchangeFaults exchange = {};
  bool keep_fenced = false;
};
ChaosOutcome run_chaos(uint64_t seed, const PlantedInCluster& planted = {});

}  // namespace conclave::scheduler
