"""What metrics and timelines cost on a live cluster: events counted there, times nanoseconds measured for each kind.

usage: cost_test.py ROOT BINARIES BENCH       BENCH: bench/telemetry's telemetry_bench

Events of a step are counted from what the processes themselves count between two scrapes; how many updates of which kind go
with each of those is in EVENTS, read off the code and rounded up. All processes' events together are set against the time of
the workers' steps: under 1 % without timelines, and under 1 % with a timeline of every request on top.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from cluster import Cluster, Load, eventually

LIMIT = 0.01
STEPS = 400  # at least, between the two scrapes

# {what is counted: {kind of event: how many go with one of it}}
EVENTS = {
    # Worker. A layer of a micro-batch makes at least one dispatch; its laps look at the clock.
    "conclave_attention_steps_total": {"counter": 20, "clock": 4, "core_histogram": 1},
    "conclave_attention_dispatches_total": {"counter": 12, "clock": 8},
    "conclave_attention_combines_total": {"counter": 10, "clock": 1, "core_histogram": 1},
    "conclave_attention_sampled_tokens_total": {"counter": 1},
    # Shard.
    "conclave_expert_dispatches_total": {"counter": 3},
    "conclave_expert_groups_total": {"counter": 8, "clock": 2},
    "conclave_expert_runs_total": {"counter": 4},
    # Both ends of a message.
    "conclave_transport_sent_messages_total": {"counter": 4},
    "conclave_transport_received_messages_total": {"counter": 4},
    # Scheduler: a plan, a result, and the rounds that they and submissions make.
    "conclave_scheduler_planned_steps_total": {"counter": 6, "scheduler_snapshot": 1},
    "conclave_scheduler_retired_steps_total": {"counter": 12, "scheduler_snapshot": 1},
    "conclave_scheduler_accepted_requests_total": {"counter": 12, "core_histogram": 1, "scheduler_snapshot": 2},
    # Router.
    "conclave_router_generated_tokens_total": {"clock": 1, "registry_histogram": 1, "counter": 2},
    "conclave_router_requests_total": {"registry_histogram": 5, "registry_counter": 4, "registry_lookup": 3, "traceparent": 1},
}
# With every request followed, besides.
TIMELINE_EVENTS = {
    "conclave_attention_steps_total": {"timed_step": 1, "clock": 1, "timed_result_on_the_wire": 1},
    "conclave_attention_dispatches_total": {"timed_dispatch": 1, "clock": 1},
    "conclave_scheduler_sampled_tokens_total": {"step_of_a_timeline": 1},
    "conclave_scheduler_prefill_tokens_total": {"step_of_a_timeline": 1},  # a chunk has many
    "conclave_router_generated_tokens_total": {"token_of_a_timeline": 1},
    "conclave_router_requests_total": {"counter": 100},
}
STEP_TIME = ("conclave_attention_compute_seconds_total", "conclave_attention_expert_wait_seconds_total")


def totals(cluster):
    """{counter: its sum over all processes and labels}"""
    out = {}
    for name in cluster.names:
        for line in cluster.metrics(name).splitlines():
            if line and not line.startswith("#"):
                series, value = line.rsplit(" ", 1)
                metric = series.split("{", 1)[0]
                out[metric] = out.get(metric, 0) + float(value)
    return out


def cost(events, counted, nanoseconds):
    """(events, seconds) of all that was counted."""
    number, time = 0, 0.0
    for metric, kinds in events.items():
        if metric not in counted:
            raise KeyError(f"{metric} is not served")
        for kind, times in kinds.items():
            number += counted[metric] * times
            time += counted[metric] * times * nanoseconds[kind] * 1e-9
    return number, time


def main():
    root, binaries, bench = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    nanoseconds = json.loads(subprocess.run([bench], capture_output=True, text=True, check=True, timeout=300).stdout)
    with tempfile.TemporaryDirectory() as scratch, Cluster(binaries, root / "models/demo-m2", scratch) as cluster:
        cluster.start()
        with Load(cluster, threads=4) as load:
            eventually(lambda: load.answers >= 4 or load.errors, 60, "some answers")
            before = totals(cluster)
            steps = "conclave_attention_steps_total"
            eventually(lambda: totals(cluster)[steps] - before[steps] >= STEPS or load.errors, 120, f"{STEPS} steps")
            after = totals(cluster)
    if load.errors:
        print(f"requests failed: {load.errors}")
        return 1
    counted = {metric: value - before.get(metric, 0) for metric, value in after.items()}
    step = sum(counted[metric] for metric in STEP_TIME) / counted[steps]
    events, metrics_time = cost(EVENTS, counted, nanoseconds)
    timed_events, timeline_time = cost(TIMELINE_EVENTS, counted, nanoseconds)
    share, timeline_share = (time / counted[steps] / step for time in (metrics_time, timeline_time))
    print("nanoseconds an event: " + ", ".join(f"{kind} {ns:g}" for kind, ns in nanoseconds.items()))
    print(f"{counted[steps]:.0f} steps of {step * 1e3:.3f} ms")
    print(f"metrics: {events / counted[steps]:.0f} events a step, {metrics_time / counted[steps] * 1e6:.2f} us, {share:.3%} of it")
    print(f"timelines of all requests: {timed_events / counted[steps]:.0f} events a step, "
          f"{timeline_time / counted[steps] * 1e6:.2f} us, {timeline_share:.3%} of it")
    return 0 if share < LIMIT and timeline_share < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
