"""promtool on the rules of deploy/prometheus: they are valid, and each alert fires when it should and is quiet when not.

usage: rules_test.py ROOT

A scenario is a healthy, loaded cluster with some series replaced. It says at which time exactly which alerts fire.
Exits 77 (skipped) when promtool is missing.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import observability

SKIPPED = 77
STEP = 30  # seconds between samples
MINUTE = 60 // STEP


def instance(role, number=0):
    return f'job="conclave-{role}",instance="{role}-{number}"'


def rising(per_step):
    """A counter that has always grown."""
    return f"0+{per_step}x120"


def flat(value):
    return f"{value}x120"


def stepping(before, minute, after):
    """`before` until this minute, then `after`, which may be an expanding notation of its own."""
    return f"{before}x{minute * MINUTE - 1} {after}"


def healthy():
    """(series, values) of a cluster of one of each, two shards, under load."""
    out = {}
    for role, number in (("router", 0), ("scheduler", 0), ("attention", 0), ("expert", 0), ("expert", 1)):
        labels = instance(role, number)
        out[f"up{{{labels}}}"] = flat(1)
        out[f"process_start_time_seconds{{{labels}}}"] = flat(1700000000)
        out[f"process_open_fds{{{labels}}}"] = flat(60)
        out[f"process_max_fds{{{labels}}}"] = flat(1024)
    for role, number in (("router", 0), ("scheduler", 0), ("attention", 0), ("expert", 0), ("expert", 1)):
        for kind in ("executor", "work"):
            out[f'conclave_stalled_parts{{{instance(role, number)},kind="{kind}"}}'] = flat(0)
        for reason in ("not_tls", "expired"):
            out[f'conclave_tls_refused_handshakes_total{{{instance(role, number)},reason="{reason}"}}'] = flat(0)
        out[f"conclave_tls_certificate_expiry_seconds{{{instance(role, number)}}}"] = flat(7 * 86400)  # time begins at 0
        out[f"conclave_tls_failed_reloads_total{{{instance(role, number)}}}"] = flat(0)
    for role, hop in (("router", "client"), ("router", "router_text"), ("scheduler", "worker"), ("scheduler", "room")):
        out[f'conclave_stalled_requests{{{instance(role)},hop="{hop}"}}'] = flat(0)
    router, scheduler, attention = instance("router"), instance("scheduler"), instance("attention")
    for bound, count in (("0.1", 10), ("1", 10), ("10", 10), ("+Inf", 10)):
        for what in ("time_to_first_token", "time_per_output_token", "request_duration"):
            out[f'conclave_router_{what}_seconds_bucket{{{router},le="{bound}"}}'] = rising(count)
    for outcome, count in (("stop", 10), ("length", 5), ("CANCELLED", 3), ("UNAVAILABLE", 0)):
        out[f'conclave_router_requests_total{{{router},outcome="{outcome}"}}'] = rising(count)
    for limit in ("max_queued_requests", "max_queued_tokens", "rate_limit", "max_connections"):
        out[f'conclave_router_reached_limits_total{{{router},limit="{limit}"}}'] = flat(0)
    out[f"conclave_router_ready_info{{{router}}}"] = flat(1)
    for name in ("failed_key_reloads", "invalid_scheduler_messages"):
        out[f"conclave_router_{name}_total{{{router}}}"] = flat(0)
    for reason in ("full", "invalid", "unready"):
        out[f'conclave_scheduler_refused_requests_total{{{scheduler},reason="{reason}"}}'] = flat(0)
    for name in ("preempted_sequences", "lost_members", "refused_members", "forgiven_stalls", "invalid_messages",
                 "protocol_violations"):
        out[f"conclave_scheduler_{name}_total{{{scheduler}}}"] = flat(0)
    for name, count in (("accepted_requests", 18), ("sampled_tokens", 900), ("admitted_tokens", 400)):
        out[f"conclave_scheduler_{name}_total{{{scheduler}}}"] = rising(count)
    for name, value in (("workers", 1), ("shards", 2), ("waiting_requests", 0), ("kv_usage_ratio", 0.5),
                        ("short_experts", 0)):
        out[f"conclave_scheduler_{name}{{{scheduler}}}"] = flat(value)
    out[f"conclave_attention_connected_shards{{{attention}}}"] = flat(2)
    for name, count in (("dispatches", 1000), ("dispatched_items", 8000), ("retried_items", 0), ("holds", 0),
                        ("missing_items", 0), ("dispatch_deadlines", 0), ("rejected_combines", 0)):
        out[f"conclave_attention_{name}_total{{{attention}}}"] = rising(count)
    for labels in (attention, instance("expert", 0), instance("expert", 1)):
        out[f"conclave_transport_rejected_messages_total{{{labels}}}"] = flat(0)
        for reason in ("secret", "fleet"):
            out[f'conclave_transport_refused_hellos_total{{{labels},reason="{reason}"}}'] = flat(0)
    for number in (0, 1):
        labels = instance("expert", number)
        out[f"conclave_expert_rows_total{{{labels}}}"] = rising(4000 + 500 * number)
        out[f"conclave_expert_rejected_dispatches_total{{{labels}}}"] = flat(0)
    return out


def metric(role, name, labels="", number=0):
    more = f",{labels}" if labels else ""
    return f"{name}{{{instance(role, number)}{more}}}"


def without(*roles):
    """Nothing at all is known of these roles."""
    return {series: None for series in healthy() if any(f'job="conclave-{role}"' in series for role in roles)}


def slow(what, bound):
    """A histogram whose upper half lies below `bound` and above the next lower one."""
    counts = {"0.1": 0, "1": 0, "10": 0, "+Inf": 0}
    for le in list(counts)[list(counts).index(bound):]:
        counts[le] = 10
    return {metric("router", f"conclave_router_{what}_seconds_bucket", f'le="{le}"'): rising(n)
            for le, n in counts.items()}


def scheduler(name, values, labels=""):
    return {metric("scheduler", f"conclave_scheduler_{name}", labels): values}


def attention(name, values):
    return {metric("attention", f"conclave_attention_{name}", ""): values}


def all_up(value_of):
    return {series: value_of(series) for series in healthy() if series.startswith("up{")}


# name of the scenario, what differs from a healthy cluster, {minute: alerts that fire}. Each alert is in one at least
# that it fires in, and in one (of its own, near its bound) that it does not: `quiet` names it.
SCENARIOS = [
    ("healthy", {}, {4: [], 45: []}),
    # availability
    ("the only router stops", {metric("router", "up"): stepping(1, 5, flat(0))},
     {5: [], 6.5: ["ConclaveRoleDown"], 9: ["ConclaveRoleDown", "ConclaveTargetDown"]}),
    ("no router was ever found", without("router"), {3: ["ConclaveRoleDown"]}),
    ("no scheduler was ever found", without("scheduler"), {3: ["ConclaveRoleDown"]}),
    ("one shard of two stops", {metric("expert", "up", number=1): stepping(1, 5, flat(0))},
     {6: [], 9: ["ConclaveTargetDown"]}),
    ("a target misses one scrape", {metric("expert", "up", number=1): "1x10 0 1x100"}, {6: [], 9: []}),
    ("every role misses one scrape", all_up(lambda s: "1x10 0 1x100"), {6: [], 9: []}),
    ("the last worker leaves", scheduler("workers", stepping(1, 5, flat(0))), {5: [], 7: ["ConclaveNoWorkers"]}),
    ("a worker is replaced", scheduler("workers", "1x10 0x1 1x100"), {6: [], 9: []}),
    ("no router is ready", {metric("router", "conclave_router_ready_info"): stepping(1, 5, flat(0))},
     {6: [], 8: ["ConclaveFleetNotReady"]}),
    ("one router of two is not ready", {metric("router", "conclave_router_ready_info", number=1): flat(0)}, {9: []}),
    ("a tenth of the requests fails", {metric("router", "conclave_router_requests_total", 'outcome="UNAVAILABLE"'): rising(2)},
     {3: [], 15: ["ConclaveRequestsFail"]}),
    ("one request in a hundred fails", {metric("router", "conclave_router_requests_total", 'outcome="UNAVAILABLE"'): "0+0.18x120"},
     {15: [], 25: []}),
    ("half of the clients leave or ask nonsense", {
        metric("router", "conclave_router_requests_total", 'outcome="CANCELLED"'): rising(10),
        metric("router", "conclave_router_requests_total", 'outcome="INVALID_ARGUMENT"'): rising(10)}, {25: []}),
    ("a worker's thread is stuck", {metric("attention", "conclave_stalled_parts", 'kind="executor"'): stepping(0, 5, flat(1))},
     {5: [], 7: ["ConclavePartStalled"]}),
    ("a part was slow for a moment", {metric("attention", "conclave_stalled_parts", 'kind="work"'): "0x10 1x0 0x100"},
     {6: [], 9: []}),
    ("requests wait for a worker", {metric("scheduler", "conclave_stalled_requests", 'hop="worker"'): stepping(0, 5, flat(3))},
     {5: [], 8: ["ConclaveRequestsStalled"]}),
    ("a client does not read", {metric("router", "conclave_stalled_requests", 'hop="client"'): flat(3)}, {9: []}),
    ("a shard crashes again and again", {metric("expert", "process_start_time_seconds"): "100x5 200x4 300x4 400x100"},
     {3: [], 9: ["ConclaveProcessRestarts"], 25: []}),
    ("a rolling update restarts all once", {series: "100x10 200x100" for series in healthy()
                                            if series.startswith("process_start_time_seconds")}, {10: []}),
    ("file descriptors run out", {metric("router", "process_open_fds"): stepping(60, 5, flat(900))},
     {10: [], 17: ["ConclaveFileDescriptorsHigh"]}),
    ("many file descriptors", {metric("router", "process_open_fds"): flat(800)}, {25: []}),
    ("a broken file of keys", {metric("router", "conclave_router_failed_key_reloads_total"): stepping(0, 5, flat(1))},
     {4: [], 6: ["ConclaveKeyReloadFailed"], 25: []}),
    # latency
    ("first tokens take up to 10 s", slow("time_to_first_token", "10"), {5: [], 15: ["ConclaveFirstTokenSlow"]}),
    ("first tokens take up to 1 s", slow("time_to_first_token", "1"), {25: []}),
    ("tokens take up to 1 s", slow("time_per_output_token", "1"), {5: [], 15: ["ConclaveTokensSlow"]}),
    ("tokens take up to 0.1 s", slow("time_per_output_token", "0.1"), {25: []}),
    # scheduler
    ("the router's queue is full",
     {metric("router", "conclave_router_reached_limits_total", 'limit="max_queued_requests"'): "0x10 0+1x100"},
     {4: [], 8: ["ConclaveQueueFull"]}),
    ("the scheduler's queue is full", scheduler("refused_requests_total", "0x10 0+1x100", 'reason="full"'),
     {4: [], 8: ["ConclaveQueueFull"]}),
    ("a tenant meets its rate limit", {
        metric("router", "conclave_router_reached_limits_total", 'limit="rate_limit"'): rising(50),
        **scheduler("refused_requests_total", rising(3), 'reason="invalid"')}, {8: [], 25: []}),
    ("the queue grows", scheduler("waiting_requests", "1+1x120"), {9: [], 25: ["ConclaveQueueGrowing"]}),
    ("a long queue that does not grow", scheduler("waiting_requests", flat(200)), {25: []}),
    ("a queue that empties between", scheduler("waiting_requests", " ".join(["0+1x10"] * 19)), {25: []}),
    ("the KV cache is full", scheduler("kv_usage_ratio", stepping(0.5, 5, flat(0.99))),
     {10: [], 17: ["ConclaveKvUsageHigh"]}),
    ("the KV cache is well used", scheduler("kv_usage_ratio", flat(0.94)), {25: []}),
    ("sequences are preempted", scheduler("preempted_sequences_total", rising(5)), {3: [], 12: ["ConclavePreemptions"]}),
    ("few sequences are preempted", scheduler("preempted_sequences_total", rising(1)), {25: []}),
    ("the scheduler is late", scheduler("forgiven_stalls_total", stepping(0, 5, flat(9))),
     {4: [], 7: ["ConclaveSchedulerStalls"]}),
    ("the scheduler was late once", scheduler("forgiven_stalls_total", stepping(0, 5, flat(1))), {7: [], 15: []}),
    # fleet
    ("a member is lost", scheduler("lost_members_total", stepping(0, 5, flat(1))),
     {4: [], 6: ["ConclaveMemberLost"], 17: []}),
    ("members were lost long ago", scheduler("lost_members_total", flat(40)), {25: []}),
    ("members come and go", scheduler("lost_members_total", "0x10 0+1x10 10x100"),
     {4: [], 10: ["ConclaveMemberLost", "ConclaveMembersFlap"], 25: ["ConclaveMembersFlap"]}),
    ("a member of another version", scheduler("refused_members_total", "0x10 0+1x100"),
     {4: [], 7: ["ConclaveMembersRefused"]}),
    ("a peer without the secret",
     {metric("expert", "conclave_transport_refused_hellos_total", 'reason="secret"'): "0x10 0+1x100"},
     {4: [], 7: ["ConclaveMembersRefused"]}),
    ("a stranger speaks to the scheduler",
     {metric("scheduler", "conclave_tls_refused_handshakes_total", 'reason="not_tls"'): "0x10 1x100"},
     {4: [], 7: ["ConclaveTlsRefused"], 17: []}),
    ("strangers were refused long ago",
     {metric("scheduler", "conclave_tls_refused_handshakes_total", 'reason="not_tls"'): flat(7)}, {25: []}),
    ("a certificate was not renewed", {metric("attention", "conclave_tls_certificate_expiry_seconds"): flat(86400 + 900)},
     {14: [], 16: ["ConclaveCertificateExpires"]}),
    ("a certificate is renewed in time",
     {metric("attention", "conclave_tls_certificate_expiry_seconds"): stepping(86400 + 900, 10, flat(7 * 86400))},
     {14: [], 25: []}),
    ("changed certificates do not fit each other",
     {metric("router", "conclave_tls_failed_reloads_total"): stepping(0, 5, flat(1))},
     {4: [], 6: ["ConclaveCertificateReloadFailed"], 25: []}),
    ("certificates were not taken long ago", {metric("router", "conclave_tls_failed_reloads_total"): flat(3)}, {25: []}),
    ("the control plane is in clear", {metric("attention", "conclave_tls_certificate_expiry_seconds"): flat(0)}, {25: []}),
    ("members were refused long ago", scheduler("refused_members_total", flat(7)), {25: []}),
    # exchange
    ("a worker reaches one shard of two", attention("connected_shards", stepping(2, 5, flat(1))),
     {5: [], 7: ["ConclaveShardsUnreachable"]}),
    ("a shard joins", {**scheduler("shards", stepping(2, 5, flat(3))),
                       **attention("connected_shards", "2x10 3x100")}, {6: [], 9: []}),
    ("dispatches are not answered", attention("dispatch_deadlines_total", rising(10)),
     {1: [], 6: ["ConclaveDispatchDeadlines"]}),
    ("one dispatch in 2,000 is not answered", attention("dispatch_deadlines_total", rising(0.5)), {25: []}),
    ("rows find no home", attention("holds_total", "0x10 0+1x100"), {5: [], 8: ["ConclaveRowsHeld"]}),
    ("rows found no home for a moment", attention("holds_total", "0x10 3x100"), {5: [], 8: [], 25: []}),
    ("experts are missing", attention("missing_items_total", "0x10 0+9x100"),
     {9: [], 12: ["ConclavePlacementIncomplete"]}),
    ("experts have too few homes", scheduler("short_experts", stepping(0, 5, flat(7))),
     {9: [], 12: ["ConclavePlacementIncomplete"]}),
    ("experts move", scheduler("short_experts", "0x10 7x4 0x100"), {6: [], 12: []}),
    ("experts were missing while they moved", attention("missing_items_total", "0x10 9x100"), {9: [], 12: [], 25: []}),
    ("many rows are sent again", attention("retried_items_total", rising(800)), {1: [], 5: ["ConclaveRetryStorm"]}),
    ("some rows are sent again", attention("retried_items_total", rising(300)), {25: []}),
    ("a shard gets nonsense", {metric("expert", "conclave_expert_rejected_dispatches_total"): stepping(0, 5, flat(1))},
     {4: [], 6: ["ConclaveRejectedMessages"], 17: []}),
    ("a worker gets nonsense", {metric("attention", "conclave_transport_rejected_messages_total"): stepping(0, 5, flat(1))},
     {4: [], 6: ["ConclaveRejectedMessages"]}),
    ("the scheduler gets nonsense", scheduler("protocol_violations_total", stepping(0, 5, flat(1))),
     {4: [], 6: ["ConclaveRejectedMessages"]}),
    ("the router gets nonsense",
     {metric("router", "conclave_router_invalid_scheduler_messages_total"): stepping(0, 5, flat(1))},
     {4: [], 6: ["ConclaveRejectedMessages"]}),
    ("nonsense came long ago", scheduler("protocol_violations_total", flat(4)), {25: []}),
    ("one shard of four has the work", {
        metric("expert", "conclave_expert_rows_total", number=n): rising(9000 if n == 0 else 500) for n in range(4)},
     {20: [], 45: ["ConclaveExpertImbalance"]}),
    ("one shard of four has more work", {
        metric("expert", "conclave_expert_rows_total", number=n): rising(9000 if n == 0 else 5000) for n in range(4)},
     {45: []}),
    ("one shard of four has the little work there is", {
        metric("expert", "conclave_expert_rows_total", number=n): rising(90 if n == 0 else 5) for n in range(4)},
     {45: []}),
]


def unit_test(name, changes, expected):
    series = {**healthy(), **changes}
    return {
        "name": name,
        "interval": f"{STEP}s",
        "input_series": [{"series": s, "values": v} for s, v in series.items() if v is not None],
        "promql_expr_test": [{
            "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": f"{int(minute * 60)}s",
            "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)],
        } for minute, alerts in expected.items()],
    }


def main():
    root = pathlib.Path(sys.argv[1])
    promtool = shutil.which("promtool")
    if promtool is None:
        print("SKIPPED: promtool is missing (Debian's package prometheus)")
        return SKIPPED
    files = observability.rule_files(root)
    done = subprocess.run([promtool, "check", "rules", "--lint-fatal", *map(str, files)], capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        # JSON is YAML.
        document = {"rule_files": [str(f.resolve()) for f in files], "evaluation_interval": f"{STEP}s",
                    "tests": [unit_test(*scenario) for scenario in SCENARIOS]}
        path = pathlib.Path(scratch, "rules_test.yml")
        path.write_text(json.dumps(document))
        done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stdout + done.stderr)
            return 1
        # The configuration's rule files and targets are found beside it.
        done = subprocess.run([promtool, "check", "config", str(root / "deploy/prometheus/prometheus.yml")],
                              capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stdout + done.stderr)
            return 1
    faults = coverage(root)
    for fault in faults:
        print(fault)
    print(f"{len(SCENARIOS)} scenarios, {len(observability.alerts(root))} alerts")
    return 1 if faults else 0


def coverage(root):
    """What SCENARIOS leave out: every alert must fire somewhere, and be quiet at some other time of some scenario that
    changes a series which its expression reads."""
    faults = []
    fired = {alert for _, _, expected in SCENARIOS for alerts in expected.values() for alert in alerts}
    expressions = observability.expressions_with_records(root)
    for alert in observability.alerts(root):
        if alert not in fired:
            faults.append(f"{alert}: no scenario lets it fire")
        names = observability.metric_names(expressions[alert])
        quiet = [name for name, changes, expected in SCENARIOS
                 if any(re.match(r"\w+", series).group() in names for series in changes)
                 and all(alert not in alerts for alerts in expected.values())]
        if not quiet:
            faults.append(f"{alert}: no scenario comes near it without firing")
    for alert in fired - set(observability.alerts(root)):
        faults.append(f"{alert}: is in a scenario, but there is no such alert")
    return faults


if __name__ == "__main__":
    sys.exit(main())
