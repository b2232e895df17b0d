#include "tests/cluster/relay/link_model.h"

#include <algorithm>

#include "libs/base/check.h"

namespace conclave {

LinkModel::LinkModel(uint64_t seed, uint32_t nodes) : nodes_(nodes) {
  SplitMix64 seeds(seed);
  for (uint32_t i = 0; i < nodes * nodes; ++i) links_.emplace_back(seeds.next());
}

void LinkModel::set(uint32_t from, uint32_t to, LinkFault fault) {
  CONCLAVE_CHECK(from < nodes_ && to < nodes_);
  links_[from * nodes_ + to].fault = fault;
}

std::optional<TimePoint> LinkModel::send(uint32_t from, uint32_t to, TimePoint now) {
  CONCLAVE_CHECK(from < nodes_ && to < nodes_);
  Link& l = links_[from * nodes_ + to];
  if (l.fault.cut) {
    ++l.counts.cut;
    return std::nullopt;
  }
  // One draw for each packet even without loss, so that the n-th packet has the same luck in every run.
  if (l.random.uniform() < l.fault.loss) {
    ++l.counts.lost;
    return std::nullopt;
  }
  ++l.counts.forwarded;
  l.last_out = std::max(l.last_out, now + l.fault.delay);
  return l.last_out;
}

}  // namespace conclave
