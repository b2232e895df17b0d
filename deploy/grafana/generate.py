#!/usr/bin/env python3
"""Writes the dashboards, deploy/grafana/dashboards/*.json, and the page about them, docs/dashboards.md.

usage: generate.py

Both are committed and never edited by hand; tests/observability checks that they are what this file writes. Each dashboard
has a variable for its data source, and reads the metrics of docs/metrics.md and the recorded series of deploy/prometheus.
"""

import json
import pathlib

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
RATE = "$__rate_interval"


def rate(metric, by="", window=RATE):
    """The sum of a counter's rate, by these labels."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[{window}]))"


def quantile(q, histogram):
    return f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket[{RATE}])))"


def panel(title, description, unit, *targets, kind="timeseries", width=8, height=8, **options):
    """`targets` are (expression, legend)."""
    return {"title": title, "description": description, "unit": unit, "targets": targets, "kind": kind, "width": width,
            "height": height, "options": options}


def stat(title, description, unit, expression, **options):
    return panel(title, description, unit, (expression, ""), kind="stat", width=4, height=4, **options)


def heatmap(title, description, unit, expression, legend, width=12, **options):
    return panel(title, description, unit, (expression, legend), kind="heatmap", width=width, height=10, **options)


def row(title):
    return {"kind": "row", "title": title}


def render(number, spec, x, y):
    """Grafana's own form of a panel."""
    place = {"x": x, "y": y, "w": spec.get("width", WIDTH), "h": spec.get("height", 1)}
    if spec["kind"] == "row":
        return {"id": number, "type": "row", "title": spec["title"], "collapsed": False, "gridPos": place, "panels": []}
    options = spec["options"]
    defaults = {"unit": spec["unit"]}
    if "maximum" in options:
        defaults["max"] = options["maximum"]
    if "minimum" in options or spec["kind"] == "timeseries":
        defaults["min"] = options.get("minimum", 0)
    if "decimals" in options:
        defaults["decimals"] = options["decimals"]
    # Green below the first threshold; `rising=False` for figures that are bad when low.
    limits = options.get("thresholds", [])
    colors = ["green", "orange", "red"] if options.get("rising", True) else ["red", "green"]
    defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": colors[0], "value": None}] +
                              [{"color": c, "value": v} for c, v in zip(colors[1:], limits)]}
    if spec["kind"] == "timeseries":
        stacked = options.get("stacked", False)
        defaults["custom"] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 25 if stacked else 5,
                              "showPoints": "never", "spanNulls": False,
                              "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
                              "thresholdsStyle": {"mode": "line" if limits else "off"}}
        view = {"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
                "tooltip": {"mode": "multi", "sort": "desc"}}
    elif spec["kind"] == "stat":
        view = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value",
                "graphMode": "area", "textMode": "auto", "justifyMode": "auto", "orientation": "auto"}
    elif spec["kind"] == "heatmap":
        view = {"calculate": False, "cellGap": 1, "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
                "yAxis": {"unit": options.get("axis", "none"), "axisPlacement": "left"},
                "cellValues": {"unit": spec["unit"]}, "rowsFrame": {"layout": "auto"}, "legend": {"show": True},
                "tooltip": {"show": True, "yHistogram": False}, "exemplars": {"color": "rgba(255,0,255,0.7)"}}
    elif spec["kind"] == "table":
        view = {"showHeader": True, "footer": {"show": False, "reducer": ["sum"], "fields": ""}}
    else:
        raise ValueError(spec["kind"])
    targets = []
    for letter, (expression, legend) in zip("ABCDEFGHIJ", spec["targets"], strict=False):
        targets.append({"refId": letter, "datasource": DATASOURCE, "expr": expression, "legendFormat": legend or "__auto",
                        "editorMode": "code", "range": spec["kind"] != "table", "instant": spec["kind"] == "table",
                        "format": {"heatmap": "heatmap", "table": "table"}.get(spec["kind"], "time_series")})
    return {"id": number, "type": spec["kind"], "title": spec["title"], "description": spec["description"],
            "datasource": DATASOURCE, "gridPos": place, "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": view, "targets": targets}


