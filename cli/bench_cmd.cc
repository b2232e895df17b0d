// conclave bench: a closed loop of streaming requests, and what a user would feel.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>
#include <mutex>
#include <thread>

#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/sampling_flags.h"
#include "libs/base/random.h"

namespace conclave::cli {
namespace {

namespace json = boost::json;

struct BenchFlags {
  SamplingFlags sampling;
  int requests = 64;
  int concurrency = 8;
  int input_tokens = 128;
  int output_tokens = 64;
  uint64_t workload_seed = 1;
  std::string json_path;
};

struct Samples {
  std::vector<double> first_ms, between_ms, total_ms;
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int completed = 0;
  std::vector<std::string> errors;
};

double percentile(std::vector<double>& values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double rank = p / 100 * static_cast<double>(values.size() - 1);
  const size_t low = static_cast<size_t>(rank);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (values[high] - values[low]) * (rank - static_cast<double>(low));
}

json::object summary(std::vector<double>& values) {
  double sum = 0;
  for (double v : values) sum += v;
  return {{"mean", values.empty() ? 0.0 : sum / static_cast<double>(values.size())},
          {"p50", percentile(values, 50)},
          {"p90", percentile(values, 90)},
          {"p99", percentile(values, 99)}};
}

// Prompts of byte tokens (ids 0..255 exist in every tokenizer of the family), drawn from (workload seed,
// index).
json::array make_prompt(const BenchFlags& flags, int index) {
  SplitMix64 random(flags.workload_seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(index));
  json::array ids;
  for (int i = 0; i < flags.input_tokens; ++i) ids.push_back(static_cast<int64_t>(97 + random.below(26)));
  return ids;
}

void run_one(const BenchFlags& flags, int index, Samples& samples, std::mutex& mutex) {
  json::object body{
      {"prompt", make_prompt(flags, index)}, {"max_tokens", flags.output_tokens}, {"ignore_eos", true}};
  const auto result = run_stream(flags.sampling, "/v1/completions", std::move(body),
                                 [](const std::string&, bool) { return true; });
  std::lock_guard lock(mutex);
  if (!result.ok()) {
    samples.errors.push_back(message_of(result.status()));
    return;
  }
  ++samples.completed;
  samples.prompt_tokens += result->prompt_tokens;
  samples.completion_tokens += result->completion_tokens;
  samples.total_ms.push_back(static_cast<double>(result->total) / kMillisecond);
  if (!result->arrivals.empty())
    samples.first_ms.push_back(static_cast<double>(result->first_token) / kMillisecond);
  for (size_t i = 1; i < result->arrivals.size(); ++i) {
    samples.between_ms.push_back(static_cast<double>(result->arrivals[i] - result->arrivals[i - 1]) /
                                 kMillisecond);
  }
}

void print_row(const char* name, const json::object& row) {
  std::printf("  %-28s %9.2f %9.2f %9.2f %9.2f\n", name, row.at("mean").as_double(),
              row.at("p50").as_double(), row.at("p90").as_double(), row.at("p99").as_double());
}

Status run_bench(const BenchFlags& flags) {
  // Before the run: what was measured must not be lost for want of a place.
  std::ofstream report_file;
  if (!flags.json_path.empty()) {
    report_file.open(flags.json_path, std::ios::trunc);
    if (!report_file) return invalid_field("--json", "cannot write " + flags.json_path);
  }
  Samples samples;
  std::mutex mutex;
  std::atomic<int> next{0};
  std::atomic<int> done{0};
  const TimePoint start = steady_now();
  std::vector<std::thread> clients;
  for (int c = 0; c < std::min(flags.concurrency, flags.requests); ++c) {
    clients.emplace_back([&] {
      for (int i = next++; i < flags.requests; i = next++) {
        run_one(flags, i, samples, mutex);
        char line[80];
        std::snprintf(line, sizeof line, "bench: %d of %d requests", ++done, flags.requests);
        show_line(line);
      }
    });
  }
  for (auto& client : clients) client.join();
  clear_line();
  const double seconds = static_cast<double>(steady_now() - start) / kSecond;

  json::object report{
      {"requests", flags.requests},
      {"concurrency", flags.concurrency},
      {"input_tokens", flags.input_tokens},
      {"output_tokens", flags.output_tokens},
      {"completed", samples.completed},
      {"failed", static_cast<int64_t>(samples.errors.size())},
      {"duration_s", seconds},
      {"prompt_tokens", samples.prompt_tokens},
      {"completion_tokens", samples.completion_tokens},
      {"requests_per_s", samples.completed / seconds},
      {"output_tokens_per_s", static_cast<double>(samples.completion_tokens) / seconds},
      {"total_tokens_per_s",
       static_cast<double>(samples.completion_tokens + samples.prompt_tokens) / seconds},
      {"time_to_first_token_ms", summary(samples.first_ms)},
      {"inter_token_latency_ms", summary(samples.between_ms)},
      {"request_latency_ms", summary(samples.total_ms)},
  };
  std::printf(
      "%d of %d requests in %.2f s at concurrency %d: %.2f requests/s, %.1f output tokens/s, %.1f tokens/s "
      "in all\n",
      samples.completed, flags.requests, seconds, flags.concurrency, samples.completed / seconds,
      report["output_tokens_per_s"].as_double(), report["total_tokens_per_s"].as_double());
  std::printf("  %-28s %9s %9s %9s %9s\n", "ms", "mean", "p50", "p90", "p99");
  print_row("time to first token", report["time_to_first_token_ms"].as_object());
  print_row("between pieces of a stream", report["inter_token_latency_ms"].as_object());
  print_row("whole request", report["request_latency_ms"].as_object());
  if (!flags.json_path.empty()) {
    report_file << json::serialize(report) << "\n";
    if (!report_file.flush()) return invalid_field("--json", "cannot write " + flags.json_path);
  }
  if (!samples.errors.empty()) {
    return unavailable(std::to_string(samples.errors.size()) +
                       " requests failed, the first with: " + samples.errors.front());
  }
  return OkStatus();
}

}  // namespace

void add_bench_command(CLI::App& app, Command& chosen) {
  auto* command =
      app.add_subcommand("bench", "Measure a running cluster with a closed loop of streaming requests");
  auto flags = std::make_shared<BenchFlags>();
  command->add_option("--requests", flags->requests, "How many requests")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  command->add_option("--concurrency", flags->concurrency, "How many at a time")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_option("--input-tokens", flags->input_tokens, "Tokens of each prompt")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  command->add_option("--output-tokens", flags->output_tokens, "Tokens to generate, exactly")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  command->add_option("--workload-seed", flags->workload_seed, "Which prompts")->capture_default_str();
  command->add_option("--json", flags->json_path, "Also write the report to this file");
  flags->sampling.add_to(*command);
  command->callback([&chosen, flags] { chosen = [flags] { return run_bench(*flags); }; });
}

}  // namespace conclave::cli
