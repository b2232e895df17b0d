// Our side of the comparison with llama.cpp: a cluster in this process, driven by lines on standard input.
//
//   bench_peers_ours MODEL_DIR THREADS MAX_STREAMS MAX_PREFILL CHUNK
//
// Commands; each is answered by one line of JSON, and the process has nothing to do between them:
//   limits
//       read bandwidth (bytes/s) and peak (FLOP/s): of BF16 dot products, or of fused multiply-adds where the
//       CPU is faster at those
//   decode STREAMS PROMPT STEPS SEED TEMPERATURE FILE
//       writes a line of tokens for each stream: prompt, output
//   prefill TOKENS SEED FILE
//       logits of every position; writes the prompt and the first token
//
// CHUNK is how many rows of a prompt a step may have: how much of the batch an expert sees.
#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "bench/kernels/limits.h"
#include "libs/base/random.h"
#include "libs/local_cluster/local_cluster.h"
#include "libs/model/plan.h"

namespace conclave::bench {
namespace {

// Of one stream: bounds what is reserved of the KV pool.
constexpr uint32_t kMaxOutput = 512;

// Every token's time, of all streams of one case.
struct Arrivals {
  explicit Arrivals(size_t streams) : times(streams), tokens(streams) {}
  // Call with `mutex` held.
  size_t fewest() const {
    size_t n = times.front().size();
    for (const auto& one : times) n = std::min(n, one.size());
    return n;
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::vector<TimePoint>> times;  // of each stream
  std::vector<std::vector<TokenId>> tokens;
  size_t ended = 0;
  std::string error;
};

class Stream final : public RequestObserver {
 public:
  Stream(std::shared_ptr<Arrivals> arrivals, size_t index) : arrivals_(std::move(arrivals)), index_(index) {}
  void on_accepted() override {}
  void on_refused(const Status& cause) override {
    std::lock_guard lock(arrivals_->mutex);
    arrivals_->error = message_of(cause);
    arrivals_->changed.notify_all();
  }
  void on_tokens(const TokenEvent& event) override {
    const TimePoint now = steady_now();
    std::lock_guard lock(arrivals_->mutex);
    for (const TokenId token : event.tokens) {
      arrivals_->times[index_].push_back(now);
      arrivals_->tokens[index_].push_back(token);
    }
    if (event.finish != FinishReason::kNone) ++arrivals_->ended;
    if (event.finish == FinishReason::kError) arrivals_->error = event.error;
    arrivals_->changed.notify_all();
  }