def dashboard(name, title, description, specs):
    panels, x, y, tallest = [], 0, 0, 0
    for spec in specs:
        width, height = spec.get("width", WIDTH), spec.get("height", 1)
        if x + width > WIDTH:
            x, y, tallest = 0, y + tallest, 0
        panels.append(render(len(panels) + 1, spec, x, y))
        x, tallest = x + width, max(tallest, height)
    return {
        "uid": f"conclave-{name}", "title": f"Conclave / {title}", "description": description, "tags": ["conclave"],
        "schemaVersion": 38, "version": 1, "editable": True, "graphTooltip": 1, "timezone": "browser", "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["conclave"], "title": "Conclave", "asDropdown": True,
                   "includeVars": True, "keepTime": True, "targetBlank": False, "icon": "external link", "tooltip": "",
                   "url": ""}],
        "templating": {"list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus",
                                 "refresh": 1, "hide": 0, "multi": False, "includeAll": False, "regex": "",
                                 "options": [], "current": {}}]},
        "annotations": {"list": [{
            "name": "Placements", "datasource": DATASOURCE, "enable": True, "iconColor": "blue",
            "expr": "increase(conclave_scheduler_published_placements_total[1m]) > 0", "step": "30s",
            "titleFormat": "placement published"}]},
        "panels": panels,
    }


def overview():
    return dashboard("overview", "Overview", "Is the cluster well, and what does it do?", [
        stat("Routers ready", "Routers whose /readyz says yes.", "none", "sum(conclave_router_ready_info)",
             thresholds=[1], rising=False),
        stat("Workers", "Attention workers that have joined.", "none", "max(conclave_scheduler_workers)", thresholds=[1],
             rising=False),
        stat("Shards", "Expert shards in the placement.", "none", "max(conclave_scheduler_shards)", thresholds=[1],
             rising=False),
        stat("Generated tokens", "Tokens sampled a second, all workers.", "short", "conclave:generated_tokens:rate1m"),
        stat("First token, p99", "From a request's arrival to its first token, of the last five minutes.", "s",
             "conclave:time_to_first_token_seconds:p99_5m", thresholds=[2, 5]),
        stat("Requests that fail", "Share of requests that end with an error; clients that left don't count.", "percentunit",
             "conclave:failed_requests:ratio_rate5m", thresholds=[0.005, 0.02]),
        panel("Requests", "Requests that ended a second, by outcome: stop, length, or the name of an error.", "reqps",
              (rate("conclave_router_requests_total", "outcome"), "{{outcome}}"), stacked=True),
        panel("Running and waiting", "Requests that run on workers, and that were accepted and wait.", "none",
              ("sum(conclave_scheduler_running_requests)", "running"),
              ("sum(conclave_scheduler_waiting_requests)", "waiting")),
        panel("Tokens", "Prompt tokens computed and tokens generated a second; cached ones cost nothing.", "short",
              (rate("conclave_scheduler_prefill_tokens_total"), "prompt"),
              (rate("conclave_scheduler_sampled_tokens_total"), "generated"),
              (rate("conclave_scheduler_cached_tokens_total"), "cached")),
        panel("Time to first token", "From arrival to the first token.", "s",
              ("conclave:time_to_first_token_seconds:p50_5m", "p50"), ("conclave:time_to_first_token_seconds:p99_5m", "p99")),
        panel("Time per output token", "From the first token to the end, by the tokens after the first.", "s",
              ("conclave:time_per_output_token_seconds:p50_5m", "p50"),
              ("conclave:time_per_output_token_seconds:p99_5m", "p99")),
        panel("Where steps spend their time", "Seconds a second over all workers, by part of the step.", "s",
              ("conclave:step_seconds:rate5m", "{{part}}"), stacked=True),
        panel("Processor time", "Cores in use, by role.", "none", (rate("process_cpu_seconds_total", "job"), "{{job}}"),
              stacked=True),
        panel("Resident memory", "Of each process; pages of the mapped checkpoint that it has touched are in it.", "bytes",
              ("process_resident_memory_bytes", "{{job}} {{instance}}")),
        panel("Targets down", "Processes that Prometheus knows and that don't answer.", "none",
              ('sum by (job) (1 - up{job=~"conclave-.+"})', "{{job}}")),
        panel("Alerts", "Alerts that fire now, with their severity.", "none",
              ('sum by (alertname, severity) (ALERTS{alertstate="firing",alertname=~"Conclave.+"}) '
               'or on () label_replace(vector(0), "alertname", "none", "", "")', ""),
              kind="table", width=12, height=6),
        panel("Versions", "Processes by version and role.", "none",
              ("count by (version, role) (conclave_build_info)", ""), kind="table", width=12, height=6),
    ])


