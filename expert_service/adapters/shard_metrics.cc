#include "expert_service/adapters/shard_metrics.h"

namespace conclave {

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
}

}  // namespace conclave
