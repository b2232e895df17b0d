// Where the time of a step goes, beside what the machine allows: decode at several numbers of streams, and
// prefill, with one worker and one shard in this process.
//
//   conclave model make --geometry m2 --layers 3 --dtype fp8 --out MODEL_DIR
//   layer_bench MODEL_DIR [--streams 1,8,64] [--tokens N] [--prompt N] [--prefill N] [--threads N] [--rounds
//   N]
//
// The limit of a step is the sum over attention, experts and head of what each costs at least (roofline.h),
// with the bandwidth and the arithmetic peak that were read just before; which experts were touched is
// counted, not assumed. One table row a case, the median of its rounds; rounds go through all cases in turn.
// `wire` is the time in which the worker waits and the shard does not compute.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "bench/cluster/roofline.h"
#include "bench/kernels/limits.h"
#include "libs/base/random.h"
#include "libs/local_cluster/local_cluster.h"

namespace conclave::bench {
namespace {

struct Flags {
  std::string model;
  std::vector<uint32_t> streams = {1, 8, 16, 32, 64};
  uint32_t tokens = 16;  // of each stream
  uint32_t prompt = 16;  // of each stream
  uint32_t prefill = 0;  // tokens of one prompt; 0: no such case
  uint32_t threads = 2;  // of the worker, and of the shard: they take turns
  uint32_t rounds = 3;
};

struct Case {
  std::string name;
  uint32_t streams, prompt, tokens;
};

struct Reading {
  double tokens_per_s = 0, ms_per_step = 0;
  double attention = 0, experts = 0, head = 0, combine = 0, dispatch = 0, wire = 0, rest = 0;  // shares
  double of_limit = 0;                                            // limit over measured time
  double attention_limit = 0, experts_limit = 0, head_limit = 0;  // the same of each part
  double rows_per_run = 0;                                        // of an expert
};

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "layer_bench: %s\n", why.c_str());
  std::exit(1);
}

double seconds(Nanos t) { return static_cast<double>(t) / kSecond; }

Reading run(LocalCluster& cluster, const Case& c, const MachineLimits& limits, uint64_t seed) {
  SplitMix64 random(seed);
  const ModelSpec& spec = cluster.spec();
  const auto submit = [&](uint32_t tokens) {
    std::vector<TokenId> prompt(c.prompt);
    for (TokenId& token : prompt) token = static_cast<TokenId>(random.below(spec.vocab_size));
    AcceptedRequest request = make_request(std::move(prompt), tokens);
    request.sampling.ignore_eos = true;
    return cluster.submit(std::move(request));
  };
  // Decode is timed from the moment every stream has its first tokens; prefill from the start.
  constexpr uint32_t kLead = 3;
  const bool decode = c.tokens > 1;
  std::vector<std::shared_ptr<PendingCompletion>> pending;
  WorkerMetrics w0;
  ShardMetrics s0;
  TimePoint start = steady_now();
  if (!decode) {
    w0 = cluster.worker_metrics(0);
    s0 = cluster.shard_metrics(0);
  }
  for (uint32_t i = 0; i < c.streams; ++i) pending.push_back(submit(c.tokens + (decode ? kLead : 0)));
  if (decode) {
    for (const auto& one : pending)
      if (!one->wait_for_tokens(kLead, 600 * kSecond)) fail("a request failed");
    start = steady_now();
    w0 = cluster.worker_metrics(0);
    s0 = cluster.shard_metrics(0);
  }
  for (const auto& one : pending)
    if (const auto done = one->wait(600 * kSecond); !done.ok()) fail(message_of(done.status()));
  const double took = seconds(steady_now() - start);
  const WorkerMetrics w = cluster.worker_metrics(0);
  const ShardMetrics s = cluster.shard_metrics(0);
  const double steps = static_cast<double>(w.steps - w0.steps);
  const double rows = static_cast<double>(w.rows - w0.rows);
  const double runs = static_cast<double>(s.expert_runs - s0.expert_runs);
  const double items = static_cast<double>(s.items - s0.items);
  const double each = decode ? c.prompt + kLead + c.tokens / 2.0 : c.prompt / 2.0;
  const DenseWeights& dense = cluster.bound_model()->dense;
  const Work attention = attention_work(spec, dense, steps, rows, rows * each, 2);
  const Work experts = expert_work(cluster.bound_model()->experts.at(0).at(0), runs, items);
  const Work head = head_work(dense, decode ? steps : 1, decode ? rows : 1);
  const double attention_s = seconds(w.attention_ns - w0.attention_ns);
  const double experts_s = seconds(s.compute_ns - s0.compute_ns);
  const double head_s = seconds(w.head_ns - w0.head_ns);
  Reading r;
  r.tokens_per_s = (decode ? rows : double(c.streams) * c.prompt) / took;
  r.ms_per_step = took * 1e3 / steps;
  r.attention = attention_s / took;
  r.experts = experts_s / took;
  r.head = head_s / took;
  r.combine = seconds(w.combine_ns - w0.combine_ns) / took;
  r.dispatch = seconds(w.dispatch_ns - w0.dispatch_ns) / took;
  r.wire = (seconds(w.expert_wait_ns - w0.expert_wait_ns) - experts_s) / took;
  r.rest = 1 - r.attention - r.experts - r.head - r.combine - r.dispatch - std::max(0.0, r.wire);
  r.attention_limit = attention.seconds(limits) / attention_s;
  r.experts_limit = experts.seconds(limits) / experts_s;
  r.head_limit = head_s > 0 ? head.seconds(limits) / head_s : 0;
  r.of_limit = (attention.seconds(limits) + experts.seconds(limits) + head.seconds(limits)) / took;
  r.rows_per_run = runs > 0 ? items / runs : 0;
  return r;
}