def latency():
    ttft, mean_gap = "conclave_router_time_to_first_token_seconds", "conclave_router_time_per_output_token_seconds"
    gap = "conclave_router_inter_token_seconds"
    whole = "conclave_router_request_duration_seconds"

    def quantiles(histogram):
        return [(quantile(q, histogram), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)]

    return dashboard("latency", "Latency", "How long clients wait, and for what.", [
        panel("Time to first token", "From a request's arrival at the router to its first token.", "s", *quantiles(ttft),
              width=6),
        panel("Between tokens", "From one token of a choice to its next, each gap by itself: stalls show here.", "s",
              *quantiles(gap), width=6),
        panel("Time per output token", "From a request's first token to its end, by the tokens after the first: the mean of "
              "each request.", "s", *quantiles(mean_gap), width=6),
        panel("Whole requests", "From arrival to the end, whatever their length.", "s", *quantiles(whole), width=6),
        heatmap("Time to first token, distribution", "Requests a second by the time to their first token.", "reqps",
                f"sum by (le) (rate({ttft}_bucket[{RATE}]))", "{{le}}", axis="s"),
        heatmap("Between tokens, distribution", "Tokens a second by the time since the one before.", "ops",
                f"sum by (le) (rate({gap}_bucket[{RATE}]))", "{{le}}", axis="s"),
        row("What it is made of"),
        panel("Time in the queue", "From a request's acceptance to the start of its first sequence on a worker.", "s",
              *quantiles("conclave_scheduler_queue_seconds"), ("conclave:queue_time_seconds:mean5m", "mean")),
        panel("Waiting at the router", "Requests without their first token, and those that wait to be tokenized.", "none",
              ("sum(conclave_router_queued_requests)", "without first token"),
              ("sum(conclave_router_waiting_text_requests)", "to be tokenized")),
        panel("Steps", "From a step's beginning to its end on a worker.", "s", *quantiles("conclave_attention_step_seconds")),
        panel("Mean step", "Time of one step of a worker: computing, and waiting for experts.", "s",
              (f"{rate('conclave_attention_compute_seconds_total')} / {rate('conclave_attention_steps_total')}", "computing"),
              (f"{rate('conclave_attention_expert_wait_seconds_total')} / {rate('conclave_attention_steps_total')}",
               "waiting for experts"), stacked=True, width=6),
        panel("Prompt lengths", "Tokens of a request's prompt.", "none", *quantiles("conclave_router_request_prompt_tokens"),
              width=6),
        panel("Generated lengths", "Tokens generated for a request.", "none",
              *quantiles("conclave_router_request_generated_tokens"), width=6),
        panel("Prefix hits", "Share of the known tokens of sequences that start which the cache had.", "percentunit",
              ("conclave:prefix_hits:ratio_rate5m", "hits"), maximum=1, width=6),
    ])


