#include "tests/sim/cluster_chaos.h"

#include <algorithm>
#include <cmath>

#include "libs/base/random.h"

namespace conclave::scheduler {
namespace {

constexpr uint32_t kPairs = 16;  // (layer, expert) pairs of the model
constexpr uint64_t kPool = 24;   // different requests of the chaos
constexpr Nanos kStreamLimit = 120 * kSecond;
constexpr Nanos kIdleLimit = 60 * kSecond;

ClusterConfig chaos_config(uint64_t seed, SplitMix64& random) {
  ClusterConfig config;
  config.seed = seed;
  config.audit_every = 16;
  config.workers = 1 + static_cast<uint32_t>(random.below(2));
  config.shards = 1 + static_cast<uint32_t>(random.below(4));
  config.routers = 1 + static_cast<uint32_t>(random.below(2));
  config.kv_blocks = 8 + static_cast<uint32_t>(random.below(40));
  config.network_loss = random.chance(0.3) ? 0.02 : 0;
  config.scheduler.step_token_budget = 4 + static_cast<uint32_t>(random.below(60));
  config.scheduler.max_batch_sequences = 1 + static_cast<uint32_t>(random.below(4));
  config.scheduler.prefill_chunk_tokens = 1 + static_cast<uint32_t>(random.below(32));
  config.scheduler.steps_in_flight = 1 + static_cast<uint32_t>(random.below(3));
  config.scheduler.placement_settle_ms = static_cast<uint32_t>(random.below(100));
  config.scheduler.min_replicas = 1 + static_cast<uint32_t>(random.below(3));
  config.scheduler.max_replicas = config.scheduler.min_replicas + static_cast<uint32_t>(random.below(3));
  config.scheduler.rebalance_interval_s = static_cast<uint32_t>(random.below(2));
  config.scheduler.rebalance_ratio = random.chance(0.5) ? 1.02 : 1.1;
  config.scheduler.load_half_life_s = 1;
  if (random.chance(0.4)) {
    config.shard_pairs = kPairs / 3 + static_cast<uint32_t>(random.below(kPairs / 2));
    config.shards = std::max(config.shards, (kPairs + config.shard_pairs - 1) / config.shard_pairs);
  }
  if (random.chance(0.5)) {
    FaultPlan& plan = config.worker_faults;
    plan.drop_out = plan.drop_in = 0.01;
    plan.duplicate_out = plan.duplicate_in = 0.03;
    plan.delay_out = plan.delay_in = 0.05;
    plan.reorder_in = 0.05;
    plan.corrupt_in = 0.01;
    plan.peer_down = 0.002;
    plan.stall = 0.005;
  }
  return config;
}

// What goes wrong, one thing after another.
class Chaos {
 public:
  Chaos(ClusterSim& cluster, const ClusterConfig& config, SplitMix64& random)
      : cluster_(cluster), config_(config), random_(random), next_(random.below(kPool)) {}

  void run() {
    for (uint64_t i = 3 + random_.below(4); i > 0; --i) submit();
    for (uint64_t i = 2 + random_.below(8); i > 0; --i) {
      cluster_.run_for(time(1, 60));
      act();
      for (uint64_t n = random_.below(3); n > 0; --n) submit();
    }
    cluster_.run_for(time(1, 200));
  }
  const std::vector<Stream*>& streams() const { return streams_; }
  std::map<std::string, uint64_t>& coverage() { return coverage_; }

