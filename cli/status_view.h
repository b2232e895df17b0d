// What `conclave status` shows of a cluster at one moment: plain values, from the scheduler's answer, the one
// before it, and the routers' histograms.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "libs/base/clock.h"

namespace conclave::cli {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

struct MemberView {
  enum class Kind : uint8_t { kRouter, kAttention, kExpert, kOther };
  Kind kind = Kind::kOther;
  std::string name;
  uint64_t incarnation = 0;
  std::string state;  // joining | ready | suspect | draining | drained
  double age_s = 0;   // since it joined this scheduler
  uint32_t threads = 0;
  std::string ops_address, version, numerics_id;
  // attention workers
  uint32_t kv_total = 0, kv_used = 0, kv_cached = 0, sequences = 0;
  // expert shards
  uint32_t homes = 0, sole_homes = 0, held = 0;
  double load = 0;           // rows a second
  double assigned_load = 0;  // the same, by the homes it has
};

struct EventView {
  uint64_t number = 0;
  std::string kind, who, detail;
  double age_s = 0;
  uint32_t times = 1;
  // Something that should not happen in a quiet cluster.
  bool fault() const {
    return kind == "lost" || kind == "refused" || kind == "stranger" || kind == "suspect" || kind == "replay" || kind == "stall" ||
           kind == "late" || kind == "preempted";
  }
};

// Upper estimates from a histogram's buckets, in seconds; kUnknown where nothing was observed.
struct Percentiles {
  double p50 = kUnknown, p90 = kUnknown, p99 = kUnknown;
  double count = 0;  // observations in the window
};

// A second; kUnknown until there are two answers of one scheduler.
struct Rates {
  double generated = kUnknown, prompt = kUnknown, cached = kUnknown, steps = kUnknown;
  double accepted = kUnknown, refused = kUnknown, ended = kUnknown, failed = kUnknown;
};

struct Totals {
  uint64_t generated = 0, prompt = 0, cached = 0, steps = 0;
  uint64_t accepted = 0, refused = 0, ended = 0, failed = 0;
  uint64_t replayed = 0, preempted = 0, lost = 0, stalls = 0;
  uint64_t placement_changes = 0, homes_added = 0, homes_removed = 0;
};

struct StatusView {
  std::string scheduler;  // its address, as it was asked for
  std::string clock;      // "15:04:05", local time of this look
  int64_t wall_ns = 0;    // the same, since 1970

  // No answer at this look: what follows is of the last one, if there ever was any.
  bool reachable = false;
  bool ever_reached = false;
  std::string problem;       // why not
  std::string since;         // "15:04:05": the first look without an answer
  double unreachable_s = 0;  // since then

  uint64_t incarnation = 0;  // the scheduler's
  double age_s = 0;
  std::string version, numerics_id, ops_address;
  bool ready = false;
  std::string not_ready;
  uint64_t epoch = 0, preparing_epoch = 0;
  uint32_t layers = 0, experts = 0;
  double busiest = 0;  // load of the busiest shard over the mean
  uint32_t running = 0, waiting = 0, stalled = 0;
  std::vector<MemberView> members;
  std::vector<EventView> events;  // the oldest first
  Totals totals;
  Rates rates;
  // Of requests: until their first start, their first token, their end; of tokens: the mean of each request,
  // and each gap for itself.
  Percentiles queue, first_token, whole, per_token, token_gap;
  double latency_window_s = 0;  // how far back they go
  std::string latency_problem;  // why there are none; empty: there are, or nothing was observed
};

// One JSON object, without a newline. Numbers that JSON lacks are null.
std::string status_json(const StatusView& view);

}  // namespace conclave::cli