def scheduler():
    return dashboard("scheduler", "Scheduler and KV cache", "What is admitted, where memory goes, what gives way.", [
        panel("Requests", "Accepted requests by where they are.", "none",
              ("sum(conclave_scheduler_running_requests)", "running"),
              ("sum(conclave_scheduler_waiting_requests)", "waiting"),
              ("sum(conclave_scheduler_detached_requests)", "router away")),
        panel("Admission", "Requests accepted and refused a second; `full`: a bound of the queue.", "reqps",
              (rate("conclave_scheduler_accepted_requests_total"), "accepted"),
              (rate("conclave_scheduler_refused_requests_total", "reason"), "refused: {{reason}}")),
        panel("Ends", "How accepted requests ended, a second.", "reqps",
              (rate("conclave_scheduler_ended_requests_total", "how"), "{{how}}"), stacked=True),
        panel("KV pages", "Pages of all workers: of running sequences, cached for requests that begin alike, and promised.",
              "none", ('sum by (state) (conclave_scheduler_kv_blocks{state!="total"})', "{{state}}"),
              ('sum(conclave_scheduler_kv_blocks{state="total"})', "total")),
        panel("KV usage", "Share of the pages that hold running sequences.", "percentunit",
              ("max(conclave_scheduler_kv_usage_ratio)", "used"), maximum=1, thresholds=[0.85, 0.95]),
        panel("Prefix hits", "Share of the known tokens of sequences that start which the cache had.", "percentunit",
              ("conclave:prefix_hits:ratio_rate5m", "hits"), maximum=1),
        panel("Sequences computed again", "A second: preempted for want of pages, replayed after a lost worker, moved off a "
              "draining one.", "ops",
              (rate("conclave_scheduler_preempted_sequences_total"), "preempted"),
              (rate("conclave_scheduler_replayed_sequences_total"), "replayed"),
              (rate("conclave_scheduler_moved_sequences_total"), "moved")),
        panel("Plans", "Plans sent to workers and reported by them, a second.", "ops",
              (rate("conclave_scheduler_planned_steps_total"), "planned"),
              (rate("conclave_scheduler_retired_steps_total"), "retired")),
        panel("Rows of a step", "Mean rows of a plan: prompt tokens and decodes.", "none",
              (f"{rate('conclave_scheduler_prefill_tokens_total')} / {rate('conclave_scheduler_planned_steps_total')}",
               "prompt"),
              (f"{rate('conclave_scheduler_decode_slices_total')} / {rate('conclave_scheduler_planned_steps_total')}",
               "decode"), stacked=True),
        panel("Workers without a plan", "Seconds a second that workers stood still between steps for want of a plan.", "s",
              (rate("conclave_scheduler_step_plan_wait_seconds_total"), "waiting")),
        panel("The scheduler itself", "Tasks waiting in its loop, and the cores it uses.", "none",
              ("max(conclave_scheduler_loop_tasks)", "tasks"),
              ('sum(rate(process_cpu_seconds_total{job="conclave-scheduler"}[$__rate_interval]))', "cores")),
        panel("Discarded tokens", "Tokens sampled for sequences that had ended, a second.", "short",
              (rate("conclave_scheduler_discarded_tokens_total"), "discarded")),
    ])


