// One token through the whole fleet before the router calls itself ready: the weights are mapped, and the
// first to touch them should not be a client.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "libs/base/clock.h"
#include "libs/model/model_spec.h"
#include "libs/ports/scheduler_port.h"

namespace conclave::router {

struct WarmUpOptions {
  // Tokens of the prompt. Each takes its own experts of every layer, so that together they reach every shard,
  // by far most likely, while the prompt stays cheaper than any real one.
  uint32_t prompt_tokens = 64;
  Nanos deadline = 300 * kSecond;  // of one attempt; a cold fleet of large weights pages them in
  Nanos retry = 1 * kSecond;       // after one that failed
};

class WarmUp {
 public:
  // `scheduler` outlives this. Ids at or above `vocab_limit` are not used.
  WarmUp(SchedulerPort& scheduler, const ModelSpec& model, uint32_t vocab_limit, WarmUpOptions options = {});
  // Cancels an attempt in progress.
  ~WarmUp();

  // To be called again and again, from one thread: starts an attempt when the fleet has become whole, and
  // forgets the warmth of a fleet that is whole no more.
  void poll(TimePoint now);
  // Why the fleet is not warm; empty: a token has gone through it since it became whole. Any thread.
  std::string not_warm() const;
  uint64_t attempts() const;
  // Of the last that succeeded, from the submission to the token; 0: none yet.
  Nanos last_duration() const;

 private:
  struct State;
  class Observer;

  SchedulerPort& scheduler_;
  const uint32_t vocab_;
  const uint32_t max_positions_;
  const WarmUpOptions options_;
  const std::shared_ptr<State> state_;
};

}  // namespace conclave::router