 private:
  Nanos time(uint64_t least_ms, uint64_t most_ms) {
    return static_cast<Nanos>(least_ms + random_.below(most_ms - least_ms + 1)) * kMillisecond;
  }
  std::string any(Role role) {
    const std::vector<std::string> names = cluster_.names(role);
    return names[random_.below(names.size())];
  }
  std::string any() { return any(random_.chance(0.4) ? Role::kAttention : Role::kExpert); }
  void happens(const char* what) { ++coverage_[what]; }
  void submit() {
    if (streams_.size() == kPool) return;
    streams_.push_back(&cluster_.submit(sim_request(kShortRequests + next_)));
    next_ = (next_ + 1) % kPool;
  }
  void act() {
    const uint64_t kind = random_.below(100);
    if (kind < 20) {
      const bool silent = random_.chance(0.2);
      const Role role = random_.chance(0.4) ? Role::kAttention : Role::kExpert;
      happens(role == Role::kAttention ? "worker killed" : "shard killed");
      if (silent) happens("killed silently");
      cluster_.kill(any(role), silent);
    } else if (kind < 32) {
      happens("stopped");
      cluster_.pause(any(), time(20, 7000));
    } else if (kind < 40) {
      happens("slow");
      cluster_.slow(any(), time(5, 300), time(100, 3000));
    } else if (kind < 50) {
      happens("worker and shard parted");
      cluster_.cut(any(Role::kAttention), any(Role::kExpert), time(50, 4000));
    } else if (kind < 60) {
      happens("cut off from the scheduler");
      cluster_.cut_off(any(), time(100, 8000));
    } else if (kind < 66) {
      happens("scheduler killed");
      cluster_.kill_scheduler();
    } else if (kind < 72) {
      happens("router killed");
      cluster_.kill_router(static_cast<uint32_t>(random_.below(config_.routers)));
    } else if (kind < 80) {
      happens("joined");
      cluster_.join(random_.chance(0.3) ? Role::kAttention : Role::kExpert);
    } else if (kind < 90) {
      const Role role = random_.chance(0.4) ? Role::kAttention : Role::kExpert;
      const auto left = static_cast<uint32_t>(cluster_.names(role).size() - 1);
      // What has no room elsewhere is held until somebody joins, and nobody may.
      if (left == 0 ||
          (role == Role::kExpert && config_.shard_pairs > 0 && left * config_.shard_pairs < kPairs))
        return;
      happens(role == Role::kAttention ? "worker left" : "shard left");
      cluster_.leave(any(role));
    } else {
      Stream& stream = *streams_[random_.below(streams_.size())];
      if (stream.ended()) return;
      happens("cancelled");
      if (random_.chance(0.5)) {
        cluster_.cancel(stream);
      } else {
        cluster_.cancel_choice(stream, static_cast<uint32_t>(random_.below(stream.choices.size())));
      }
    }
  }