def experts():
    return dashboard("experts", "Experts", "Which shards carry the load.", [
        heatmap("Rows by shard", "(row, expert) pairs that each shard computes a second. Even colours: even load.", "short",
                rate("conclave_expert_rows_total", "instance"), "{{instance}}", width=16),
        panel("Imbalance", "The busiest shard over the mean; 1 is even.", "none",
              ("conclave:expert_imbalance:ratio_rate5m", "max / mean"), minimum=1, thresholds=[1.5, 2], height=10),
        panel("Busy", "Seconds a second that a shard computes; 1 is all it can.", "percentunit",
              (rate("conclave_expert_compute_seconds_total", "instance"), "{{instance}}"), maximum=1),
        panel("Rows a computation", "Mean (row, expert) pairs computed together: batching across workers.", "none",
              (f"{rate('conclave_expert_rows_total', 'instance')} / {rate('conclave_expert_groups_total', 'instance')}",
               "{{instance}}")),
        panel("Rows a read of weights", "Mean rows for which an expert's weights are read once.", "none",
              (f"{rate('conclave_expert_rows_total', 'instance')} / {rate('conclave_expert_runs_total', 'instance')}",
               "{{instance}}")),
        heatmap("Load by shard, as the planner sees it", "Rows a second a shard computes, weighted.", "short",
                "sum by (shard) (conclave_scheduler_shard_load_rows)", "{{shard}}", width=16),
        panel("Imbalance, as the planner sees it", "The busiest shard over the mean: in all, and in the worst layer.", "none",
              ("max(conclave_scheduler_busiest_shard_ratio)", "all layers"),
              ("max(conclave_scheduler_busiest_layer_ratio)", "worst layer"), height=10),
        heatmap("Busiest expert by layer", "Load of a layer's busiest expert over its mean expert; 1 is even.", "none",
                "max by (layer) (conclave_scheduler_layer_busiest_expert_ratio)", "{{layer}}", width=12),
        heatmap("Busiest shard by layer", "Load of a layer's busiest shard over the mean, as homes are now; 1 is even.", "none",
                "max by (layer) (conclave_scheduler_layer_busiest_shard_ratio)", "{{layer}}", width=12),
        panel("Waiting rows", "(row, expert) pairs that wait in a shard (bound: experts.max_queued_items).", "none",
              ("sum by (instance) (conclave_expert_queued_rows)", "{{instance}}")),
        panel("The busiest experts", "Rows a second of the 16 experts of all layers that are asked for most.", "short",
              ("sum by (layer, expert) (conclave_scheduler_busy_expert_load_rows)", "layer {{layer}} expert {{expert}}")),
        panel("Hot layers", "Share of a layer's load that its eight busiest experts have: the five layers with most.",
              "percentunit", ("topk(5, max by (layer) (conclave_scheduler_layer_busy_experts_share_ratio))",
                              "layer {{layer}}"), maximum=1),
        panel("Rows by layer", "(row, expert) pairs that shards compute a second, by layer: the layers with most and least.",
              "ops", (f"topk(3, {rate('conclave_expert_layer_rows_total', 'layer')})", "layer {{layer}}"),
              (f"bottomk(3, {rate('conclave_expert_layer_rows_total', 'layer')})", "layer {{layer}}")),
        panel("Placement", "Homes of experts that changes add and take away in ten minutes, and experts with too few.", "none",
              ("sum(increase(conclave_scheduler_added_homes_total[10m]))", "added"),
              ("sum(increase(conclave_scheduler_removed_homes_total[10m]))", "removed"),
              ("max(conclave_scheduler_short_experts)", "too few homes")),
        panel("Epoch", "Of the placement at the workers; each change raises it.", "none",
              ("max(conclave_scheduler_placement_epochs)", "epoch")),
        panel("Homes by shard", "(layer, expert) pairs a shard is a home of.", "none",
              ("sum by (shard) (conclave_scheduler_shard_homes)", "{{shard}}")),
        panel("Experts held", "(layer, expert) pairs that a shard holds.", "none",
              ("sum by (instance) (conclave_expert_held_experts)", "{{instance}}")),
        panel("Weights read", "Bytes a second read while placements are prepared.", "Bps",
              (rate("conclave_expert_warmed_weight_bytes_total", "instance"), "{{instance}}")),
        panel("Rows without an expert", "(row, expert) pairs a second whose expert the shard did not hold.", "ops",
              (rate("conclave_expert_missing_rows_total", "instance"), "{{instance}}")),
        panel("Placements", "Placements published in ten minutes.", "none",
              ("sum(increase(conclave_scheduler_published_placements_total[10m]))", "published")),
        panel("Dispatches given up", "A second: expired in the queue, cancelled, refused; replies dropped.", "ops",
              (rate("conclave_expert_expired_dispatches_total"), "expired"),
              (rate("conclave_expert_cancelled_dispatches_total"), "cancelled"),
              (rate("conclave_expert_rejected_dispatches_total"), "rejected"),
              (rate("conclave_expert_dropped_replies_total"), "replies dropped")),
    ])


