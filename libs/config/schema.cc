#include "libs/config/schema.h"

#include <algorithm>

#include "libs/config/field_list.h"

namespace conclave {
namespace {

constexpr uint64_t kMaxBytes = 1ull << 50;
constexpr double kDayS = 86400;
constexpr size_t kMaxGuessLength = 100;  // of a word worth a guess at what was meant

void model_fields(FieldList& f, ModelConfig& c) {
  f.section("model");
  f.text("path", c.path, "Directory of the checkpoint (config.json, safetensors files, tokenizer.json).");
  f.text("name", c.name, "Name shown by /v1/models and accepted in requests; empty: the directory's name.");
  f.choice<Precision>(
      "precision", c.precision, {{"bf16", Precision::kBf16}, {"f32", Precision::kF32}},
      "Rounding of matmul inputs, hidden rows, expert outputs and the KV cache. f32 is for parity tests; "
      "the whole fleet must agree.");
  f.boolean("fp8_wire", c.fp8_wire,
            "Hidden rows travel to shards as FP8 with a scale for each 128 values: half the bytes, other "
            "rounding (its own numerics_id); with precision bf16 only, and the whole fleet must agree.");
}

void scheduler_option_fields(FieldList& f, scheduler::SchedulerOptions& o) {
  const auto count = [&f](const char* key, uint32_t& member, uint32_t high, const char* unit,
                          const char* doc) { f.integer<uint32_t>(key, member, 1, high, unit, doc); };
  count("max_waiting_requests", o.max_waiting_requests, 10'000'000, "requests",
        "Requests accepted and not yet started, one with n choices counted n times; past it submissions get "
        "RESOURCE_EXHAUSTED.");
  f.integer<uint64_t>("max_waiting_tokens", o.max_waiting_tokens, 1, 1ull << 40, "tokens",
                      "Prompt tokens of all waiting requests; past it submissions get RESOURCE_EXHAUSTED.");
  f.integer<uint64_t>("max_prompt_logprob_values", o.max_prompt_logprob_values, 1, 1ull << 40, "numbers",
                      "Prompt log-probabilities kept for all open requests: prompt tokens times (1 + those "
                      "asked for beside each); past it submissions get RESOURCE_EXHAUSTED.");
  count("max_inbox_submissions", o.max_inbox_submissions, 10'000'000, "requests",
        "Submissions received and not yet looked at; past it they get RESOURCE_EXHAUSTED.");
  count("max_running_requests", o.max_running_requests, 1'000'000, "requests",
        "Sequences running on all workers together; further ones wait.");
  f.integer<uint32_t>("queue_reserve_percent", o.queue_reserve_percent, 0, 90, "%",
                      "The last part of the queue, for tenants that hold less than that of it; as much again "
                      "for each step of priority below the default is closed to such requests.");
  f.integer<uint32_t>("band_aging_ms", o.band_aging_ms, 0, 86'400'000, "ms",
                      "A request that waits rises by one step of priority in this time; 0: it does not.");
  f.boolean(
      "fair_tenants", o.fair_tenants,
      "Tenants of one priority take turns by the tokens they were served; else the order is by arrival.");
  f.weights("tenant_weights", o.tenant_weights, 1, 1000,
            "Shares of tenants in contention; 1 for those not named.");
  f.integer<uint32_t>("max_idle_tenants", o.max_idle_tenants, 0, 1'000'000, "tenants",
                      "Tenants without requests whose service is remembered.");
  f.boolean("deadline_order", o.deadline_order,
            "Within a tenant the earliest deadline goes first; else the earliest arrival.");
  f.integer<uint32_t>("default_due_ms", o.default_due_ms, 1, 86'400'000, "ms",
                      "For that order a request is due at its deadline, or so long after its arrival if that "
                      "is earlier.");
  count("step_token_budget", o.step_token_budget, 65536, "tokens",
        "Rows of one plan; a worker with a lower max_batch_tokens gets fewer.");
  count("prefill_chunk_tokens", o.prefill_chunk_tokens, 65536, "tokens",
        "Rows of one prompt in one plan; while others wait for theirs, half of what is left at most.");
  count("max_batch_sequences", o.max_batch_sequences, 65536, "sequences",
        "Sequences on one worker at a time.");
  count("steps_in_flight", o.steps_in_flight, 16, "plans",
        "Plans a worker holds: the next is planned while one runs.");
  f.integer<uint32_t>("itl_target_ms", o.itl_target_ms, 0, 600'000, "ms",
                      "Prefill beside decodes is cut so that a step takes no longer than this, or than twice "
                      "its decodes alone; 0: only step_token_budget counts.");
  f.integer<uint32_t>("prefill_target_ms", o.prefill_target_ms, 0, 600'000, "ms",
                      "A step of prefill alone is cut so that it takes no longer than this; 0: only "
                      "step_token_budget counts.");
  count("min_prefill_tokens", o.min_prefill_tokens, 65536, "tokens",
        "Prefill that goes with every step, however slow it is.");
  f.integer<uint32_t>("max_owed_prefill_tokens", o.max_owed_prefill_tokens, 0, 100'000'000, "tokens",
                      "Nothing starts on a worker with so many rows of prefill before it (of one prompt an "
                      "eighth of a step counts): until then the order may still change. 0: no bound.");
  f.boolean(
      "preemption", o.preemption,
      "Sequences start before there is room for all they may generate, and the least important one gives "
      "its pages back when there is none left.");
  f.integer<uint32_t>("admission_reserve_tokens", o.admission_reserve_tokens, 0, 1'000'000, "tokens",
                      "Room beyond its known tokens with which a sequence starts; doubles each time it was "
                      "preempted.");
  f.boolean(
      "prefix_cache", o.prefix_cache,
      "Keep pages of prompts and answers, while nobody needs their room, for requests that begin alike.");
  count("running_cost_tokens", o.running_cost_tokens, 1'000'000, "tokens",
        "A request goes to the worker on which it has least to compute; each sequence that runs there counts "
        "as "
        "so many tokens.");
  f.integer<uint32_t>(
      "lease_ms", o.lease_ms, 20, 600'000, "ms",
      "A member that is silent for so long is suspected and gets no new work; members renew five times "
      "as often.");
  f.integer<uint32_t>("dead_after_ms", o.dead_after_ms, 20, 3'600'000, "ms",
                      "A member that is silent for so long is dead and replaced.");
  f.integer<uint32_t>("dead_after_trouble_ms", o.dead_after_trouble_ms, 20, 3'600'000, "ms",
                      "The same for a shard that workers complain about.");
  count("max_peer_troubles", o.max_peer_troubles, 1'000'000, "complaints",
        "Complaints of workers within peer_trouble_window_ms after which a shard is dead, lease or not.");
  f.integer<uint32_t>("peer_trouble_window_ms", o.peer_trouble_window_ms, 1, 3'600'000, "ms",
                      "See max_peer_troubles.");
  f.integer<uint32_t>("step_timeout_ms", o.step_timeout_ms, 1, 86'400'000, "ms",
                      "A worker that owes a step for so long, though every expert has a home, is dead.");
  count("max_kv_blocks_per_worker", o.max_kv_blocks_per_worker, 268'435'456, "pages",
        "Pages of KV cache a worker may announce; one with more is refused.");
  count("max_members", o.max_members, 65536, "members", "Workers and shards; more are refused.");
  count("max_gateways", o.max_gateways, 65536, "routers", "Routers; more are refused.");
  count("max_fenced_incarnations", o.max_fenced_incarnations, 10'000'000, "incarnations",
        "Dead memberships remembered one by one; older ones are refused by their start time.");
  count("min_replicas", o.min_replicas, 64, "shards",
        "Homes of every expert, where shards have room for them (experts.capacity_bytes).");
  count("max_replicas", o.max_replicas, 64, "shards",
        "Homes of an expert that is asked for more than others; at least min_replicas.");
  f.integer<uint32_t>("rebalance_interval_s", o.rebalance_interval_s, 0, 86'400, "s",
                      "Placement is looked at so often for shards that have more to do than others; 0: only "
                      "when shards come or go.");
  f.real(
      "rebalance_ratio", o.rebalance_ratio, 1, 100, "",
      "A layer is evened out once its busiest shard has so many times the mean load, if that takes as much "
      "off it.");
  count("load_half_life_s", o.load_half_life_s, 86'400, "s",
        "What an expert was asked for so long ago counts half.");
  f.integer<uint32_t>("placement_settle_ms", o.placement_settle_ms, 0, 600'000, "ms",
                      "Shards that join within this time are placed together.");
  f.integer<uint32_t>("placement_ready_timeout_ms", o.placement_ready_timeout_ms, 1, 86'400'000, "ms",
                      "Time a shard has to load what a placement gives it.");
  f.integer<uint32_t>("gateway_grace_ms", o.gateway_grace_ms, 0, 86'400'000, "ms",
                      "Requests of a router whose connection was lost wait this long for it to come back; "
                      "resumable streams wait as long for their client, ended or not.");
  f.integer<uint32_t>("max_router_context_bytes", o.max_router_context_bytes, 0, 1 << 20, "bytes",
                      "What another router needs to go on with one request; past it the request is not "
                      "resumable. 0: none is.");
  f.bytes("max_router_context_total_bytes", o.max_router_context_total_bytes, 0, kMaxBytes,
          "The same of all requests together; past it new ones are not resumable.");
  f.integer<uint32_t>("max_resumable_requests", o.max_resumable_requests, 0, 10'000'000, "requests",
                      "Resumable requests kept after their end; past it the oldest are forgotten.");
  f.bytes("max_resumable_bytes", o.max_resumable_bytes, 0, kMaxBytes,
          "Their prompts, tokens and log-probabilities; past it the oldest are forgotten.");
  f.integer<uint32_t>(
      "max_timelines", o.max_timelines, 0, 65536, "requests",
      "Requests, open or ended, whose timeline is kept (router.trace_share says of which); 0: "
      "none.");
  f.integer<uint32_t>("max_timeline_steps", o.max_timeline_steps, 2, 4096, "steps",
                      "Steps of such a request that are kept: the first half and the last half.");
}

void scheduler_fields(FieldList& f, SchedulerConfig& c) {
  f.section("scheduler");
  f.address("listen", c.listen, false,
            "gRPC address of the control plane. Port 0: chosen by the kernel and reported.");
  f.address("address", c.address, true,
            "Where workers, shards and routers find the scheduler; empty: `listen`.");
  f.address("ops_listen", c.ops_listen, false, "HTTP address of /metrics, /livez, /readyz and /startupz.");
  scheduler_option_fields(f, c.options);
  f.integer<uint32_t>("session_queue_messages", c.session_queue_messages, 16, 1000000, "messages",
                      "Messages waiting for one slow worker, shard or router before it is cut off.");
  f.bytes("session_queue_bytes", c.session_queue_bytes, 1 << 20, kMaxBytes,
          "Bytes waiting for one slow worker, shard or router before it is cut off.");
  f.duration("drain_time_s", c.drain_time, kSecond, "s", 0, 3600,
             "Time between SIGTERM and the end, at most.");
}

void admission_fields(FieldList& f, gateway::AdmissionLimits& o) {
  const auto count = [&f](const char* key, uint32_t& member, uint32_t low, uint32_t high, const char* unit,
                          const char* doc) { f.integer<uint32_t>(key, member, low, high, unit, doc); };
  f.bytes("max_body_bytes", o.max_body_bytes, 1024, 1ull << 30,
          "Longest HTTP request body and gRPC message; past it HTTP 413 and RESOURCE_EXHAUSTED.");
  count("max_header_bytes", o.max_header_bytes, 1024, 1 << 20, "bytes",
        "Longest HTTP header and gRPC metadata; past it HTTP 431.");
  count("max_messages", o.max_messages, 1, 1000000, "messages", "Messages of one chat; past it HTTP 400.");
  count("max_tools", o.max_tools, 0, 1000000, "tools", "Tools of one chat; past it HTTP 400.");
  count("max_prompts", o.max_prompts, 1, 4096, "prompts", "Prompts of one completion; past it HTTP 400.");
  count("max_answers", o.max_answers, 1, 4096, "answers",
        "Prompts times choices of one request; past it HTTP 400.");
  count("max_choices", o.max_choices, 1, 128, "choices", "Choices of one request (n); past it HTTP 400.");
  count("max_top_logprobs", o.max_top_logprobs, 0, 1024, "tokens",
        "Alternatives for each token of the answer or the prompt; past it HTTP 400.");
  count("max_stop_strings", o.max_stop_strings, 0, 1024, "strings", "Stop strings of one request.");
  count("max_stop_string_bytes", o.max_stop_string_bytes, 1, 1 << 16, "bytes", "Longest stop string.");
  count("max_stop_token_ids", o.max_stop_token_ids, 0, 1 << 16, "ids", "Stop token ids of one request.");
  count("max_name_bytes", o.max_name_bytes, 1, 4096, "bytes", "Longest name that a client gives a request.");
  count("max_bytes_per_token", o.max_bytes_per_token, 1, 1 << 16, "bytes",
        "Text with more bytes than this for each token of the context is refused unread.");
  count("max_requests", o.max_requests, 1, 1000000, "requests",
        "Requests open at once; past it HTTP 503 and RESOURCE_EXHAUSTED.");
  count("max_queued_requests", o.max_queued_requests, 1, 1000000, "requests",
        "Requests that wait for their first token; past it HTTP 503 and RESOURCE_EXHAUSTED.");
  f.integer<uint64_t>("max_queued_tokens", o.max_queued_tokens, 1, 1ull << 40, "tokens",
                      "Prompt tokens of those, by their bytes until they are tokenized; past it as above.");
  count("max_waiting_texts", o.max_waiting_texts, 1, 1000000, "requests",
        "Requests that wait to be tokenized; past it as above.");
}

void router_fields(FieldList& f, RouterConfig& c) {
  f.section("router");
  f.address("http_listen", c.http_listen, true, "Address of the OpenAI-compatible HTTP API; empty: none.");
  f.address("grpc_listen", c.grpc_listen, true, "Address of the gRPC API; empty: none.");
  f.address("ops_listen", c.ops_listen, false, "HTTP address of /metrics, /livez, /readyz and /startupz.");
  f.address(
      "admin_listen", c.admin_listen, true,
      "HTTP address of the admin routes (docs/front_door.md), which ask for no key: keep it on the loopback "
      "interface. Empty: none.");
  f.text(
      "api_keys_file", c.api_keys_file,
      "File of hashed API keys (`conclave key` makes lines of it), read again when it changes and on SIGHUP; "
      "empty: nobody is asked for a key.");
  f.boolean("trust_without_keys", c.trust_without_keys,
            "Without api_keys_file: whether callers count as trusted and may set allow_special_tokens.");
  f.boolean("access_log", c.access_log, "One log line for each request: sizes and times, never text.");
  f.real("trace_share", c.trace_share, 0, 1, "",
         "Share of requests whose timeline is kept (docs/timelines.md), beside those whose client sends a "
         "traceparent that says sampled.");
  f.integer<uint32_t>("max_timelines", c.max_timelines, 0, 65536, "requests",
                      "Requests, open or ended, whose timeline this router keeps.");
  admission_fields(f, c.limits);
  f.integer<uint32_t>("max_connections", c.max_connections, 1, 1000000, "connections",
                      "HTTP connections open at once.");
  f.integer<uint32_t>("max_stream_events", c.max_stream_events, 16, 1000000, "events",
                      "Tokens waiting for one slow client before its request is cancelled.");
  f.integer<uint32_t>("http_threads", c.http_threads, 1, 256, "threads", "Threads that serve HTTP.");
  f.integer<uint32_t>("template_processes", c.template_processes, 1, 64, "processes",
                      "Child processes that render chat templates.");
  f.duration("template_deadline_ms", c.template_deadline, kMillisecond, "ms", 10, 60000,
             "Time one chat template may take to render.");
  f.duration("default_deadline_s", c.default_deadline, kSecond, "s", 1, 7 * kDayS,
             "Time a request may take where its client set none.");
  f.duration("idle_timeout_s", c.idle_timeout, kSecond, "s", 1, kDayS,
             "An HTTP connection idle for so long is closed.");
  f.duration("write_timeout_s", c.write_timeout, kSecond, "s", 1, kDayS,
             "A client that takes no byte of its answer for so long is cut off.");
  f.duration(
      "sse_ping_interval_s", c.sse_ping_interval, kSecond, "s", 0, kDayS,
      "A stream that is silent for so long gets a comment, so that nothing on the way closes it; 0: never.");
  f.duration("drain_time_s", c.drain_time, kSecond, "s", 0, 3600,
             "Time after SIGTERM in which open requests may finish.");
}

void processor_fields(FieldList& f, ProcessorConfig& c) {
  f.text("cpus", c.cpus,
         "Processors the process may run on: a list as 0-3,8, or numa:1 for those of one memory node, whose "
         "memory it then uses; empty: all it was started with.");
  f.boolean("pin_threads", c.pin_threads,
            "Each thread that computes keeps to one of these processors; for processes that share none.");
}

void exchange_fields(FieldList& f, ExchangeOptions& o) {
  f.duration("dispatch_deadline_floor_ms", o.deadline_floor, kMillisecond, "ms", 1, 3600000,
             "A dispatch to a shard may always take this long before its rows go elsewhere.");
  f.real("dispatch_deadline_multiple", o.deadline_multiple, 1, 1000, "",
         "... and this many times its recent latency.");
  f.duration("dispatch_deadline_cap_ms", o.deadline_cap, kMillisecond, "ms", 1, 3600000,
             "... but never longer.");
  f.duration("missing_retry_ms", o.missing_retry, kMillisecond, "ms", 0.1, 60000,
             "Pause before rows are offered again to a shard that lacks their expert; doubles.");
  f.duration("missing_retry_cap_ms", o.missing_retry_cap, kMillisecond, "ms", 0.1, 600000,
             "Longest such pause.");
  f.duration("shard_reconnect_ms", o.reconnect, kMillisecond, "ms", 1, 60000,
             "Pause before connecting again to a shard whose endpoint failed; doubles.");
  f.duration("shard_reconnect_cap_ms", o.reconnect_cap, kMillisecond, "ms", 1, 600000, "Longest such pause.");
  f.duration(
      "placement_switch_ms", o.switch_wait, kMillisecond, "ms", 0, 600000,
      "Time a new placement waits at most for connections to its shards, while the one before it serves.");
  f.duration("trouble_interval_ms", o.trouble_interval, kMillisecond, "ms", 1, 600000,
             "Missed deadlines of one shard are reported to the scheduler at most once in this time.");
  f.duration(
      "slow_shard_ms", o.slow_peer, kMillisecond, "ms", 0, 600000,
      "A shard that missed a deadline is avoided for so long where an expert has another home; doubles.");
  f.duration("slow_shard_cap_ms", o.slow_peer_cap, kMillisecond, "ms", 0, 3600000, "Longest such time.");
  f.integer<uint32_t>("max_dispatch_rows", o.max_dispatch_rows, 1, 1u << 20, "rows",
                      "Rows of one dispatch; larger ones are sent in parts.");
  f.integer<uint32_t>("max_dispatch_items", o.max_dispatch_items, 1, 1u << 24, "items",
                      "(row, expert) pairs of one dispatch; larger ones are sent in parts.");
}

void attention_fields(FieldList& f, AttentionConfig& c) {
  f.section("attention");
  WorkerOptions& o = c.options;
  f.text("name", o.name, "Name of the worker for people; empty: made from the host name and process id.");
  f.address("ops_listen", c.ops_listen, false, "HTTP address of /metrics, /livez, /readyz and /startupz.");
  f.integer<uint32_t>("kv_blocks", o.kv_blocks, 0, 1u << 30, "pages of 16 tokens",
                      "Pages of the KV cache; 0: as many as kv_bytes hold.");
  f.bytes("kv_bytes", c.kv_bytes, 1 << 16, kMaxBytes, "Memory of the KV cache where kv_blocks is 0.");
  f.integer<uint32_t>("threads", o.threads, 0, 1024, "threads",
                      "Threads that compute; 0: as many as processors it may run on.");
  processor_fields(f, c.processors);
  f.integer<uint32_t>("max_batch_tokens", o.max_batch_tokens, 1, 65536, "tokens", "Rows one plan may have.");
  f.integer<uint32_t>(
      "micro_batches", o.micro_batches, 1, 16, "micro-batches",
      "Parts of one step in flight at most, so that attention of one overlaps experts of another.");
  f.integer<uint32_t>("micro_batch_min_rows", o.micro_batch_min_rows, 1, 65536, "tokens",
                      "A step has no more parts than keep at least so many rows each.");
  f.boolean("micro_batch_tuning", o.micro_batch_tuning,
            "Whether a step has as many parts as were the fastest for its size; off: as many as may be.");
  f.integer<uint32_t>(
      "max_queued_plans", o.max_queued_plans, 1, 65536, "plans",
      "Plans that may wait behind the running one, at least twice scheduler.steps_in_flight; a worker "
      "that gets more joins anew.");
  f.integer<uint32_t>("max_logit_rows", o.max_logit_rows, 1, 65536, "tokens",
                      "Rows whose logits are computed at once.");
  exchange_fields(f, o.exchange);
  f.duration(
      "drain_time_s", c.drain_time, kSecond, "s", 0, 3600,
      "Time after SIGTERM in which what runs here is moved to other workers; the worker ends as soon as that "
      "is done.");
}

void experts_fields(FieldList& f, ExpertsConfig& c) {
  f.section("experts");
  ShardOptions& o = c.options;
  f.text("name", o.name, "Name of the shard for people; empty: made from the host name and process id.");
  f.address("ops_listen", c.ops_listen, false, "HTTP address of /metrics, /livez, /readyz and /startupz.");
  f.bytes("capacity_bytes", o.capacity_bytes, 0, kMaxBytes,
          "Weights the shard may hold: placements give it no more than that, but for what is let go of while "
          "one changes. 0: no limit.");
  f.integer<uint32_t>("threads", o.threads, 0, 1024, "threads",
                      "Threads that compute; 0: as many as processors it may run on.");
  processor_fields(f, c.processors);
  f.integer<uint32_t>(
      "max_queued_items", o.max_queued_items, 1, 1u << 26, "items",
      "(row, expert) pairs waiting to be computed; past it nothing is read until a group is done.");
  f.integer<uint32_t>("max_group_items", o.max_group_items, 1, 1u << 26, "items",
                      "(row, expert) pairs computed together.");
  f.integer<uint32_t>(
      "max_waiting_replies", o.max_waiting_replies, 1, 1u << 20, "replies",
      "Replies that wait for a worker's credits; past it the oldest is dropped and its rows come again.");
  f.duration("reply_deadline_s", o.reply_deadline, kSecond, "s", 0.1, 3600,
             "Time a reply may wait for credits when its dispatch had no deadline.");
  f.bytes("warm_slice_bytes", o.warm_slice_bytes, 1 << 12, kMaxBytes,
          "Weights read at once while a placement is prepared, so that dispatches go on.");
  f.bytes("warm_bytes_per_s", o.warm_bytes_per_s, 0, kMaxBytes,
          "Pace of that, but where an expert has no other home; 0: no limit.");
  f.duration("load_report_ms", o.load_report, kMillisecond, "ms", 10, 3600000,
             "How often the shard tells the scheduler what it computed of which expert.");
  f.duration(
      "drain_time_s", c.drain_time, kSecond, "s", 0, 3600,
      "Time after SIGTERM for the scheduler to move what the shard holds to others; it ends as soon as "
      "that is done.");
}

void transport_fields(FieldList& f, TransportConfig& c) {
  f.section("transport");
  f.choice<TransportKind>("kind", c.kind,
                          {{"ucx", TransportKind::kUcx}, {"loopback", TransportKind::kLoopback}},
                          "How hidden rows travel; loopback works inside one process only.");
  f.text("interface", c.ucx.net_devices, "Network device UCX is pinned to (lo, eth0, mlx5_0:1 ...).");
  f.text("tls", c.ucx.tls, "UCX transports. Shared memory does not survive the death of a peer.");
  f.text("rndv_thresh", c.ucx.rndv_thresh, "UCX_RNDV_THRESH.");
  f.text("tcp_tx_seg_size", c.ucx.tcp_tx_seg_size, "UCX_TCP_TX_SEG_SIZE.");
  f.text("tcp_rx_seg_size", c.ucx.tcp_rx_seg_size, "UCX_TCP_RX_SEG_SIZE.");
  f.duration("spin_us", c.spin, kMicrosecond, "us", 0, 10000,
             "Polling before sleeping when rows are expected; 0: sleep at once.");
  TransportOptions& o = c.options;
  f.duration("connect_deadline_ms", o.connect_deadline, kMillisecond, "ms", 10, 600000,
             "Time a peer has to answer the hello of the data plane.");
  f.duration("keepalive_interval_ms", o.keepalive_interval, kMillisecond, "ms", 0, 3600000,
             "A peer that was silent for so long is asked for a sign of life; 0: never.");
  f.duration("keepalive_timeout_ms", o.keepalive_timeout, kMillisecond, "ms", 10, 3600000,
             "A peer that was silent for so long is given up.");
  f.boolean("rows_crc", o.rows_crc, "CRC32C over rows.");
  f.integer<uint32_t>("max_peers", o.max_peers, 1, 65536, "peers", "Peers connected or connecting at once.");
  f.integer<uint32_t>("max_rows", o.limits.max_rows, 1, 1u << 20, "rows", "Rows of one message.");
  f.integer<uint32_t>("max_items", o.limits.max_items, 1, 1u << 24, "items",
                      "(row, expert) pairs of one message.");
  f.integer<uint32_t>("max_hidden", o.limits.max_hidden, 8, 1u << 20, "elements", "Elements of one row.");
  f.bytes("max_message_bytes", o.limits.max_message_bytes, 1 << 16, 1ull << 40, "Longest message.");
  f.bytes("max_inflight_bytes", o.limits.max_inflight_bytes, 1 << 16, 1ull << 40,
          "Bytes on the way to one peer.");
  f.integer<uint32_t>("max_inflight_messages", o.limits.max_inflight_messages, 1, 1u << 20, "messages",
                      "Messages on the way to one peer.");
  f.text("secret_file", c.secret_file,
         "File with the cluster's secret, which every endpoint must prove to know; a second line is accepted "
         "too, "
         "while the secret is changed (docs/security.md). Read again when it changes. Empty: none. Traffic "
         "is not "
         "encrypted.");
}

void control_fields(FieldList& f, rpc::ClientOptions& c) {
  f.section("control");
  f.duration("reconnect_min_ms", c.reconnect_min, kMillisecond, "ms", 1, 60000,
             "First pause before connecting to the scheduler again; doubles, with jitter.");
  f.duration("reconnect_max_ms", c.reconnect_max, kMillisecond, "ms", 1, 600000, "Longest such pause.");
  f.duration("connect_deadline_ms", c.connect_deadline, kMillisecond, "ms", 10, 600000,
             "Time the scheduler has to answer a hello.");
  f.duration("submit_wait_ms", c.submit_wait, kMillisecond, "ms", 0, 600000,
             "Time a new request waits for an absent scheduler before it fails with UNAVAILABLE.");
  f.integer<uint32_t>("max_open_requests", c.max_open_requests, 1, 1000000, "requests",
                      "Requests one router keeps open at the scheduler.");
  f.integer<uint32_t>("queue_messages", c.queue_messages, 16, 1000000, "messages",
                      "Messages waiting to be written to the scheduler; past it the connection starts over.");
  f.bytes("max_message_bytes", c.max_message_bytes, 1 << 16, 1ull << 31,
          "Longest message of the control plane.");
}

void tls_fields(FieldList& f, tls::Options& c) {
  f.section("tls");
  f.text(
      "ca_file", c.ca_file,
      "PEM file of the authorities that the cluster's certificates come from; use one of the cluster's own.");
  f.text("cert_file", c.cert_file,
         "PEM file of this process's certificate, and those between it and an authority.");
  f.text("key_file", c.key_file, "PEM file of its private key, without a password.");
  f.text("server_name", c.server_name,
         "Name or address that the scheduler's certificate must hold; empty: the host of scheduler.address.");
  f.text("client_names", c.client_names,
         "The scheduler lets in only clients whose certificate holds one of these DNS or URI names, "
         "separated by "
         "commas; empty: every certificate of ca_file.");
  f.duration("reload_interval_s", c.reload_interval, kSecond, "s", 1, kDayS,
             "How often the files are looked at for changes, at most.");
}

void supervisor_fields(FieldList& f, SupervisorConfig& c) {
  f.section("supervisor");
  f.integer<uint32_t>("attention_workers", c.attention_workers, 1, 64, "processes",
                      "Attention workers to start.");
  f.integer<uint32_t>("expert_shards", c.expert_shards, 1, 256, "processes", "Expert shards to start.");
  f.duration("restart_min_ms", c.restart_min, kMillisecond, "ms", 1, 60000,
             "Pause before a child that ended is started again; doubles.");
  f.duration("restart_max_ms", c.restart_max, kMillisecond, "ms", 1, 600000, "Longest such pause.");
  f.duration("healthy_after_s", c.healthy_after, kSecond, "s", 0, kDayS,
             "A child that ran this long starts again at the shortest pause.");
  f.duration("start_deadline_s", c.start_deadline, kSecond, "s", 1, kDayS,
             "Time the cluster has to become ready.");
  f.duration("stop_deadline_s", c.stop_deadline, kSecond, "s", 1, 3600,
             "Time a child has to end after SIGTERM before it is killed.");
}

void logging_fields(FieldList& f, LoggingConfig& c) {
  f.section("logging");
  f.choice<std::string>("level", c.level,
                        {{"debug", "debug"}, {"info", "info"}, {"warn", "warn"}, {"error", "error"}},
                        "Least severe log lines to write.");
  f.text("modules", c.modules,
         "Modules of the log with a level of their own, e.g. requests=debug,transport=warn; `conclave "
         "log-level` lists them and changes levels while processes run.");
  f.boolean(
      "texts", c.texts,
      "Whether debug lines of the module requests hold the text of prompts. Otherwise no text of a client "
      "is logged at any level.");
  f.boolean("remote_changes", c.remote_changes,
            "Whether log levels may be changed through the operations ports from other hosts; else only over "
            "the loopback interface of each.");
  f.duration("stall_report_s", c.stall_report, kSecond, "s", 0, kDayS,
             "A request or a process that has work and makes no progress for so long is reported, and health "
             "checks fail; 0: never.");
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row[b.size()];
}

std::string yaml_quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

std::string markdown_cell(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '|') out += '\\';
    out += c;
  }
  return out;
}

}  // namespace

