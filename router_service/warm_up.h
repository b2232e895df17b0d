// One token through the whole fleet before the router calls itself ready: the weights are mapped, and the
// first to touch them should not be a client. Its prompt is routed by rule and not by the gate
// (SamplingParams::every_expert), so that it goes through every expert of every layer, wherever that is: the
// token cannot come before each shard has answered for each layer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "libs/base/clock.h"
#include "libs/model/model_spec.h"
#include "libs/ports/scheduler_port.h"

namespace conclave::router {

struct WarmUpOptions {
  // Tokens of the prompt at least; as many as it takes to go through each expert twice (replicas share the
  // work), where the context has room.
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

  // To be called again and again, from one thread: starts an attempt when the fleet has become whole or has
  // other shards than the last time, and forgets the warmth of a fleet that is whole no more.
  void poll(TimePoint now);
  // Why the fleet is not warm; empty: a token has gone through it since it became whole. A shard that joins
  // while the first attempts go on must be in one of them; one that joins a warm fleet is warmed, and the
  // fleet, which served without it, stays warm. Any thread.
  std::string not_warm() const;
  uint64_t attempts() const;
  // Of the last that succeeded, from the submission to the token; 0: none yet.
  Nanos last_duration() const;

 private:
  struct State;
  class Observer;

  SchedulerPort& scheduler_;
  const uint32_t vocab_;
  const uint32_t rows_;  // of the prompt
  const uint32_t max_positions_;
  const WarmUpOptions options_;
  const std::shared_ptr<State> state_;
};

}  // namespace conclave::router