def data_plane():
    return dashboard("data-plane", "Data plane", "What travels between workers and shards.", [
        panel("Bytes sent", "Bytes a second by process: rows to shards, outputs back.", "Bps",
              (rate("conclave_transport_sent_bytes_total", "job, instance"), "{{job}} {{instance}}")),
        panel("Bytes received", "Bytes a second by process.", "Bps",
              (rate("conclave_transport_received_bytes_total", "job, instance"), "{{job}} {{instance}}")),
        panel("Messages sent", "Messages a second by process.", "ops",
              (rate("conclave_transport_sent_messages_total", "job, instance"), "{{job}} {{instance}}")),
        panel("Dispatches and replies", "Dispatches of workers and replies they got, a second.", "ops",
              (rate("conclave_attention_dispatches_total"), "dispatches"),
              (rate("conclave_attention_combines_total"), "replies"), width=6),
        panel("Waiting for experts", "Seconds a second that steps of a worker wait for experts.", "s",
              (rate("conclave_attention_expert_wait_seconds_total", "instance"), "{{instance}}"), width=6),
        panel("Share of steps spent waiting", "Waiting for experts over the whole time of steps: what overlap does not hide.",
              "percentunit",
              (f"{rate('conclave_attention_expert_wait_seconds_total')} / "
               f"({rate('conclave_attention_compute_seconds_total')} + "
               f"{rate('conclave_attention_expert_wait_seconds_total')})", "waiting"), maximum=1, width=6),
        panel("Micro-batch overlap", "Of the time in which rows were at the experts, the share in which their worker computed "
              "another micro-batch.", "percentunit", ("conclave:micro_batch_overlap:ratio_rate5m", "hidden"), maximum=1, width=6),
        row("Links"),
        panel("Reply time by shard, p99", "From a worker's dispatch to the shard's reply.", "s",
              (f"histogram_quantile(0.99, sum by (le, shard) (rate(conclave_attention_shard_reply_seconds_bucket[{RATE}])))",
               "{{shard}}")),
        panel("Reply time by shard, mean", "The same, and the part of it that is not the shard's own computing: the wire and "
              "its queue.", "s",
              (f"{rate('conclave_attention_shard_reply_seconds_sum', 'shard')} / "
               f"{rate('conclave_attention_shard_reply_seconds_count', 'shard')}", "{{shard}}"),
              (f"({rate('conclave_attention_shard_reply_seconds_sum', 'shard')} - "
               f"{rate('conclave_attention_shard_compute_seconds_total', 'shard')}) / "
               f"{rate('conclave_attention_shard_reply_seconds_count', 'shard')}", "{{shard}}: not computing")),
        panel("Rows at shards", "(token, expert) pairs that are at each shard now.", "none",
              ("sum by (shard) (conclave_attention_shard_outstanding_rows)", "{{shard}}")),
        panel("Bytes by link", "Bytes a second from a process to each of its peers.", "Bps",
              (f"sum by (instance, name) (rate(conclave_transport_link_sent_bytes_total[{RATE}]) * on (member) "
               "group_left (name) max by (member, name) (conclave_scheduler_member_info))", "{{instance}} to {{name}}"),
              width=12),
        panel("Unacknowledged by link", "Bytes sent to a peer that its owner has not taken yet.", "bytes",
              ("sum by (instance, name) (conclave_transport_link_unacknowledged_bytes * on (member) group_left (name) "
               "max by (member, name) (conclave_scheduler_member_info))", "{{instance}} to {{name}}"), width=12),
        row("Messages and flow"),
        panel("Rows a dispatch", "Mean (token, expert) pairs of a dispatch.", "none",
              (f"{rate('conclave_attention_dispatched_items_total')} / {rate('conclave_attention_dispatches_total')}",
               "items")),
        panel("Shards connected", "Connections of each worker to shards.", "none",
              ("sum by (instance) (conclave_attention_connected_shards)", "{{instance}}"),
              ("max(conclave_scheduler_shards)", "shards there are")),
        panel("Flow control", "A second: dispatches that waited for credits, sends that met a bound, reads that a full shard "
              "put off.", "ops",
              (rate("conclave_attention_credit_waits_total"), "waits for credits"),
              (rate("conclave_transport_blocked_sends_total"), "blocked sends"),
              (rate("conclave_expert_paused_reads_total"), "paused reads")),
    ])