 private:
  const std::shared_ptr<Arrivals> arrivals_;
  const size_t index_;
};

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "bench_peers_ours: %s\n", why.c_str());
  std::exit(1);
}

std::vector<std::vector<TokenId>> prompts(uint32_t vocab_size, size_t streams, size_t length, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<std::vector<TokenId>> all(streams, std::vector<TokenId>(length));
  for (auto& prompt : all) {
    for (TokenId& token : prompt) token = static_cast<TokenId>(random.below(vocab_size));
  }
  return all;
}

// What the members have counted so far.
struct Counters {
  Nanos attention = 0;  // the worker's: projections, attention and gate
  Nanos head = 0;       // the worker's: lm_head and sampling
  Nanos wire = 0;       // the worker's: making dispatches, adding what comes back
  Nanos experts = 0;    // the shard's work
};
Counters counters(LocalCluster& cluster) {
  const WorkerMetrics worker = cluster.worker_metrics(0);
  return {worker.attention_ns, worker.head_ns, worker.dispatch_ns + worker.combine_ns,
          cluster.shard_metrics(0).compute_ns};
}

struct Run {
  TimePoint start = 0;  // the prompts are handed over
  Counters at_lead, at_end;
};

// Runs all prompts at once until each stream has `lead + steps` tokens, then cancels what still runs and
// waits for the end.
Run run_all(LocalCluster& cluster, const std::vector<std::vector<TokenId>>& all, size_t lead, size_t steps,
            float temperature, const std::shared_ptr<Arrivals>& arrivals) {
  std::vector<RequestId> ids;
  Run run;
  run.start = steady_now();
  for (size_t i = 0; i < all.size(); ++i) {
    AcceptedRequest request = make_request(all[i], steps == 0 ? 1 : kMaxOutput);
    request.sampling.ignore_eos = true;
    request.sampling.temperature = temperature;
    request.sampling.top_k = 40;  // the family's own default
    request.sampling.seed = i;
    ids.push_back(request.id);
    cluster.port().submit(std::move(request), std::make_shared<Stream>(arrivals, i));
  }
  const auto wait = [&](const auto& done) {
    std::unique_lock lock(arrivals->mutex);
    arrivals->changed.wait(lock, [&] { return done() || !arrivals->error.empty(); });
    if (!arrivals->error.empty()) fail("a request failed: " + arrivals->error);
  };
  wait([&] { return arrivals->fewest() >= lead; });
  run.at_lead = counters(cluster);
  wait([&] { return arrivals->fewest() >= lead + steps; });
  run.at_end = counters(cluster);
  for (const RequestId id : ids) cluster.port().cancel(id);
  wait([&] { return arrivals->ended == all.size(); });
  return run;
}

void write_tokens(const std::string& path, const std::vector<std::vector<TokenId>>& prompts_of,
                  const Arrivals& arrivals) {
  std::ofstream out(path, std::ios::trunc);
  for (size_t i = 0; i < prompts_of.size(); ++i) {
    for (const TokenId token : prompts_of[i]) out << token << ' ';
    for (const TokenId token : arrivals.tokens[i]) out << token << ' ';
    out << '\n';
  }
  if (!out.flush()) fail("cannot write " + path);
}

// Tokens a second while every stream decodes: from where the last stream has its third token to where it has
// `steps` more. The parts are what the members spent in that time, as shares of it.
void decode(LocalCluster& cluster, std::istream& in) {
  size_t streams = 0, prompt = 0, steps = 0;
  uint64_t seed = 0;
  float temperature = 0;
  std::string path;
  if (!(in >> streams >> prompt >> steps >> seed >> temperature >> path) || streams == 0 || steps == 0) {
    fail("decode STREAMS PROMPT STEPS SEED TEMPERATURE FILE");
  }
  const auto all = prompts(cluster.spec().vocab_size, streams, prompt, seed);
  const auto arrivals = std::make_shared<Arrivals>(streams);
  constexpr size_t kLead = 3;
  const Run run = run_all(cluster, all, kLead, steps, temperature, arrivals);
  TimePoint from = 0, to = 0;
  for (const auto& times : arrivals->times) {
    from = std::max(from, times[kLead - 1]);
    to = std::max(to, times[kLead + steps - 1]);
  }
  size_t tokens = 0;
  for (const auto& times : arrivals->times) {
    tokens += static_cast<size_t>(
        std::count_if(times.begin(), times.end(), [&](TimePoint t) { return t > from && t <= to; }));
  }
  write_tokens(path, all, *arrivals);
  const double window = static_cast<double>(to - from);
  const auto share = [&](Nanos Counters::*field) {
    return static_cast<double>(run.at_end.*field - run.at_lead.*field) / window;
  };
  std::printf(
      "{\"tokens_per_s\": %.4f, \"window_s\": %.3f, \"attention\": %.3f, \"head\": %.3f, \"wire\": %.3f, "
      "\"experts\": %.3f}\n",
      static_cast<double>(tokens) * kSecond / window, window / kSecond, share(&Counters::attention),
      share(&Counters::head), share(&Counters::wire), share(&Counters::experts));
}

void prefill(LocalCluster& cluster, std::istream& in) {
  size_t length = 0;
  uint64_t seed = 0;
  std::string path;
  if (!(in >> length >> seed >> path)) fail("prefill TOKENS SEED FILE");
  const auto all = prompts(cluster.spec().vocab_size, 1, length, seed);
  const auto arrivals = std::make_shared<Arrivals>(1);
  const Run run = run_all(cluster, all, 1, 0, 0, arrivals);
  const double seconds = static_cast<double>(arrivals->times[0].front() - run.start) / kSecond;
  write_tokens(path, all, *arrivals);
  std::printf("{\"tokens_per_s\": %.4f, \"window_s\": %.3f}\n", static_cast<double>(length) / seconds,
              seconds);
}

int run(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: bench_peers_ours MODEL_DIR THREADS MAX_STREAMS MAX_PREFILL CHUNK\n");
    return 2;
  }
  const unsigned threads = static_cast<unsigned>(std::max(1, std::atoi(argv[2])));
  const uint32_t streams = static_cast<uint32_t>(std::max(1, std::atoi(argv[3])));
  const uint32_t longest = static_cast<uint32_t>(std::max(1, std::atoi(argv[4])));
  const uint32_t chunk = static_cast<uint32_t>(std::max(16, std::atoi(argv[5])));
  LocalClusterOptions options;
  options.shards = 1;
  options.threads = threads;
  options.scheduler.prefix_cache = false;
  options.scheduler.max_batch_sequences = std::max(options.scheduler.max_batch_sequences, streams);
  options.scheduler.prefill_chunk_tokens = chunk;
  options.scheduler.step_token_budget = std::max(options.scheduler.step_token_budget, chunk);
  options.worker.max_batch_tokens = std::max(options.worker.max_batch_tokens, chunk);
  options.worker.kv_blocks = (longest + streams * 2 * kMaxOutput) / kBlockTokens + 64;
  // Whoever takes every position's logits pays for lm_head at each; the values themselves go nowhere.
  options.worker.logits_observer = [](RequestId, uint32_t, std::span<const float>) {};
  auto cluster = LocalCluster::load(argv[1], std::move(options));
  if (!cluster.ok()) fail(message_of(cluster.status()));
  if (Status ready = (*cluster)->wait_ready(600 * kSecond); !ready.ok()) fail(message_of(ready));
  // The peer's file is locked too: with both in memory there is little left, and the system would take pages
  // of whoever waits.
  if (mlockall(MCL_CURRENT) != 0) std::perror("bench_peers_ours: mlockall");
  ThreadPool pool(threads);
  std::printf("{\"ready\": true}\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string command;
    in >> command;
    if (command == "limits") {
      const double bandwidth = read_bandwidth(pool, 5);
      std::printf("{\"bandwidth\": %.6g, \"peak\": %.6g}\n", bandwidth,
                  std::max(dot_peak(pool, 3), fma_peak(pool, 3)));
    } else if (command == "decode") {
      decode(**cluster, in);
    } else if (command == "prefill") {
      prefill(**cluster, in);
    } else {
      fail("unknown command: " + line);
    }
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace conclave::bench

int main(int argc, char** argv) { return conclave::bench::run(argc, argv); }
