#include "scheduler/metrics.h"

#include <cstdint>

namespace conclave::scheduler {
namespace {

double number(uint64_t value) { return static_cast<double>(value); }
double seconds(uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

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
  counter("conclave_scheduler_protocol_violations_total", "Messages that broke the protocol",
          m.protocol_violations);
  counter("conclave_scheduler_forgiven_stalls_total",
          "Times this process was late itself and extended leases", m.stalls_forgiven);
  sink.counter("conclave_scheduler_step_compute_seconds_total", "Busy time of retired steps",
               seconds(m.step_compute_ns));
  sink.counter("conclave_scheduler_step_expert_wait_seconds_total",
               "Time of retired steps spent waiting for experts", seconds(m.step_expert_wait_ns));
  sink.counter("conclave_scheduler_step_plan_wait_seconds_total",
               "Time workers stood still between steps for want of a plan", seconds(m.step_plan_wait_ns));
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
  gauge("conclave_scheduler_workers", "Attention workers", m.workers);
  gauge("conclave_scheduler_shards", "Expert shards", m.shards);
  gauge("conclave_scheduler_gateways", "Routers", m.gateways);
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