std::vector<uint32_t> parse_list(std::string_view text) {
  std::vector<uint32_t> values;
  while (!text.empty()) {
    values.push_back(static_cast<uint32_t>(std::strtoul(std::string(text).c_str(), nullptr, 10)));
    const size_t comma = text.find(',');
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
  }
  return values;
}

Flags parse(int argc, char** argv) {
  Flags flags;
  bool good = argc >= 2 && argc % 2 == 0;
  if (good) flags.model = argv[1];
  for (int i = 2; good && i < argc; i += 2) {
    const std::string_view name = argv[i];
    const auto number = static_cast<uint32_t>(std::strtoul(argv[i + 1], nullptr, 10));
    if (name == "--streams") {
      flags.streams = parse_list(argv[i + 1]);
    } else if (name == "--tokens") {
      flags.tokens = std::max(2u, number);
    } else if (name == "--prompt") {
      flags.prompt = std::max(1u, number);
    } else if (name == "--prefill") {
      flags.prefill = number;
    } else if (name == "--threads") {
      flags.threads = std::max(1u, number);
    } else if (name == "--rounds") {
      flags.rounds = std::max(1u, number);
    } else {
      good = false;
    }
  }
  for (const uint32_t streams : flags.streams) good = good && streams > 0;
  if (good) return flags;
  std::fprintf(stderr,
               "usage: layer_bench MODEL_DIR [--streams 1,8,64] [--tokens N] [--prompt N] [--prefill N] "
               "[--threads N] [--rounds N]\n");
  std::exit(2);
}

Reading median(std::vector<Reading> all) {
  std::sort(all.begin(), all.end(),
            [](const Reading& a, const Reading& b) { return a.of_limit < b.of_limit; });
  return all[all.size() / 2];
}

int main_of(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 12);
  const Flags flags = parse(argc, argv);
  LocalClusterOptions options;
  options.shards = 1;
  options.threads = flags.threads;
  options.scheduler.prefix_cache = false;
  options.scheduler.itl_target_ms = options.scheduler.prefill_target_ms = 0;
  for (const uint32_t streams : flags.streams) {
    uint32_t& most = options.scheduler.max_batch_sequences;
    most = std::max(most, streams);
  }
  auto cluster = LocalCluster::load(flags.model, options);
  if (!cluster.ok()) fail(message_of(cluster.status()));
  if (const Status ready = (*cluster)->wait_ready(600 * kSecond); !ready.ok()) fail(message_of(ready));
  std::vector<Case> cases;
  for (const uint32_t streams : flags.streams)
    cases.push_back({std::to_string(streams) + " streams", streams, flags.prompt, flags.tokens});
  if (flags.prefill > 0) cases.push_back({"prefill " + std::to_string(flags.prefill), 1, flags.prefill, 1});
  ThreadPool pool(flags.threads);
  run(**cluster, {"", 8, 16, 4}, {1, 1}, 1);  // pages the weights in
  std::vector<std::vector<Reading>> readings(cases.size());
  std::vector<double> bandwidths, peaks;
  for (uint32_t round = 0; round < flags.rounds; ++round) {
    for (size_t i = 0; i < cases.size(); ++i) {
      // Reading the limits takes a moment, so that a case sees about the machine they were read on.
      const MachineLimits limits{read_bandwidth(pool, 3), std::max(dot_peak(pool, 3), fma_peak(pool, 3))};
      bandwidths.push_back(limits.bytes_per_s);
      peaks.push_back(limits.flops_per_s);
      readings[i].push_back(run(**cluster, cases[i], limits, round * 100 + i));
    }
  }
  const auto [low, high] = std::minmax_element(bandwidths.begin(), bandwidths.end());
  const auto [least, most] = std::minmax_element(peaks.begin(), peaks.end());
  std::printf("bandwidth %.1f-%.1f GB/s, arithmetic peak %.0f-%.0f GFLOP/s, %u threads\n", *low / 1e9,
              *high / 1e9, *least / 1e9, *most / 1e9, flags.threads);
  std::printf(
      "%-14s %9s %8s %6s | %% of the time: %5s %5s %5s %5s %5s %5s %5s | of its limit: %5s %5s %5s | "
      "rows/run\n",
      "case", "tokens/s", "ms/step", "limit", "att", "exp", "head", "comb", "disp", "wire", "rest", "att",
      "exp", "head");
  for (size_t i = 0; i < cases.size(); ++i) {
    const Reading r = median(readings[i]);
    std::printf(
        "%-14s %9.2f %8.1f %5.0f%% | %14s %5.1f %5.1f %5.1f %5.1f %5.1f %5.1f %5.1f | %14.2f %5.2f %5.2f | "
        "%8.2f\n",
        cases[i].name.c_str(), r.tokens_per_s, r.ms_per_step, r.of_limit * 100, "", r.attention * 100,
        r.experts * 100, r.head * 100, r.combine * 100, r.dispatch * 100, r.wire * 100, r.rest * 100,
        r.attention_limit, r.experts_limit, r.head_limit, r.rows_per_run);
  }
  return 0;
}

}  // namespace
}  // namespace conclave::bench

int main(int argc, char** argv) { return conclave::bench::main_of(argc, argv); }