std::string ConfigField::environment_name() const {
  std::string out = "CONCLAVE_" + section + "_" + key;
  for (char& c : out) c = static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return out;
}

const std::vector<ConfigSection>& config_sections() {
  static const std::vector<ConfigSection> sections = {
      {"model", "The checkpoint that the cluster serves."},
      {"scheduler", "The scheduler process: admission, batching, membership."},
      {"router", "The router process: HTTP and gRPC for clients."},
      {"attention", "Attention workers."},
      {"experts", "Expert shards."},
      {"transport", "The data plane between workers and shards."},
      {"control", "How workers, shards and routers keep their connection to the scheduler."},
      {"tls",
       "Mutual TLS on the control plane ([security.md](security.md)), on once files are named; off by "
       "default."},
      {"supervisor", "`conclave up`: the processes of a local cluster."},
      {"logging", "Logs of every process."},
  };
  return sections;
}

std::vector<ConfigField> config_fields(ClusterConfig& config) {
  FieldList f;
  model_fields(f, config.model);
  scheduler_fields(f, config.scheduler);
  router_fields(f, config.router);
  attention_fields(f, config.attention);
  experts_fields(f, config.experts);
  transport_fields(f, config.transport);
  control_fields(f, config.control);
  tls_fields(f, config.tls);
  supervisor_fields(f, config.supervisor);
  logging_fields(f, config.logging);
  return f.take();
}

