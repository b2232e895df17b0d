#include "expert_service/adapters/shard_metrics.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

namespace conclave {
namespace {

constexpr size_t kBusyExperts = 8;  // of a layer, shown together

// A few series a layer whatever the number of experts; `conclave experts` shows them one by one.
void export_layers(const ShardMetrics& m, MetricSink& sink) {
  if (m.experts == 0) return;
  std::vector<uint64_t> rows;
  for (size_t begin = 0, layer = 0; begin + m.experts <= m.tokens.size(); begin += m.experts, ++layer) {
    const MetricLabels labels = {{"layer", std::to_string(layer)}};
    rows.assign(m.tokens.begin() + static_cast<ptrdiff_t>(begin),
                m.tokens.begin() + static_cast<ptrdiff_t>(begin + m.experts));
    const auto busy = rows.begin() + static_cast<ptrdiff_t>(std::min<size_t>(kBusyExperts, rows.size()));
    std::partial_sort(rows.begin(), busy, rows.end(), std::greater<>());
    // The k largest of counters that grow grow as well.
    const auto counter = [&](const char* name, const char* help, uint64_t value) {
      sink.counter(name, help, static_cast<double>(value), labels);
    };
    counter("conclave_expert_layer_rows_total", "(row, expert) pairs computed, by layer",
            std::accumulate(rows.begin(), rows.end(), uint64_t{0}));
    counter("conclave_expert_layer_busiest_rows_total", "Of these: of the layer's expert that had most",
            rows.front());
    counter("conclave_expert_layer_busy_rows_total", "Of these: of the layer's eight experts that had most",
            std::accumulate(rows.begin(), busy, uint64_t{0}));
  }
}

}  // namespace

void export_metrics(const ShardMetrics& m, MetricSink& sink) {
  const auto counter = [&sink](const char* name, const char* help, uint64_t value) {
    sink.counter(name, help, static_cast<double>(value));
  };
  counter("conclave_expert_dispatches_total", "Dispatches received", m.dispatches);
  counter("conclave_expert_replies_total", "Replies sent", m.replies);
  counter("conclave_expert_groups_total", "Computations; rows divided by this is the mean batch", m.groups);
  counter("conclave_expert_rows_total", "(row, expert) pairs computed", m.items);
  counter("conclave_expert_missing_rows_total", "(row, expert) pairs whose expert is not held here",
          m.missing_items);
  counter("conclave_expert_runs_total", "Experts computed, each once a group: reads of an expert's weights",
          m.expert_runs);
  counter("conclave_expert_expired_dispatches_total", "Dispatches past their deadline when their turn came",
          m.expired_dispatches);
  counter("conclave_expert_cancelled_dispatches_total", "Dispatches cancelled, or of a worker that is gone",
          m.cancelled_dispatches);
  counter("conclave_expert_rejected_dispatches_total", "Dispatches that failed their checks",
          m.rejected_dispatches);
  counter("conclave_expert_dropped_replies_total", "Replies dropped for want of credits or of their worker",
          m.dropped_replies);
  counter("conclave_expert_paused_reads_total", "Times experts.max_queued_items was reached", m.reads_paused);
  counter("conclave_expert_warmed_weight_bytes_total", "Weights read while preparing placements",
          m.weight_bytes_warmed);
  counter("conclave_expert_released_experts_total", "Experts let go of after changes of the placement",
          m.released_experts);
  counter("conclave_expert_load_reports_total", "Reports of load sent to the scheduler", m.load_reports);
  sink.gauge("conclave_expert_held_weight_bytes", "Weights of the experts held, read or not",
             static_cast<double>(m.held_bytes));
  sink.gauge("conclave_expert_cold_experts", "Experts that wait to be read ahead",
             static_cast<double>(m.cold_experts));
  sink.gauge("conclave_expert_held_experts", "Experts held, over all layers",
             static_cast<double>(m.held_experts));
  sink.gauge("conclave_expert_queued_rows", "(row, expert) pairs waiting",
             static_cast<double>(m.queued_items));
  sink.counter("conclave_expert_compute_seconds_total", "Busy time",
               static_cast<double>(m.compute_ns) * 1e-9);
  export_layers(m, sink);
}

}  // namespace conclave
