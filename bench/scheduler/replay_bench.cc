// What each feature of the scheduler is worth, on a generated trace in virtual time; and what a flooding
// tenant leaves to others. Method and figures: docs/bench_scheduler.md.
//
//   tools/traces/make_trace.py --mix mixed | replay_bench --trace - [--variant NAME]
//   tools/traces/make_trace.py --mix fairness | replay_bench --trace - --fairness flood
//
// Further flags: --workers N, --kv-blocks N (of each worker), --cost STEP,DECODE_ROW,PREFILL_ROW,CONTEXT_1K
// in microseconds, --speed N (how many times faster than that the workers are), --json FILE. TTFT counts from
// the first attempt of a request, refusals included.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include "bench/scheduler/replay.h"

namespace conclave::bench {
namespace {

using scheduler::SchedulerOptions;

// One feature off in each; a line each. False where the scheduler has no such switch.
#define CONCLAVE_BENCH_SWITCH(field, value)       \
  [](auto& switches) -> bool {                    \
    if constexpr (requires { switches.field; }) { \
      switches.field = value;                     \
      return true;                                \
    } else {                                      \
      return false;                               \
    }                                             \
  }
const std::vector<std::pair<const char*, std::function<bool(SchedulerOptions&)>>> kVariants = {
    {"everything on", [](SchedulerOptions&) { return true; }},
    {"no prefix cache", CONCLAVE_BENCH_SWITCH(prefix_cache, false)},
    {"no chunked prefill",
     [](SchedulerOptions& o) {
       o.step_token_budget = o.prefill_chunk_tokens = 32'768;
       CONCLAVE_BENCH_SWITCH(itl_target_ms, 0)(o);
       return true;
     }},
    {"no bound on owed rows", CONCLAVE_BENCH_SWITCH(max_owed_prefill_tokens, 0)},
    {"no adaptive chunk", CONCLAVE_BENCH_SWITCH(itl_target_ms, 0)},
    {"no preemption", CONCLAVE_BENCH_SWITCH(preemption, false)},
    {"no fair tenants", CONCLAVE_BENCH_SWITCH(fair_tenants, false)},
    {"no deadline order", CONCLAVE_BENCH_SWITCH(deadline_order, false)},
    {"no band aging", CONCLAVE_BENCH_SWITCH(band_aging_ms, 0)},
    {"no step ahead", CONCLAVE_BENCH_SWITCH(steps_in_flight, 1)},
    {"no load in placement", CONCLAVE_BENCH_SWITCH(running_cost_tokens, 0)},
};

struct Percentiles {
  double p50 = 0, p90 = 0, p99 = 0;
};

Percentiles percentiles(std::vector<Nanos>& values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    const size_t index = static_cast<size_t>(share * static_cast<double>(values.size()));
    return static_cast<double>(values[std::min(index, values.size() - 1)]) / 1e6;
  };
  return {at(0.5), at(0.9), at(0.99)};
}

struct Totals {
  uint64_t sent = 0, finished = 0, late = 0, refused = 0, tokens = 0;
  Percentiles ttft, gaps;
};

Totals total(const std::vector<TraceRequest>& trace, const ReplayResult& result, const std::string& kind) {
  Totals totals;
  std::vector<Nanos> ttft, gaps;
  for (size_t i = 0; i < trace.size(); ++i) {
    const RequestRecord& record = result.requests[i];
    if (!record.sent || (!kind.empty() && trace[i].kind != kind)) continue;
    ++totals.sent;
    totals.finished += record.finished;
    totals.refused += record.refused;
    totals.late += !record.finished && !record.refused;
    if (record.first_token == 0) continue;
    totals.tokens += record.gaps.size() + 1;
    ttft.push_back(record.first_token - record.arrived);
    gaps.insert(gaps.end(), record.gaps.begin(), record.gaps.end());
  }
  totals.ttft = percentiles(ttft);
  totals.gaps = percentiles(gaps);
  return totals;
}

std::string text(const char* format, auto... values) {
  std::array<char, 512> buffer;
  std::snprintf(buffer.data(), buffer.size(), format, values...);
  return buffer.data();
}

std::string as_json(const std::string& variant, const std::string& kind, const Totals& t,
                    const ReplayResult& r, uint32_t workers) {
  const auto& m = r.metrics;
  uint64_t preempted = 0;
  const auto read = [&](const auto& metrics) {
    if constexpr (requires { metrics.sequences_preempted; }) preempted = metrics.sequences_preempted;
  };
  read(m);
  return text(
      "{\"variant\":\"%s\",\"kind\":\"%s\",\"sent\":%llu,\"finished\":%llu,\"late\":%llu,\"refused\":%llu,"
      "\"tokens_per_second\":%.1f,\"ttft_ms\":[%.0f,%.0f,%.0f],\"itl_ms\":[%.1f,%.1f,%.1f],\"hit_rate\":%.3f,"
      "\"preempted\":%llu,\"evictions\":%llu,\"seconds\":%.1f,\"busy\":%.2f,"
      "\"longest_step_ms\":%.0f}",
      variant.c_str(), kind.empty() ? "all" : kind.c_str(), static_cast<unsigned long long>(t.sent),
      static_cast<unsigned long long>(t.finished), static_cast<unsigned long long>(t.late),
      static_cast<unsigned long long>(t.refused),
      static_cast<double>(t.tokens) * 1e9 / static_cast<double>(r.end - r.start), t.ttft.p50, t.ttft.p90,
      t.ttft.p99, t.gaps.p50, t.gaps.p90, t.gaps.p99,
      static_cast<double>(m.prompt_tokens_cached) /
          static_cast<double>(std::max<uint64_t>(1, m.prompt_tokens_admitted)),
      static_cast<unsigned long long>(preempted), static_cast<unsigned long long>(m.kv_evictions),
      static_cast<double>(r.end - r.start) / 1e9,
      static_cast<double>(r.busy) / static_cast<double>(r.end - r.start) / workers,
      static_cast<double>(r.longest_step) / 1e6);
}

void run_variants(const std::vector<TraceRequest>& trace, const ReplayOptions& base, const std::string& only,
                  std::string& json) {
  std::set<std::string> kinds{""};
  for (const TraceRequest& request : trace) kinds.insert(request.kind);
  for (const auto& [name, apply] : kVariants) {
    if (!only.empty() && only != name) continue;
    ReplayOptions options = base;
    if (!apply(options.scheduler)) {
      std::printf("%-22s there is no such switch yet\n", name);
      continue;
    }
    const ReplayResult result = replay(trace, options);
    for (const std::string& kind : kinds) {
      const Totals t = total(trace, result, kind);
      const std::string line = as_json(name, kind, t, result, options.workers);
      json += line + "\n";
      std::printf(
          "%-22s %-6s sent %4llu done %4llu late %3llu  TTFT ms %6.0f %6.0f %6.0f  ITL ms %5.1f %6.1f %7.1f",
          name, kind.empty() ? "all" : kind.c_str(), static_cast<unsigned long long>(t.sent),
          static_cast<unsigned long long>(t.finished), static_cast<unsigned long long>(t.late), t.ttft.p50,
          t.ttft.p90, t.ttft.p99, t.gaps.p50, t.gaps.p90, t.gaps.p99);
      std::printf("%s\n", kind.empty() ? ("  " + line.substr(line.find("\"tokens_per"))).c_str() : "");
    }
  }
}

// Tokens of a tenant's finished requests a second, over the time in which the trace sends.
double completed(const std::vector<TraceRequest>& trace, const ReplayResult& result,
                 const std::string& tenant, Nanos until) {
  double tokens = 0;
  for (size_t i = 0; i < trace.size(); ++i) {
    const RequestRecord& record = result.requests[i];
    if (trace[i].tenant == tenant && record.finished && record.ended - result.start <= until) {
      tokens += trace[i].output;
    }
  }
  return tokens * 1e9 / static_cast<double>(until);
}

void run_fairness(const std::vector<TraceRequest>& trace, const ReplayOptions& base, const std::string& flood,
                  std::string& json) {
  std::set<std::string> tenants;
  Nanos until = 0;
  for (const TraceRequest& request : trace) {
    tenants.insert(request.tenant);
    until = std::max(until, request.at);
  }
  const auto run = [&](SchedulerOptions scheduler, const std::string& only) {
    ReplayOptions options = base;
    options.scheduler = scheduler;
    options.only_tenant = only;
    return replay(trace, options);
  };
  const double capacity = completed(trace, run(base.scheduler, flood), flood, until);
  std::printf("capacity (the flood alone): %.1f tokens/s\n", capacity);
  std::map<std::string, ReplayResult> alone;
  for (const std::string& tenant : tenants) {
    if (tenant != flood) alone.emplace(tenant, run(base.scheduler, tenant));
  }
  for (const bool fair : {true, false}) {
    SchedulerOptions scheduler = base.scheduler;
    if (!fair && !CONCLAVE_BENCH_SWITCH(fair_tenants, false)(scheduler)) {
      std::printf("there is no switch for fairness yet\n");
      continue;
    }
    const ReplayResult beside = run(scheduler, "");
    for (const std::string& tenant : tenants) {
      const double with = completed(trace, beside, tenant, until);
      std::vector<TraceRequest> own;
      std::vector<Nanos> ttft;
      for (size_t i = 0; i < trace.size(); ++i) {
        const RequestRecord& record = beside.requests[i];
        if (trace[i].tenant == tenant && record.first_token != 0)
          ttft.push_back(record.first_token - record.arrived);
      }
      const Percentiles p = percentiles(ttft);
      const double lone = tenant == flood ? capacity : completed(trace, alone.at(tenant), tenant, until);
      const std::string line = text(
          "{\"fair\":%s,\"tenant\":\"%s\",\"lone\":%.2f,\"beside\":%.2f,\"kept\":%.3f,\"share_of_capacity\":%"
          ".3f,"
          "\"ttft_ms\":[%.0f,%.0f,%.0f]}",
          fair ? "true" : "false", tenant.c_str(), lone, with, lone > 0 ? with / lone : 0, lone / capacity,
          p.p50, p.p90, p.p99);
      json += line + "\n";
      std::printf("%s\n", line.c_str());
    }
  }
}

int run(int argc, char** argv) {
  ReplayOptions options;
  // Measured by step_cost_bench on one thread each of worker and shard, with one layer of M2's real geometry.
  options.cost = {62'248, 34'163, 5'293, 805};
  double speed = 20;
  std::string trace_file, variant, flood, json_file, json;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const char* value = i + 1 < argc ? argv[++i] : "";
    StepCost& c = options.cost;
    bool good = *value != '\0';
    if (name == "--trace") {
      trace_file = value;
    } else if (name == "--variant") {
      variant = value;
    } else if (name == "--fairness") {
      flood = value;
    } else if (name == "--json") {
      json_file = value;
    } else if (name == "--workers") {
      options.workers = static_cast<uint32_t>(std::strtoul(value, nullptr, 10));
      good = options.workers > 0 && options.workers <= 1024;
    } else if (name == "--kv-blocks") {
      options.kv_blocks = static_cast<uint32_t>(std::strtoul(value, nullptr, 10));
      good = options.kv_blocks > 0;
    } else if (name == "--speed") {
      speed = std::strtod(value, nullptr);
      good = speed > 0;
    } else if (name == "--cost") {
      good =
          std::sscanf(value, "%lf,%lf,%lf,%lf", &c.step, &c.decode_row, &c.prefill_row, &c.context_1k) == 4;
    } else {
      good = false;
    }
    if (!good) {
      std::fprintf(stderr, "replay_bench: %s %s is not understood\n", name.c_str(), value);
      return 2;
    }
  }
  for (double* cost :
       {&options.cost.step, &options.cost.decode_row, &options.cost.prefill_row, &options.cost.context_1k}) {
    *cost /= speed;
  }
  std::ifstream file;
  if (trace_file != "-") file.open(trace_file);
  const auto trace = read_trace(trace_file == "-" ? std::cin : file);
  if (!trace.ok()) {
    std::fprintf(stderr, "replay_bench: %s\n", message_of(trace.status()).c_str());
    return 2;
  }
  if (flood.empty()) {
    run_variants(*trace, options, variant, json);
  } else {
    run_fairness(*trace, options, flood, json);
  }
  if (!json_file.empty() && !(std::ofstream(json_file) << json)) {
    std::fprintf(stderr, "replay_bench: %s cannot be written\n", json_file.c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace conclave::bench

int main(int argc, char** argv) { return conclave::bench::run(argc, argv); }