def faults():
    return dashboard("faults", "Faults", "What went wrong, and what was done about it. All of it should be near zero.", [
        panel("Members", "Workers and shards that joined, were lost, refused or suspected, in ten minutes.", "none",
              *((f"sum(increase(conclave_scheduler_{what}_members_total[10m]))", what)
                for what in ("joined", "lost", "refused", "suspected", "drained"))),
        panel("Restarts", "Starts of a process within 15 minutes.", "none",
              ('sum by (job) (changes(process_start_time_seconds{job=~"conclave-.+"}[15m]))', "{{job}}")),
        panel("New incarnations", "Times a process joined anew, in ten minutes.", "none",
              ("sum by (job, instance) (increase(conclave_member_incarnations_total[10m]))", "{{job}} {{instance}}")),
        panel("Rows sent again", "Share of (token, expert) pairs that are sent again.", "percentunit",
              ("conclave:retried_items:ratio_rate5m", "again"), thresholds=[0.01, 0.05]),
        panel("Why rows are sent again", "A second: deadlines of dispatches, missing experts, lost shards, rows without a home.",
              "ops",
              (rate("conclave_attention_dispatch_deadlines_total"), "deadlines"),
              (rate("conclave_attention_missing_items_total"), "missing experts"),
              (rate("conclave_attention_lost_shards_total"), "lost shards"),
              (rate("conclave_attention_holds_total"), "no home")),
        panel("Answers too late", "A second: outputs that came twice, and replies to dispatches no longer known.", "ops",
              (rate("conclave_attention_duplicate_items_total"), "duplicates"),
              (rate("conclave_attention_late_combines_total"), "late")),
        panel("Rejected messages", "Messages in ten minutes that failed a process's checks.", "none",
              ("sum by (job, instance) (conclave:rejected_messages:increase10m)", "{{job}} {{instance}}"), thresholds=[1]),
        panel("Requests without progress", "Requests that made none for logging.stall_report_s, by what they wait for.",
              "none", ("sum by (hop) (conclave_stalled_requests)", "{{hop}}"), thresholds=[1]),
        panel("Parts without progress", "Parts of processes that have work and made no progress for logging.stall_report_s.",
              "none", ("sum by (job, kind) (conclave_stalled_parts)", "{{job}}: {{kind}}"), thresholds=[1]),
        panel("Requests found without progress", "In ten minutes, by what they waited for.", "none",
              ("sum by (hop) (increase(conclave_stall_reports_total[10m]))", "{{hop}}")),
        panel("Stalls", "Times in 15 minutes that the scheduler was late itself; workers' complaints about shards.", "none",
              ("sum(increase(conclave_scheduler_forgiven_stalls_total[15m]))", "scheduler late"),
              ("sum(increase(conclave_scheduler_peer_complaints_total[15m]))", "complaints")),
        panel("Limits reached", "Requests a second that a bound of the router refused or cut.", "reqps",
              (f"{rate('conclave_router_reached_limits_total', 'limit')} > 0 "
               'or on () label_replace(vector(0), "limit", "none", "", "")', "{{limit}}")),
        panel("Clients", "A second: left before the end, too slow to read, not HTTP, without a key.", "ops",
              (rate("conclave_router_http_departed_clients_total"), "left"),
              (rate("conclave_router_http_slow_clients_total"), "slow"),
              (rate("conclave_router_http_malformed_requests_total"), "malformed"),
              (rate("conclave_router_unauthenticated_requests_total"), "without a key")),
        panel("Routers and the scheduler", "Connections welcomed, requests sent again and tokens that came twice, in ten "
              "minutes.", "none",
              ("sum(increase(conclave_router_scheduler_connections_total[10m]))", "connections"),
              ("sum(increase(conclave_router_resubmitted_requests_total[10m]))", "requests sent again"),
              ("sum(increase(conclave_router_duplicate_tokens_total[10m]))", "tokens twice")),
        panel("File descriptors", "Open ones over what the process may open.", "percentunit",
              ('process_open_fds{job=~"conclave-.+"} / process_max_fds', "{{job}} {{instance}}"), maximum=1,
              thresholds=[0.6, 0.8]),
        row("Who is let in"),
        panel("Certificates", "Time until the certificate of each process ends; nothing while TLS is off. An alert comes a day before.",
              "s", ("min by (job, instance) (conclave_tls_certificate_expiry_seconds > 0) - time()", "{{job}} {{instance}}"),
              width=12, thresholds=[86400], rising=False),
        panel("TLS connections refused", "In ten minutes, by cause: connections of the control plane that failed or were refused.",
              "none", ("sum by (reason) (increase(conclave_tls_refused_handshakes_total[10m]))", "{{reason}}"), width=12,
              thresholds=[1]),
        panel("Certificates read again", "In ten minutes: changed files that were taken, and that were not, so that nobody new gets in.",
              "none", ("sum(increase(conclave_tls_reloads_total[10m]))", "taken"),
              ("sum(increase(conclave_tls_failed_reloads_total[10m]))", "not taken"), width=12),
        panel("Peers refused", "In ten minutes, by cause: workers and shards that others of them did not let in.", "none",
              ("sum by (reason) (increase(conclave_transport_refused_hellos_total[10m]))", "{{reason}}"), width=12, thresholds=[1]),
    ])


