#include "attention_service/adapters/worker_metrics.h"

#include <string>

namespace conclave {

void export_metrics(const WorkerMetrics& m, uint32_t kv_blocks, MetricSink& sink) {
  const auto counter = [&sink](const char* name, const char* help, uint64_t value) {
    sink.counter(name, help, static_cast<double>(value));
  };
  const auto gauge = [&sink](const char* name, const char* help, uint64_t value) {
    sink.gauge(name, help, static_cast<double>(value));
  };
  const auto time = [&sink](const char* name, const char* help, Nanos value) {
    sink.counter(name, help, static_cast<double>(value) * 1e-9);
  };
  counter("conclave_attention_steps_total", "Steps executed", m.steps);
  counter("conclave_attention_rows_total", "Positions computed", m.rows);
  counter("conclave_attention_sampled_tokens_total", "Tokens sampled", m.sampled_tokens);
  counter("conclave_attention_masked_rows_total", "Rows of sequences that ended while their step ran",
          m.masked_rows);
  counter("conclave_attention_failed_sequences_total", "Sequences that could not go on", m.failed_sequences);
  counter("conclave_attention_copied_pages_total", "KV pages copied, each in every layer", m.copied_pages);
  counter("conclave_attention_disordered_plans_total", "Plans that came out of order", m.plans_out_of_order);
  counter("conclave_attention_dropped_plans_total", "Plans past attention.max_queued_plans", m.plans_dropped);
  counter("conclave_attention_resets_total", "Scheduler connections that made it drop its sequences",
          m.resets);
  gauge("conclave_attention_sequences", "Sequences held", m.sequences);
  gauge("conclave_attention_queued_plans", "Plans waiting behind the running one", m.queued_plans);
  gauge("conclave_attention_kv_blocks", "Pages of the KV cache", kv_blocks);
  counter("conclave_attention_warmed_weight_bytes_total", "Weights read at the start", m.weight_bytes_warmed);
  time("conclave_attention_compute_seconds_total", "Busy time of steps", m.compute_ns);
  time("conclave_attention_layer_seconds_total",
       "Of the busy time: projections, attention and gate of layers", m.attention_ns);
  time("conclave_attention_dispatch_seconds_total", "Of the busy time: making and sending dispatches",
       m.dispatch_ns);
  time("conclave_attention_combine_seconds_total", "Of the busy time: adding the experts' outputs",
       m.combine_ns);
  time("conclave_attention_head_seconds_total", "Of the busy time: final norm, lm_head and sampling",
       m.head_ns);
  time("conclave_attention_expert_wait_seconds_total", "Time of steps spent waiting for experts",
       m.expert_wait_ns);
  time("conclave_attention_hidden_expert_seconds_total",
       "Busy time of steps while another micro-batch was at the experts: its wait is hidden. Micro-batch "
       "overlap is "
       "this over the sum of this and the wait",
       m.hidden_ns);
  sink.histogram("conclave_attention_step_seconds", "From a step's beginning to its end", m.step_times);
  time("conclave_attention_plan_wait_seconds_total",
       "Time between steps without a plan though there were sequences", m.plan_wait_ns);
  const ExchangeMetrics& e = m.exchange;
  counter("conclave_attention_dispatches_total", "Dispatches sent to shards", e.dispatches);
  counter("conclave_attention_dispatched_items_total", "(token, expert) pairs sent, repeats included",
          e.dispatched_items);
  counter("conclave_attention_combines_total", "Replies of shards", e.combines);
  counter("conclave_attention_accepted_items_total", "Expert outputs accepted", e.accepted_items);
  counter("conclave_attention_duplicate_items_total", "Expert outputs for slots that were filled",
          e.duplicate_items);
  counter("conclave_attention_late_combines_total", "Replies to dispatches no longer known", e.late_combines);
  counter("conclave_attention_rejected_combines_total", "Replies that were malformed or not asked for",
          e.rejected_combines);
  counter("conclave_attention_rejected_messages_total", "Messages that failed the transport's checks",
          e.rejected_messages);
  counter("conclave_attention_retried_items_total", "(token, expert) pairs sent again", e.retried_items);
  counter("conclave_attention_missing_items_total", "(token, expert) pairs that a shard lacked",
          e.missing_items);
  counter("conclave_attention_dispatch_deadlines_total", "Dispatches past their deadline", e.deadlines);
  counter("conclave_attention_holds_total", "Times rows found no home", e.holds);
  counter("conclave_attention_split_experts_total", "Experts of a dispatch whose rows went to several shards",
          e.split_experts);
  counter("conclave_attention_slow_shards_total", "Times a shard was found slow and avoided", e.peers_slow);
  counter("conclave_attention_credit_waits_total", "Dispatches that waited for a shard's credits",
          e.credit_waits);
  counter("conclave_attention_lost_shards_total", "Connections to shards lost", e.peers_down);
  gauge("conclave_attention_connected_shards", "Shards connected", e.peers_up);
  for (const ShardLink& link : m.links) {
    // Nothing keeps two shards from having one name.
    const MetricLabels labels = {{"shard", link.name}, {"member", std::to_string(link.shard.value)}};
    sink.histogram("conclave_attention_shard_reply_seconds",
                   "From a dispatch to the shard's reply, of those within their deadline", link.replies,
                   labels);
    sink.counter("conclave_attention_shard_compute_seconds_total",
                 "Of that time: the shard computed the group that the dispatch was in",
                 static_cast<double>(link.compute_ns) * 1e-9, labels);
    sink.counter("conclave_attention_shard_rows_total", "(token, expert) pairs in these replies",
                 static_cast<double>(link.replied_items), labels);
    sink.gauge("conclave_attention_shard_outstanding_rows", "(token, expert) pairs that are at the shard now",
               static_cast<double>(link.outstanding_items), labels);
  }
}

}  // namespace conclave
