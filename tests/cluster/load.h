// Numbered requests, always so many at once, each compared token by token with what it is without faults.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "libs/base/random.h"
#include "libs/ports/scheduler_port.h"

namespace conclave {

struct LoadOptions {
  uint32_t concurrency = 32;
  double cancelled = 0;  // share of the requests that are cancelled after a few tokens
  uint64_t seed = 1;
};

// Of a load so far.
struct LoadReport {
  uint64_t completed = 0;
  uint64_t cancelled = 0;
  uint64_t refused = 0;  // never accepted: nothing was promised
  uint64_t tokens = 0;
  // Accepted requests that did not become what they had to: failed, other tokens, a gap or repeat of an
  // index, an event after the end. The first few of them in words.
  uint64_t wrong = 0;
  std::vector<std::string> faults;
};

class Load {
 public:
  // Request number i is numbered_request(i % expected.size(), tokens), whose tokens are expected[i % ...].
  // `port` outlives the load.
  Load(SchedulerPort& port, std::vector<std::vector<TokenId>> expected, LoadOptions options);
  // Cancels what is open.
  ~Load();

  // From now on longest_gap() counts afresh.
  void mark();
  // The longest time between two events with tokens of one stream, of those that ended since the mark, and
  // of those that are still open.
  Nanos longest_gap() const;
  // Whether every open stream that has begun had a token since then.
  bool all_moved(TimePoint since) const;
  // Streams that are open and have had a token.
  size_t running() const;
  LoadReport report() const;
  // No new requests; true once all are over.
  void stop();
  bool over() const;

 private:
  struct Stream;
  struct Shared;

  void refill();

  SchedulerPort& port_;
  const LoadOptions options_;
  SplitMix64 random_;
  uint64_t next_ = 0;
  const std::shared_ptr<Shared> shared_;
  std::thread refill_;  // last
};

}  // namespace conclave
