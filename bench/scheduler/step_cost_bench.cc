// What a step of a real attention worker and a real expert shard costs, for the replay's cost model.
//
//   step_cost_bench MODEL_DIR [REPEATS]      (conclave model make --geometry m2 --layers 1 --dtype fp8 --out
//   MODEL_DIR)
//
// One worker and one shard in this process, one thread each, over the loopback transport: one computes while
// the other waits, so the processor time of the process is the time of the steps, whatever else the machine
// does. Each run is a set of equal requests; the least of its repeats counts. Fitted to all runs, by least
// squares of the relative errors: microseconds = step * steps + decode_row * rows + prefill_row * rows +
// context_1k * positions read / 1000.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

#include "libs/base/random.h"
#include "libs/local_cluster/local_cluster.h"

namespace conclave::bench {
namespace {

struct Shape {
  uint32_t sequences, prompt, output;
};
constexpr Shape kShapes[] = {{1, 16, 9},  {2, 16, 9},   {4, 16, 9},    {8, 16, 9},
                             {16, 16, 9}, {1, 64, 1},   {1, 128, 1},   {1, 256, 1},
                             {1, 512, 1}, {2, 256, 1},  {1, 2048, 1},  {1, 2048, 9},
                             {4, 512, 9}, {4, 1024, 9}, {1, 1024, 17}, {32, 16, 5}};
constexpr size_t kTerms = 4;

struct Run {
  std::array<double, kTerms> terms{};  // steps, decode rows, prefill rows, thousands of positions read
  double us = 0;
};

double process_us() {
  timespec t = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}

Run measure(LocalCluster& cluster, const Shape& shape, SplitMix64& random) {
  const auto before = cluster.scheduler().metrics();
  const double start = process_us();
  std::vector<std::shared_ptr<PendingCompletion>> pending;
  for (uint32_t i = 0; i < shape.sequences; ++i) {
    std::vector<TokenId> prompt(shape.prompt);
    for (TokenId& token : prompt) token = static_cast<TokenId>(random.below(cluster.spec().vocab_size));
    AcceptedRequest request = make_request(std::move(prompt), shape.output);
    request.sampling.ignore_eos = true;
    pending.push_back(cluster.submit(std::move(request)));
  }
  for (const auto& one : pending) {
    const auto done = one->wait(600 * kSecond);
    if (!done.ok() || done->tokens.size() != shape.output) {
      std::fprintf(stderr, "a request failed: %s\n", message_of(done.status()).c_str());
      std::exit(1);
    }
  }
  Run run;
  run.us = process_us() - start;
  const auto after = cluster.scheduler().metrics();
  const double positions = shape.prompt + shape.output - 1;
  run.terms = {static_cast<double>(after.steps_retired - before.steps_retired),
               static_cast<double>(after.decode_slices - before.decode_slices),
               static_cast<double>(after.prefill_tokens - before.prefill_tokens),
               shape.sequences * positions * positions / 2 / 1000};
  return run;
}

// Solves the normal equations by elimination with pivots.
std::array<double, kTerms> fit(const std::vector<Run>& runs) {
  double m[kTerms][kTerms + 1] = {};
  for (const Run& run : runs) {
    const double weight = 1 / (run.us * run.us);
    for (size_t i = 0; i < kTerms; ++i) {
      for (size_t j = 0; j < kTerms; ++j) m[i][j] += weight * run.terms[i] * run.terms[j];
      m[i][kTerms] += weight * run.terms[i] * run.us;
    }
  }
  for (size_t c = 0; c < kTerms; ++c) {
    size_t pivot = c;
    for (size_t r = c + 1; r < kTerms; ++r) {
      if (std::fabs(m[r][c]) > std::fabs(m[pivot][c])) pivot = r;
    }
    std::swap(m[c], m[pivot]);
    for (size_t r = 0; r < kTerms; ++r) {
      if (r == c) continue;
      const double factor = m[r][c] / m[c][c];
      for (size_t k = c; k <= kTerms; ++k) m[r][k] -= factor * m[c][k];
    }
  }
  std::array<double, kTerms> result{};
  for (size_t i = 0; i < kTerms; ++i) result[i] = m[i][kTerms] / m[i][i];
  return result;
}

int run(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: step_cost_bench MODEL_DIR [REPEATS]\n");
    return 2;
  }
  const int repeats = argc > 2 ? std::max(1, std::atoi(argv[2])) : 3;
  LocalClusterOptions options;
  options.shards = 1;
  options.scheduler.prefix_cache = false;
  auto cluster = LocalCluster::load(argv[1], options);
  if (!cluster.ok() || !(*cluster)->wait_ready(600 * kSecond).ok()) {
    std::fprintf(stderr, "the cluster does not start: %s\n", message_of(cluster.status()).c_str());
    return 1;
  }
  SplitMix64 random(3);
  measure(**cluster, {2, 64, 2}, random);  // pages the weights in
  std::vector<Run> runs;
  for (const Shape& shape : kShapes) {
    Run best = measure(**cluster, shape, random);
    for (int i = 1; i < repeats; ++i) {
      Run again = measure(**cluster, shape, random);
      if (again.us < best.us) best = again;
    }
    runs.push_back(best);
  }
  const std::array<double, kTerms> cost = fit(runs);
  std::printf("sequences prompt output   steps  ms measured  ms fitted\n");
  for (size_t i = 0; i < runs.size(); ++i) {
    double fitted = 0;
    for (size_t k = 0; k < kTerms; ++k) fitted += cost[k] * runs[i].terms[k];
    std::printf("%9u %6u %6u %7.0f %12.1f %10.1f\n", kShapes[i].sequences, kShapes[i].prompt,
                kShapes[i].output, runs[i].terms[0], runs[i].us / 1000, fitted / 1000);
  }
  std::printf("--cost %.0f,%.0f,%.0f,%.0f\n", cost[0], cost[1], cost[2], cost[3]);
  return 0;
}

}  // namespace
}  // namespace conclave::bench

int main(int argc, char** argv) { return conclave::bench::run(argc, argv); }
