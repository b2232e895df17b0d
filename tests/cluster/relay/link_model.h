// What a network between a few nodes does to packets: delay, loss and cuts, for each pair and direction, set
// while it runs. Pure: it is told the time. For one seed and one order of packets of a direction, the same
// ones are lost, whatever happens on the others.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/random.h"

namespace conclave {

struct LinkFault {
  Nanos delay = 0;  // added to each packet
  double loss = 0;  // share of the packets, each by itself
  bool cut = false;
};

struct LinkCounts {
  uint64_t forwarded = 0;
  uint64_t lost = 0;  // by `loss`
  uint64_t cut = 0;
};

class LinkModel {
 public:
  LinkModel(uint64_t seed, uint32_t nodes);

  // Of one direction; nodes are below the count given.
  void set(uint32_t from, uint32_t to, LinkFault fault);
  // When a packet that is sent now comes out; nothing: never. Never before one that was sent earlier in the
  // same direction, even where the delay has become shorter.
  std::optional<TimePoint> send(uint32_t from, uint32_t to, TimePoint now);
  const LinkCounts& counts(uint32_t from, uint32_t to) const { return link(from, to).counts; }

 private:
  struct Link {
    explicit Link(uint64_t seed) : random(seed) {}
    LinkFault fault;
    SplitMix64 random;
    TimePoint last_out = 0;
    LinkCounts counts;
  };
  const Link& link(uint32_t from, uint32_t to) const { return links_[from * nodes_ + to]; }

  const uint32_t nodes_;
  std::vector<Link> links_;
};

}  // namespace conclave