def made():
    return [overview(), latency(), scheduler(), experts(), data_plane(), faults()]


def file_of(one):
    return one["uid"].removeprefix("conclave-") + ".json"


def dashboards():
    """{file name: its text}."""
    return {file_of(one): json.dumps(one, indent=1, sort_keys=True) + "\n" for one in made()}


PAGE = """# Dashboards

Six Grafana dashboards, [deploy/grafana/dashboards](../deploy/grafana/dashboards): import the files, or provision the folder. They
read the metrics of [metrics.md](metrics.md) and the recorded series of [deploy/prometheus](../deploy/prometheus/README.md), and
link to each other. This page and the files are written by `python3 deploy/grafana/generate.py`.

The pictures are drawn from the figures of a real cluster of two workers and three shards on one machine (`models/demo-m2`, mutual
TLS, a crowd of clients that comes and goes), which Prometheus looked at each second for three minutes. In that time a shard was
killed and came back, a worker was stopped for some seconds, and somebody without TLS called the scheduler. Windows of
recorded series and panels were a tenth of what they are here. Titles, places, units, legends and thresholds are those of the files; the
drawing itself is not Grafana's. To draw them again (Debian's `prometheus` and `python3-matplotlib`):
`python3 tests/observability/pictures.py . build/release/bin`.
"""


def page():
    """docs/dashboards.md: every panel and what it answers."""
    out = [PAGE]
    for one in made():
        name = file_of(one).removesuffix(".json")
        title = one["title"].removeprefix("Conclave / ")
        out += [f"## {title}", "", one["description"], "", f"![Every panel of the dashboard {title}](pictures/{name}.png)", "",
                "| panel | what it shows |", "|---|---|"]
        # In a table a bar would end the cell.
        out += [f"| {panel['title']} | {panel['description'].replace('|', '&#124;')} |" for panel in one["panels"] if panel["type"] != "row"]
        out.append("")
    return "\n".join(out)


def main():
    here = pathlib.Path(__file__).resolve().parent
    for old in (here / "dashboards").glob("*.json"):
        if old.name not in dashboards():
            old.unlink()
    for name, text in dashboards().items():
        (here / "dashboards" / name).write_text(text)
    (here.parent.parent / "docs/dashboards.md").write_text(page())


if __name__ == "__main__":
    main()
