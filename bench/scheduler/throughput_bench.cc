// What the scheduler costs: the real core with fake workers in steady state, every message as bytes both
// ways. Method and figures: docs/bench_scheduler.md.
//
//   scheduler_bench [--workers 64] [--running 10000] [--prompt 128] [--output 256] [--burst 1]
//                   [--warm-rounds N] [--rounds N] [--json FILE] [--audit] [--wall]
//
// A round takes `burst` step results, from one worker after the other, as bytes: they are parsed and given to
// the core; then the core plans, and what it says goes out as bytes: token events, plans, replies. Ended
// requests are replaced by new ones within the round. Time is processor time of this one thread, without that
// of the fake workers and clients. The latency of a plan is that of a round without the submissions and
// without token events: the results parsed, on_event, plan(), the plan as bytes.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "bench/scheduler/fleet.h"
#include "bench/scheduler/wire.h"
#include "libs/base/check.h"
#include "libs/base/random.h"

namespace conclave::bench {
namespace {

using scheduler::Action;
using scheduler::Actions;
using scheduler::SchedulerCore;
using scheduler::SchedulerMetrics;
using scheduler::SchedulerOptions;

struct Flags {
  uint32_t workers = 64;
  uint32_t running = 10'000;
  uint32_t prompt = 128;
  uint32_t output = 256;  // mean; uniform from half to one and a half of it
  uint32_t burst = 1;
  uint32_t warm_rounds = 0;  // 0: as many as fill the fleet, and then some
  uint32_t rounds = 20'000;
  bool audit = false;
  std::string json;
};

// Processor time of the thread holds beside other work, but reading it is a system call, which slows a span of a
// microsecond by more than what clock_cost() takes off; --wall reads the wall clock, for an idle machine.
clockid_t clock_used = CLOCK_THREAD_CPUTIME_ID;

Nanos thread_time() {
  timespec t = {};
  clock_gettime(clock_used, &t);
  return t.tv_sec * kSecond + t.tv_nsec;
}

// What reading the clock adds to a span between two readings.
Nanos clock_cost() {
  Nanos best = kSecond;
  for (int i = 0; i < 1000; ++i) {
    const Nanos start = thread_time();
    best = std::min(best, thread_time() - start);
  }
  return best;
}

enum Phase { kDecodeResults, kOnResult, kEncodeTokens, kPlan, kEncodePlans, kSubmit, kPhases };
constexpr std::array<const char*, kPhases> kPhaseNames = {"decode_results", "on_result",    "encode_tokens",
                                                          "plan",           "encode_plans", "submissions"};

SchedulerOptions options_for(const Flags& flags) {
  SchedulerOptions options;
  options.max_running_requests = flags.running;
  options.max_batch_sequences = (flags.running + flags.workers - 1) / flags.workers;
  // Room for the decodes of all and the prompts of those that replace what ended.
  options.step_token_budget = options.max_batch_sequences + 4 * flags.prompt;
  options.prefill_chunk_tokens = flags.prompt;
  options.max_waiting_requests = flags.running + 1024;
  options.queue_reserve_percent = 0;  // one tenant fills it
  return options;
}

class Bench {
 public:
  explicit Bench(const Flags& flags)
      : flags_(flags), options_(options_for(flags)), core_(options_), random_(7), plans_(flags.workers) {
    FleetShape shape;
    shape.workers = flags.workers;
    const uint32_t positions = flags.prompt + flags.output * 3 / 2;
    shape.kv_blocks = (options_.max_batch_sequences + 8) * (positions / kBlockTokens + 2);
    fleet_ = join_fleet(core_, options_, shape, now_);
    for (uint32_t i = 0; i < flags.workers; ++i) index_of_[fleet_.workers[i]] = i;
    // Shorter at first, so that they do not end in step with each other.
    for (uint32_t i = 0; i < flags.running; ++i) submit(1 + static_cast<uint32_t>(random_.below(longest())));
    perform(core_.plan(now_), kPlan);
  }

  void run(uint32_t rounds) {
    for (uint32_t i = 0; i < rounds; ++i) round();
  }

  void reset() {
    time_ = {};
    latency_cpu_.clear();
    latency_wall_.clear();
    bytes_plans_ = bytes_results_ = 0;
    bytes_tokens_before_ = tokens_.bytes_written();
    before_ = core_.metrics();
  }

  void report();

 private:
  uint32_t longest() const { return std::max(2u, flags_.output * 3 / 2); }

  template <class F>
  auto timed(Phase phase, F&& work) {
    const Nanos start = thread_time();
    auto result = work();
    time_[phase] += thread_time() - start - clock_cost_;
    return result;
  }