  ClusterSim& cluster_;
  const ClusterConfig& config_;
  SplitMix64& random_;
  uint64_t next_;
  std::vector<Stream*> streams_;
  std::map<std::string, uint64_t> coverage_;
};

template <class T>
bool is_prefix(const std::vector<T>& part, const std::vector<T>& whole) {
  return part.size() <= whole.size() && std::equal(part.begin(), part.end(), whole.begin());
}

}  // namespace

AcceptedRequest sim_request(uint64_t n) {
  const bool brief = n >= kShortRequests;
  SplitMix64 random(n * 77 + 5);
  AcceptedRequest r;
  r.id = RequestId{2, n};
  const uint64_t prompt = 1 + random.below(brief ? 14 : 40);
  const TokenId common = brief ? 16 : 32;
  if (n % 2 == 0)  // begins as others do
    for (TokenId i = 0; i < common; ++i) r.prompt.push_back(i);
  for (uint64_t i = 0; i < prompt; ++i) r.prompt.push_back(static_cast<TokenId>(random.below(64)));
  r.sampling.temperature = n % 2 == 0 ? 0.0f : 1.0f;
  r.sampling.seed = random.next();
  r.sampling.max_tokens = static_cast<uint32_t>(brief ? 4 + random.below(10) : 8 + random.below(24));
  if (n % 3 == 0) r.sampling.stop_token_ids = {static_cast<TokenId>(random.below(64))};
  if (n % 4 == 1) r.choices = 2 + static_cast<uint32_t>(brief ? 0 : n % 3);
  if (n % 5 == 1) r.sampling.repetition_penalty = 1.2f;
  if (n % 5 == 2) r.sampling.frequency_penalty = 0.5f;
  if (n % 5 == 3) r.sampling.presence_penalty = -0.5f;
  if (n % 5 == 4) r.sampling.logit_bias = {{7, 1.5f}, {9, -INFINITY}};
  r.sampling.logprobs = n % 2 == 1;
  r.sampling.prompt_logprobs = n % 3 == 1;
  return r;
}

const Stream& expected(uint64_t n) {
  static std::map<uint64_t, Stream> known;
  const auto it = known.find(n);
  return it != known.end() ? it->second : known.emplace(n, undisturbed(sim_request(n))).first->second;
}

std::string difference(const Stream& got) {
  const Stream& want = expected(got.request.id.lo);
  const std::string of = "request " + std::to_string(got.request.id.lo);
  const auto part = [](const Stream& s, size_t c) {
    return s.choices[c].finish == FinishReason::kCancelled && (s.cancelled || s.choices[c].cancelled);
  };
  for (size_t c = 0; c < want.choices.size(); ++c) {
    const Stream::Choice& mine = got.choices[c];
    const Stream::Choice& due = want.choices[c];
    const std::string what = of + ", choice " + std::to_string(c);
    if (part(got, c)) {
      if (!is_prefix(mine.tokens, due.tokens)) return what + ": other tokens than undisturbed";
      continue;
    }
    if (mine.tokens != due.tokens) return what + ": other tokens than undisturbed";
    if (mine.logprobs != due.logprobs) return what + ": other log-probabilities than undisturbed";
    if (mine.finish != due.finish) return what + ": another end than undisturbed";
  }
  // They come with the first choice.
  const bool same = part(got, 0) ? is_prefix(got.prompt_logprobs, want.prompt_logprobs)
                                 : got.prompt_logprobs == want.prompt_logprobs;
  return same ? ""
              : of + ": other log-probabilities of the prompt than undisturbed, " +
                    std::to_string(got.prompt_logprobs.size()) + " for " +
                    std::to_string(want.prompt_logprobs.size());
}

ChaosOutcome run_chaos(uint64_t seed, const PlantedInCluster& planted) {
  SplitMix64 random(seed);
  ClusterConfig config = chaos_config(seed, random);
  config.planted = planted.exchange;
  config.keep_fenced = planted.keep_fenced;
  ClusterSim cluster(config);
  ChaosOutcome outcome;
  const auto violate = [&](const std::string& what) {
    if (outcome.violation.empty()) outcome.violation = "seed " + std::to_string(seed) + ": " + what;
  };
  if (!cluster.run_ready() && cluster.violation().empty()) violate("the fleet does not get ready");
  Chaos chaos(cluster, config, random);
  if (cluster.violation().empty() && outcome.violation.empty()) {
    chaos.run();
    cluster.heal();
    if (!cluster.run_streams(kStreamLimit) && cluster.violation().empty()) {
      violate(std::to_string(cluster.open_streams()) + " streams are open " +
              std::to_string(kStreamLimit / kSecond) + " s after the last fault");
    }
  }
  if (cluster.violation().empty() && outcome.violation.empty()) {
    for (const Stream* stream : chaos.streams()) {
      if (const std::string what = difference(*stream); !what.empty()) violate(what);
    }
    if (const std::string what = cluster.run_idle(kIdleLimit); !what.empty()) {
      violate("a minute after the last stream " + what);
    }
  }
  if (!cluster.violation().empty()) outcome.violation = cluster.violation();
  outcome.trace = cluster.world().trace_hash();
  outcome.coverage = std::move(chaos.coverage());
  for (const Stream* stream : chaos.streams()) {
    ++outcome.coverage["streams"];
    for (const Stream::Choice& choice : stream->choices) outcome.coverage["tokens"] += choice.tokens.size();
  }
  outcome.coverage["events"] += cluster.world().steps();
  outcome.coverage["restarts"] += cluster.restarts();
  outcome.coverage["injected faults"] += cluster.injected_faults();
  outcome.coverage["sequences replayed"] += cluster.replayed();
  outcome.coverage["members lost"] += cluster.members_lost();
  outcome.coverage["resubmitted"] += cluster.resubmitted();
  const ExchangeMetrics exchange = cluster.exchange_metrics();
  outcome.coverage["rows retried"] += exchange.retried_items;
  outcome.coverage["rows missing"] += exchange.missing_items;
  outcome.coverage["rows doubled"] += exchange.duplicate_items;
  outcome.coverage["holds"] += exchange.holds;
  outcome.coverage["deadlines"] += exchange.deadlines;
  outcome.coverage["late combines"] += exchange.late_combines;
  outcome.coverage["credit waits"] += exchange.credit_waits;
  return outcome;
}

}  // namespace conclave::scheduler
