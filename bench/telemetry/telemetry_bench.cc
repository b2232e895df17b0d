// What one event of metrics and timelines costs, as the processes do it: nanoseconds, printed as JSON.
//
//   telemetry_bench              {"counter": 0.6, ...}
//
// Each figure is the fastest of many rounds: what the machine does besides is no cost of ours. cost.py beside
// this file counts the events of a live cluster and multiplies.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "attention_service/core/options.h"
#include "attention_service/core/step_shards.h"
#include "libs/base/clock.h"
#include "libs/base/time_histogram.h"
#include "libs/rpc/convert.h"
#include "libs/telemetry/metrics.h"
#include "router_service/door/traceparent.h"
#include "router_service/gateway/timeline.h"
#include "scheduler/core/status_snapshot.h"
#include "scheduler/core/timelines.h"

namespace conclave {
namespace {

constexpr int kRounds = 200;
constexpr Nanos kRound = 300 * kMicrosecond;  // at least

template <class T>
void keep(T& value) {
  asm volatile("" : : "r"(&value) : "memory");
}

// Nanoseconds of one call; `call` gets a number that grows.
template <class Call>
double cost(const Call& call) {
  uint64_t batch = 1, at = 0;
  for (Nanos took = 0; took < kRound; batch *= 2) {
    const TimePoint begin = steady_now();
    for (uint64_t i = 0; i < batch; ++i) call(at++);
    took = steady_now() - begin;
  }
  double best = 1e18;
  for (int round = 0; round < kRounds; ++round) {
    const TimePoint begin = steady_now();
    for (uint64_t i = 0; i < batch; ++i) call(at++);
    best = std::min(best, static_cast<double>(steady_now() - begin) / static_cast<double>(batch));
  }
  return best;
}

StepTiming a_timing(size_t shards) {
  StepTiming timing;
  timing.wall_ns = 12'345'678;
  timing.attention_ns = 4'345'678;
  timing.dispatch_ns = 345'678;
  timing.combine_ns = 245'678;
  timing.head_ns = 1'245'678;
  timing.rows = 32;
  for (size_t i = 0; i < shards; ++i)
    timing.shards.push_back({Incarnation(1ull << 60 | i), 248, 1024, 3'000'000, 90'000, 1'000'000});
  return timing;
}

StepResult a_result() {
  StepResult result;
  result.step = StepId(12345);
  for (uint32_t i = 0; i < 32; ++i)
    result.sampled.push_back({SeqId(1000 + i), 1000 + i, 100'000 + i, FinishReason::kNone, 0, {}});
  result.compute_ns = 10'000'000;
  return result;
}

double wire_cost(const StepResult& result) {
  return cost([&](uint64_t) {
    rpc::pb::StepResult message;
    rpc::to_proto(result, &message);
    std::string bytes = message.SerializeAsString();
    rpc::pb::StepResult back;
    back.ParseFromString(bytes);
    auto read = rpc::from_proto(back);
    keep(read);
  });
}

void print(const char* name, double ns, bool last = false) {
  std::printf("  \"%s\": %.2f%s\n", name, ns, last ? "" : ",");
}

int run() {
  std::printf("{\n");
  std::vector<uint64_t> counters(64);
  print("counter", cost([&](uint64_t i) {
          counters[i & 63] += i;
          keep(counters[i & 63]);
        }));
  print("clock", cost([](uint64_t) {
          TimePoint now = steady_now();
          keep(now);
        }));
  RequestTimeHistogram requests;
  MessageTimeHistogram messages;
  print("core_histogram", cost([&](uint64_t i) {
                            messages.observe(static_cast<Nanos>(i * 7919 % 20'000'000));
                            requests.observe(static_cast<Nanos>(i * 7919 % 200'000'000));
                            keep(messages);
                            keep(requests);
                          }) / 2);
  MetricsRegistry registry;
  Counter& counter = registry.counter("conclave_bench_events_total", "Events");
  Histogram& histogram = registry.histogram("conclave_bench_wait_seconds", "Wait");
  print("registry_counter", cost([&](uint64_t) { counter.add(); }));
  print("registry_histogram",
        cost([&](uint64_t i) { histogram.observe(static_cast<double>(i % 1000) * 1e-3); }));
  print("registry_lookup", cost([&](uint64_t i) {
          registry
              .counter(
                  "conclave_bench_answers_total", "Answers",
                  {{"protocol", "http"}, {"route", "/v1/completions"}, {"code", i % 2 == 0 ? "200" : "503"}})
              .add();
        }));
  // The scheduler copies its counters out after each round of events.
  scheduler::SchedulerMetrics metrics, shown;
  print("scheduler_snapshot", cost([&](uint64_t i) {
          metrics.steps_planned = i;
          scheduler::SchedulerMetrics copy = metrics;
          keep(copy);
          shown = copy;
          keep(shown);
        }));

  // --- timelines, of followed requests alone
  StepShards shards;
  print("timed_dispatch", cost([&](uint64_t i) {
          const Incarnation shard(1 + i % 8);
          const auto now = static_cast<TimePoint>(i * 1000);
          shards.sent(shard, now);
          shards.answered(shard, 900, 32, 500);
          shards.left(shard, now + 900);
        }));
  WorkerMetrics worker;
  print("timed_step", cost([&](uint64_t) {
          WorkerMetrics before = worker;
          keep(before);
          auto list = shards.list();
          keep(list);
        }));
  StepResult plain = a_result(), timed = a_result();
  timed.timing = a_timing(8);
  print("timed_result_on_the_wire", std::max(0.0, wire_cost(timed) - wire_cost(plain)));
  scheduler::Timeline timeline(RequestId{1, 2}, {}, 100, 256, 0);
  const auto timing = std::make_shared<const StepTiming>(a_timing(8));
  for (uint64_t i = 0; i < 9; ++i)
    timeline.name(Incarnation(1ull << 60 | i), "conclave-expert-" + std::to_string(i));
  print("step_of_a_timeline", cost([&](uint64_t i) {
          for (const ShardTiming& shard : timing->shards) {
            bool known = timeline.names(shard.shard);
            keep(known);
          }
          TimelineStep step;
          step.step = StepId(i);
          step.timing = timing;
          timeline.add(step, static_cast<TimePoint>(i), static_cast<TimePoint>(i + 5));
        }));
  gateway::Origin origin;
  gateway::RouterTimeline router(RequestId{1, 2}, origin, false, 0);
  TokenEvent event;
  event.tokens = {17};
  print("token_of_a_timeline", cost([&](uint64_t i) {
          event.index = static_cast<uint32_t>(i);
          router.tokens(event, static_cast<TimePoint>(i));
          router.taken(static_cast<TimePoint>(i + 1));
        }));
  print("traceparent", cost([&](uint64_t) {
          TraceContext trace =
              door::begin_trace("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", 0.01);
          std::string text = door::write_traceparent(trace);
          keep(text);
        }),
        true);
  std::printf("}\n");
  return 0;
}

}  // namespace
}  // namespace conclave

int main() { return conclave::run(); }