  void submit(uint32_t max_tokens) {
    AcceptedRequest request;
    request.id = RequestId{random_.next(), ++submitted_};
    request.prompt.resize(flags_.prompt);
    for (TokenId& token : request.prompt) token = static_cast<TokenId>(random_.below(200'000));
    request.sampling.max_tokens = max_tokens;
    request.sampling.seed = submitted_;
    encode_submit(request, peer_bytes_);
    const Nanos start = thread_time();
    Actions actions = core_.on_event(scheduler::Submit{fleet_.gateway, decode_submit(peer_bytes_)}, now_);
    time_[kSubmit] += thread_time() - start - clock_cost_;
    perform(std::move(actions), kSubmit);
  }

  // What the loop does with actions. Token events and submissions' replies are counted as such; the bytes of
  // plans are kept for the fake workers.
  void perform(Actions actions, Phase phase) {
    std::vector<std::pair<uint32_t, std::string>> sent;
    const Nanos start = thread_time();
    for (Action& action : actions) {
      if (auto* tokens = std::get_if<scheduler::SendTokens>(&action)) {
        tokens_.add(tokens->event);
        if (tokens->event.finish != FinishReason::kNone) ++ended_;
      } else if (auto* send = std::get_if<scheduler::SendMember>(&action)) {
        std::string bytes;
        encode_to_member(send->message, bytes);
        bytes_plans_ += bytes.size();
        sent.emplace_back(index_of_.at(send->session), std::move(bytes));
      } else if (auto* reply = std::get_if<scheduler::ReplySubmit>(&action)) {
        CONCLAVE_CHECK(reply->status.ok());
        encode_reply(reply->request, reply->status, out_);
      } else {
        CONCLAVE_CHECK(false);
      }
    }
    actions.clear();
    time_[phase] += thread_time() - start - clock_cost_;
    for (auto& [worker, bytes] : sent) plans_[worker].push_back(std::move(bytes));
  }

  // A worker that samples some token wherever it is told to and never ends a sequence itself. False: it has
  // no plan.
  bool run_worker(uint32_t worker, std::string& bytes) {
    if (plans_[worker].empty()) return false;
    const ToMember message = decode_to_member(plans_[worker].front());
    plans_[worker].pop_front();
    const BatchPlan& plan = std::get<BatchPlan>(message);
    StepResult result;
    result.step = plan.step;
    result.compute_ns = 1000;
    for (const PlanSlice& slice : plan.slices) {
      if (!slice.sample) continue;
      SampledToken token;
      token.seq = slice.seq;
      token.position = slice.start + slice.count;
      token.token = static_cast<TokenId>(random_.below(200'000));
      result.sampled.push_back(std::move(token));
    }
    encode_from_member(result, bytes);
    bytes_results_ += bytes.size();
    return true;
  }

  void round() {
    if (++rounds_ % 256 == 0) {  // leases
      now_ += kMillisecond;
      core_.on_event(scheduler::MemberMessage{fleet_.shard, Heartbeat{}}, now_);
      for (const scheduler::SessionId worker : fleet_.workers) {
        core_.on_event(scheduler::MemberMessage{worker, Heartbeat{}}, now_);
      }
    }
    const auto before = time_;
    Nanos wall = 0;
    for (uint32_t i = 0; i < flags_.burst; ++i) {
      uint32_t tries = 0;
      while (!run_worker(next_worker_, peer_bytes_)) {
        next_worker_ = (next_worker_ + 1) % flags_.workers;
        CONCLAVE_CHECK(++tries <= flags_.workers);
      }
      const scheduler::SessionId session = fleet_.workers[next_worker_];
      next_worker_ = (next_worker_ + 1) % flags_.workers;
      const TimePoint wall_start = steady_now();
      FromMember message = timed(kDecodeResults, [&] { return decode_from_member(peer_bytes_); });
      Actions actions = timed(kOnResult, [&] {
        return core_.on_event(scheduler::MemberMessage{session, std::move(message)}, now_);
      });
      wall += steady_now() - wall_start;
      perform(std::move(actions), kEncodeTokens);
    }
    const TimePoint wall_start = steady_now();
    Actions actions = timed(kPlan, [&] {
      Actions planned = core_.plan(now_);
      sink_ += static_cast<uint64_t>(core_.next_timer());  // as the loop does after each round
      sink_ += core_.metrics().steps_planned;
      return planned;
    });
    perform(std::move(actions), kEncodePlans);
    wall += steady_now() - wall_start;
    timed(kEncodeTokens, [&] {
      tokens_.flush();
      return 0;
    });
    Nanos cpu = 0;
    for (const Phase phase : {kDecodeResults, kOnResult, kPlan, kEncodePlans}) {
      cpu += time_[phase] - before[phase];
    }
    latency_cpu_.push_back(cpu);
    latency_wall_.push_back(wall);
    for (; ended_ > 0; --ended_) {
      submit(flags_.output / 2 + 1 + static_cast<uint32_t>(random_.below(std::max(1u, flags_.output))));
    }
  }

  const Flags flags_;
  const Nanos clock_cost_ = clock_cost();
  const SchedulerOptions options_;
  SchedulerCore core_;
  SplitMix64 random_;
  Fleet fleet_;
  TimePoint now_ = kSecond;
  std::map<scheduler::SessionId, uint32_t> index_of_;
  std::vector<std::deque<std::string>> plans_;  // of each worker, as bytes
  std::string peer_bytes_;
  std::string out_;
  uint64_t submitted_ = 0;
  uint32_t ended_ = 0;
  uint32_t next_worker_ = 0;
  uint64_t rounds_ = 0;
  std::array<Nanos, kPhases> time_{};
  std::vector<Nanos> latency_cpu_;
  std::vector<Nanos> latency_wall_;
  TokenWriter tokens_;
  uint64_t bytes_plans_ = 0, bytes_results_ = 0;  // since reset()
  uint64_t bytes_tokens_before_ = 0;
  SchedulerMetrics before_;
  uint64_t sink_ = 0;
};

double percentile_us(std::vector<Nanos>& values, double share) {
  const size_t at =
      std::min(values.size() - 1, static_cast<size_t>(share * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(at), values.end());
  return static_cast<double>(values[at]) / 1000;
}

void Bench::report() {
  const SchedulerMetrics after = core_.metrics();
  const uint64_t decodes = after.decode_slices - before_.decode_slices;
  const uint64_t sampled = after.tokens_sampled - before_.tokens_sampled;
  CONCLAVE_CHECK(decodes > 0);
  Nanos total = 0;
  for (const Nanos time : time_) total += time;
  std::string json = "{\"workers\":" + std::to_string(flags_.workers) +
                     ",\"running\":" + std::to_string(core_.metrics().requests_running) +
                     ",\"burst\":" + std::to_string(flags_.burst) +
                     ",\"decode_tokens\":" + std::to_string(decodes) +
                     ",\"sampled_tokens\":" + std::to_string(sampled);
  const auto add = [&](const std::string& name, double value) {
    char text[64];
    std::snprintf(text, sizeof text, "%.4g", value);
    json += ",\"" + name + "\":" + text;
  };
  add("decode_tokens_per_second", static_cast<double>(decodes) * 1e9 / static_cast<double>(total));
  add("ns_per_decode_token", static_cast<double>(total) / static_cast<double>(decodes));
  for (int i = 0; i < kPhases; ++i) {
    add(std::string("ns_") + kPhaseNames[static_cast<size_t>(i)],
        static_cast<double>(time_[static_cast<size_t>(i)]) / static_cast<double>(decodes));
  }
  const auto per_token = [&](uint64_t bytes) {
    return static_cast<double>(bytes) / static_cast<double>(decodes);
  };
  add("bytes_result", per_token(bytes_results_));
  add("bytes_plan", per_token(bytes_plans_));
  add("bytes_tokens", per_token(tokens_.bytes_written() - bytes_tokens_before_));
  add("plan_latency_p50_us", percentile_us(latency_cpu_, 0.5));
  add("plan_latency_p99_us", percentile_us(latency_cpu_, 0.99));
  add("plan_latency_wall_p50_us", percentile_us(latency_wall_, 0.5));
  add("plan_latency_wall_p99_us", percentile_us(latency_wall_, 0.99));
  json += "}";
  std::printf("%s\n", json.c_str());
  if (!flags_.json.empty()) {
    std::FILE* file = std::fopen(flags_.json.c_str(), "w");
    if (file == nullptr) {
      std::perror(flags_.json.c_str());
      std::exit(1);
    }
    std::fprintf(file, "%s\n", json.c_str());
    std::fclose(file);
  }
  if (flags_.audit) {
    const Status audit = core_.audit();
    std::printf("audit: %s\n", message_of(audit).c_str());
    if (!audit.ok() || core_.metrics().protocol_violations != 0) std::exit(1);
  }
}

int run(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--wall") {
      clock_used = CLOCK_MONOTONIC;
      continue;
    }
    if (name == "--audit") {
      flags.audit = true;
      continue;
    }
    const char* value = i + 1 < argc ? argv[++i] : "";
    const auto number = static_cast<uint32_t>(std::strtoul(value, nullptr, 10));
    if (name == "--json") {
      flags.json = value;
      continue;
    }
    uint32_t* field = name == "--workers"       ? &flags.workers
                      : name == "--running"     ? &flags.running
                      : name == "--prompt"      ? &flags.prompt
                      : name == "--output"      ? &flags.output
                      : name == "--burst"       ? &flags.burst
                      : name == "--warm-rounds" ? &flags.warm_rounds
                      : name == "--rounds"      ? &flags.rounds
                                                : nullptr;
    if (field == nullptr || number == 0) {
      std::fprintf(stderr, "scheduler_bench: %s %s is no flag with a number\n", name.c_str(), value);
      return 2;
    }
    *field = number;
  }
  if (flags.warm_rounds == 0) flags.warm_rounds = flags.workers * 150 / flags.burst + 1;
  Bench bench(flags);
  bench.run(flags.warm_rounds);
  bench.reset();
  bench.run(flags.rounds);
  bench.report();
  return 0;
}

}  // namespace
}  // namespace conclave::bench

int main(int argc, char** argv) { return conclave::bench::run(argc, argv); }
