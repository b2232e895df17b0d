#include "scheduler/metrics.h"

#include <cstdint>
#include <string>

namespace conclave::scheduler {
namespace {

double number(uint64_t value) { return static_cast<double>(value); }
double seconds(uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

// Four series a layer and a few experts: the whole matrix would be thousands (`conclave experts` shows it).
void export_load(const LoadGauges& load, MetricSink& sink) {
  for (size_t i = 0; i < load.layers.size(); ++i) {
    const LayerGauge& layer = load.layers[i];
    const MetricLabels labels = {{"layer", std::to_string(i)}};
    sink.gauge("conclave_scheduler_layer_load_rows", "Rows a second of a layer's experts, weighted",
               layer.load, labels);
    sink.gauge("conclave_scheduler_layer_busiest_expert_ratio",
               "Load of the layer's busiest expert over the mean expert", layer.busiest_expert, labels);
    sink.gauge("conclave_scheduler_layer_busy_experts_share_ratio",
               "Share of the layer's load that its eight busiest experts have", layer.busy_share, labels);
    sink.gauge("conclave_scheduler_layer_busiest_shard_ratio",
               "Load of the layer's busiest shard over the mean, shared evenly by homes", layer.busiest_shard,
               labels);
  }
  for (const ExpertGauge& expert : load.experts) {
    sink.gauge("conclave_scheduler_busy_expert_load_rows",
               "Rows a second of the 16 experts that are asked for most", expert.load,
               {{"layer", std::to_string(expert.layer)}, {"expert", std::to_string(expert.expert)}});
  }
}

}  // namespace

void export_metrics(const SchedulerMetrics& m, MetricSink& sink) {
  sink.counter("conclave_scheduler_accepted_requests_total", "Requests accepted",
               number(m.requests_accepted));
  const auto refused = [&sink](const char* reason, uint64_t value) {
    sink.counter("conclave_scheduler_refused_requests_total", "Requests not accepted", number(value),
                 {{"reason", reason}});
  };
  refused("full", m.requests_refused_full);
  refused("invalid", m.requests_refused_invalid);
  refused("unready", m.requests_refused_unready);
  const auto ended = [&sink](const char* how, uint64_t value) {
    sink.counter("conclave_scheduler_ended_requests_total", "Accepted requests that ended", number(value),
                 {{"how", how}});
  };
  ended("stop", m.requests_finished_stop);
  ended("length", m.requests_finished_length);
  ended("cancelled", m.requests_cancelled);
  ended("abandoned", m.requests_abandoned);
  ended("deadline", m.requests_deadline);
  ended("error", m.requests_failed);
  const auto counter = [&sink](const char* name, const char* help, uint64_t value) {
    sink.counter(name, help, number(value));
  };
  counter("conclave_scheduler_reattached_requests_total", "Requests taken up again by their router",
          m.requests_reattached);
  counter("conclave_scheduler_adopted_requests_total", "Resumable requests taken over by a router",
          m.requests_adopted);
  counter("conclave_scheduler_released_requests_total",
          "Resumable requests whose router let go of them: their client left, or their text had ended",
          m.requests_released);
  counter("conclave_scheduler_refused_adoptions_total", "Requests that a router could not take over",
          m.adoptions_refused);
  counter("conclave_scheduler_refused_contexts_total",
          "Requests not resumable for want of room (bounds: scheduler.max_router_context_bytes, "
          "scheduler.max_router_context_total_bytes)",
          m.contexts_refused);
  counter("conclave_scheduler_dropped_resumable_requests_total",
          "Ended requests forgotten before their time (bounds: scheduler.max_resumable_requests, "
          "scheduler.max_resumable_bytes)",
          m.resumable_dropped);
  for (size_t hop = 0; hop < m.stalls_reported.size(); ++hop) {
    sink.counter("conclave_stall_reports_total", "Requests found without progress, by what they wait for",
                 number(m.stalls_reported[hop]),
                 {{"hop", std::string(stall_hop_name(static_cast<StallHop>(hop)))}});
  }
  counter("conclave_scheduler_replayed_sequences_total",
          "Sequences of lost workers, computed again elsewhere", m.sequences_replayed);
  counter("conclave_scheduler_preempted_sequences_total",
          "Sequences that gave their pages to more important ones", m.sequences_preempted);
  counter("conclave_scheduler_moved_sequences_total", "Sequences moved off draining workers",
          m.sequences_moved);
  counter("conclave_scheduler_drained_members_total", "Members that were drained or meant to leave",
          m.members_drained);
  counter("conclave_scheduler_planned_steps_total", "Plans sent to workers", m.steps_planned);
  counter("conclave_scheduler_retired_steps_total", "Plans that workers reported", m.steps_retired);
  counter("conclave_scheduler_prefill_tokens_total", "Prompt and replayed tokens planned", m.prefill_tokens);
  counter("conclave_scheduler_decode_slices_total", "Decode slices planned", m.decode_slices);
  counter("conclave_scheduler_sampled_tokens_total", "Tokens that workers sampled", m.tokens_sampled);
  counter("conclave_scheduler_discarded_tokens_total", "Tokens sampled for sequences that had ended",
          m.tokens_discarded);
  counter("conclave_scheduler_joined_members_total", "Workers and shards that joined", m.members_joined);
  counter("conclave_scheduler_refused_members_total", "Workers, shards and routers refused",
          m.members_refused);
  counter("conclave_scheduler_lost_members_total", "Workers and shards declared dead", m.members_lost);
  counter("conclave_scheduler_suspected_members_total", "Times a lease was not renewed", m.members_suspected);
  counter("conclave_scheduler_peer_complaints_total", "Complaints of workers about shards", m.peer_troubles);
  counter("conclave_scheduler_published_placements_total", "Placements published", m.placements_published);
  counter("conclave_scheduler_placement_changes_total", "Changes of the placement begun",
          m.placement_changes);
  counter("conclave_scheduler_added_homes_total", "Homes of experts that changes of the placement add",
          m.homes_added);
  counter("conclave_scheduler_removed_homes_total",
          "Homes of experts that changes of the placement take away", m.homes_removed);
  counter("conclave_scheduler_protocol_violations_total", "Messages that broke the protocol",
          m.protocol_violations);
  counter("conclave_scheduler_forgiven_stalls_total",
          "Times this process was late itself and extended leases", m.stalls_forgiven);
  counter("conclave_scheduler_followed_requests_total", "Requests whose timeline was begun",
          m.timelines_opened);
  counter("conclave_scheduler_refused_timelines_total",
          "Timelines not begun since as many open requests had one (bound: scheduler.max_timelines)",
          m.timelines_refused);
  sink.counter("conclave_scheduler_step_compute_seconds_total", "Busy time of retired steps",
               seconds(m.step_compute_ns));
  sink.counter("conclave_scheduler_step_expert_wait_seconds_total",
               "Time of retired steps spent waiting for experts", seconds(m.step_expert_wait_ns));
  sink.counter("conclave_scheduler_step_plan_wait_seconds_total",
               "Time workers stood still between steps for want of a plan", seconds(m.step_plan_wait_ns));
  sink.histogram("conclave_scheduler_queue_seconds",
                 "From a request's acceptance to the first start of one of its sequences", m.queue_times);
  counter("conclave_scheduler_admitted_tokens_total", "Known tokens of sequences when they started",
          m.prompt_tokens_admitted);
  counter("conclave_scheduler_cached_tokens_total", "Known tokens that were in the prefix cache",
          m.prompt_tokens_cached);
  const auto gauge = [&sink](const char* name, const char* help, uint64_t value) {
    sink.gauge(name, help, number(value));
  };
  gauge("conclave_scheduler_waiting_requests", "Requests accepted and not yet running", m.requests_waiting);
  gauge("conclave_scheduler_waiting_tokens", "Prompt tokens of waiting requests", m.tokens_waiting);
  gauge("conclave_scheduler_running_requests", "Requests running", m.requests_running);
  gauge("conclave_scheduler_detached_requests", "Requests whose router is away", m.requests_detached);
  gauge("conclave_scheduler_resumable_requests",
        "Ended requests kept to be resumed (bound: scheduler.max_resumable_requests)", m.requests_resumable);
  gauge("conclave_scheduler_resumable_bytes", "Their bytes (bound: scheduler.max_resumable_bytes)",
        m.resumable_bytes);
  gauge("conclave_scheduler_router_context_bytes",
        "Contexts of resumable requests (bound: scheduler.max_router_context_total_bytes)",
        m.router_context_bytes);
  for (size_t hop = 0; hop < m.requests_stalled.size(); ++hop) {
    sink.gauge("conclave_stalled_requests", "Requests without progress, by what they wait for",
               number(m.requests_stalled[hop]),
               {{"hop", std::string(stall_hop_name(static_cast<StallHop>(hop)))}});
  }
  gauge("conclave_scheduler_timelines",
        "Requests whose timeline is kept, open or ended (bound: scheduler.max_timelines)", m.timelines);
  gauge("conclave_scheduler_workers", "Attention workers", m.workers);
  gauge("conclave_scheduler_shards", "Expert shards", m.shards);
  gauge("conclave_scheduler_gateways", "Routers", m.gateways);
  gauge("conclave_scheduler_placement_epochs", "Epoch of the placement at the workers", m.placement_epoch);
  gauge("conclave_scheduler_preparing_placements", "1 while shards prepare a placement",
        m.placement_preparing ? 1 : 0);
  gauge("conclave_scheduler_short_experts", "(layer, expert) pairs with fewer homes than min_replicas",
        m.experts_short);
  sink.gauge("conclave_scheduler_busiest_shard_ratio", "Load of the busiest shard over the mean", m.busiest);
  sink.gauge("conclave_scheduler_busiest_layer_ratio",
             "Load of the busiest shard over the mean, in the worst layer", m.busiest_layer);
  if (m.shard_gauges != nullptr) {
    for (const ShardGauge& shard : *m.shard_gauges) {
      // Nothing keeps two shards from having one name.
      const MetricLabels labels = {{"shard", shard.name}, {"member", std::to_string(shard.shard.value)}};
      sink.gauge("conclave_scheduler_shard_homes", "(layer, expert) pairs a shard is a home of",
                 number(shard.homes), labels);
      sink.gauge("conclave_scheduler_shard_load_rows", "Rows a second a shard computes, weighted", shard.load,
                 labels);
      sink.gauge("conclave_scheduler_shard_assigned_load_rows",
                 "Rows a second of a shard's experts, shared evenly by their homes", shard.assigned_load,
                 labels);
    }
  }
  if (m.member_gauges != nullptr) {
    for (const MemberGauge& member : *m.member_gauges) {
      sink.gauge("conclave_scheduler_member_info", "1; the worker or shard that a label member names", 1,
                 {{"member", std::to_string(member.member.value)},
                  {"name", member.name},
                  {"role", member.role == Role::kAttention ? "attention" : "expert"}});
    }
  }
  if (m.load_gauges != nullptr) export_load(*m.load_gauges, sink);
  const auto blocks = [&sink](const char* state, uint64_t value) {
    sink.gauge("conclave_scheduler_kv_blocks", "KV pages of all workers", number(value), {{"state", state}});
  };
  blocks("total", m.kv_blocks_total);
  blocks("used", m.kv_blocks_used);
  blocks("cached", m.kv_blocks_cached);
  blocks("reserved", m.kv_blocks_reserved);
  sink.gauge("conclave_scheduler_kv_usage_ratio", "KV pages in use of all pages",
             m.kv_blocks_total == 0 ? 0 : number(m.kv_blocks_used) / number(m.kv_blocks_total));
  gauge("conclave_scheduler_kv_evictions", "Cached pages given up for room, of the workers of now",
        m.kv_evictions);
}

void export_metrics(const GrpcServerMetrics& m, MetricSink& sink) {
  sink.counter("conclave_scheduler_opened_streams_total", "Streams opened by members and routers",
               number(m.streams_opened));
  sink.counter("conclave_scheduler_invalid_messages_total", "Messages refused by validation",
               number(m.invalid_messages));
  sink.counter("conclave_scheduler_slow_peers_total", "Peers cut off because they did not read",
               number(m.slow_peers_cut));
  sink.gauge("conclave_scheduler_streams", "Streams open", number(m.streams));
}

}  // namespace conclave::scheduler