Status set_config_key(ClusterConfig& config, const std::string& key, const std::string& value) {
  std::vector<std::string> known;
  for (const ConfigField& field : config_fields(config)) {
    if (field.name() == key) {
      const Status set = field.set(value);
      return set.ok() ? set : invalid_argument(key + ": " + message_of(set));
    }
    known.push_back(field.name());
  }
  const std::string near = nearest_name(key, known);
  return invalid_argument("unknown key '" + key + "'" +
                          (near.empty() ? "" : "; did you mean '" + near + "'?"));
}

std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates) {
  if (word.size() > kMaxGuessLength) return "";
  std::string best;
  // A third of the letters wrong is still a slip; more is another word.
  size_t best_distance = word.size() / 3 + 2;
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string config_to_yaml(const ClusterConfig& config) {
  ClusterConfig copy = config;
  const std::vector<ConfigField> fields = config_fields(copy);
  std::string out;
  for (const ConfigSection& section : config_sections()) {
    out += section.name + ":\n";
    for (const ConfigField& field : fields) {
      if (field.section != section.name) continue;
      const std::string value = field.get();
      out += "  " + field.key + ": " + (field.kind == FieldKind::kText ? yaml_quoted(value) : value) + "\n";
    }
  }
  return out;
}

std::string config_markdown() {
  ClusterConfig defaults;
  const std::vector<ConfigField> fields = config_fields(defaults);
  std::string out =
      "# Configuration\n"
      "\n"
      "One YAML file describes the whole cluster; every service reads it with `--config FILE` and takes its "
      "part. Every\n"
      "key is optional. An unknown key is an error that names the nearest known one, and all faults of a "
      "file are listed\n"
      "at once. Sizes are bytes, or a number with KiB, MiB, GiB or TiB.\n"
      "\n"
      "Every key can be overridden from the environment: `CONCLAVE_<SECTION>_<KEY>`, upper-cased, for "
      "example\n"
      "`CONCLAVE_SCHEDULER_LISTEN=0.0.0.0:7070`. A `CONCLAVE_` variable that is no key is warned about and "
      "ignored, apart\n"
      "from `CONCLAVE_ISA` (the instruction class of the CPU kernels), `CONCLAVE_URL` (the router, for the "
      "`conclave`\n"
      "command), and those of the tests, `CONCLAVE_TESTDATA_DIR`, `CONCLAVE_BIN_DIR` and "
      "`CONCLAVE_TEST_FAULTS` (faults\n"
      "in the data plane of a worker or shard, which a build with `-DCONCLAVE_FAULT_INJECTION=OFF` refuses). "
      "Services and\n"
      "`conclave up` also take `--set section.key=value`, which comes before environment and file, and "
      "behind a "
      "flag for the\n"
      "same key.\n"
      "\n"
      "This page is generated from the source; a test fails when it is stale.\n";
  for (const ConfigSection& section : config_sections()) {
    out += "\n## " + section.name + "\n\n" + section.doc + "\n\n";
    out += "| key | default | unit | range | meaning |\n|---|---|---|---|---|\n";
    for (const ConfigField& field : fields) {
      if (field.section != section.name) continue;
      const std::string value = field.get();
      out += "| `" + field.key + "` | " + (value.empty() ? "(empty)" : "`" + value + "`") + " | " +
             (field.unit.empty() ? field.type : field.unit) + " | " + field.range + " | " +
             markdown_cell(field.doc) + " |\n";
    }
  }
  return out;
}

}  // namespace conclave
