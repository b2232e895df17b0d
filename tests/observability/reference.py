"""docs/metrics.md out of a live scrape of every role.

usage: reference.py ROOT BINARIES      writes the page
"""

import pathlib
import re
import sys
import tempfile
import time

from cluster import Cluster

QUIET = 8  # seconds without a new metric
ORDER = ("router", "scheduler", "attention", "expert")
HEAD = """# Metrics

Every process serves `/metrics` on its `ops_listen` ([config.md](config.md)), in the Prometheus text format. This page is made from
a scrape of a running cluster and checked against one by `tests/observability`; after a change:
`python3 tests/observability/reference.py . build/release/bin`.

Names are `conclave_<role>_<what>_<unit>`, counters end in `_total`, times are in seconds. Labels have few values, none of them
made by clients. Alerts and dashboards: `deploy/prometheus`, `deploy/grafana`; what to do when: [runbooks](runbooks/README.md).

Nothing has a series for each expert of each layer: shards and the scheduler show a few figures a layer and the busiest experts;
`conclave experts` shows the whole matrix. Series of one link or shard carry its incarnation as `member` (its name is in
`conclave_scheduler_member_info`) and go when it leaves. A scrape of a shard of 62 layers of 256 experts has about 48 kB and takes
about a millisecond. One request's own times: [timelines.md](timelines.md).

## The Gateway API Inference Extension

Its [model server protocol](https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/003-model-server-protocol)
asks each endpoint of a pool for gauges, which an endpoint picker reads under the names that it is told. The endpoints are the
routers: each says the figures of its whole cluster, for which it asks the scheduler at a scrape, on its own `ops_listen`.

| of the protocol | flag of the endpoint picker | at the routers | the same at the scheduler |
|---|---|---|---|
| TotalQueuedRequests | `--total-queued-requests-metric` | `conclave_router_fleet_waiting_requests` | `conclave_scheduler_waiting_requests` |
| TotalRunningRequests | `--total-running-requests-metric` | `conclave_router_fleet_running_requests` | `conclave_scheduler_running_requests` |
| KVCacheUtilization, 0 to 1 | `--kv-cache-usage-percentage-metric` | `conclave_router_fleet_kv_usage_ratio` | `conclave_scheduler_kv_usage_ratio` |

A router whose scheduler does not answer leaves them out. The optional BlockSize is 16 tokens, NumGPUBlocks is
`conclave_scheduler_kv_blocks{state="total"}`; there are no LoRA adapters to report.
"""
SECTIONS = {
    frozenset(["router"]): "Router",
    frozenset(["scheduler"]): "Scheduler",
    frozenset(["attention"]): "Attention workers",
    frozenset(["expert"]): "Expert shards",
    frozenset(["attention", "expert"]): "Workers and shards",
    frozenset(["router", "scheduler"]): "Router and scheduler",
    frozenset(ORDER): "Every process",
}


def parse(text):
    """{name: [type, help, labels]} of one scrape."""
    out = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, help_text = line[7:].split(" ", 1)
            out[name] = ["", help_text, set()]
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ", 1)
            out[name][0] = kind
        elif line:
            sample = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", line)
            name = sample[1] if sample[1] in out else re.sub(r"_(bucket|sum|count)$", "", sample[1])
            out[name][2].update(set(re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', sample[2] or "")) - {"le"})
    return out


def page(scrapes):
    """The page's text; `scrapes` is {role: text}."""
    merged = {}
    for role in ORDER:
        for name, (kind, help_text, labels) in parse(scrapes[role]).items():
            entry = merged.setdefault(name, [kind, help_text, set(), set()])
            if entry[:2] != [kind, help_text]:
                raise ValueError(f"{name}: roles disagree about its type or meaning: {entry[:2]}, {[kind, help_text]}")
            entry[2] |= labels
            entry[3].add(role)
    out = [HEAD]
    groups = {}
    for name, entry in merged.items():
        groups.setdefault(frozenset(entry[3]), []).append((name, entry))
    known = list(SECTIONS)
    for roles in sorted(groups, key=lambda r: (known.index(r) if r in known else len(known), sorted(r))):
        out += [f"## {SECTIONS.get(roles, ', '.join(sorted(roles)))}", "", "| name | type | labels | role | meaning |", "|---|---|---|---|---|"]
        for name, (kind, help_text, labels, _) in sorted(groups[roles]):
            out.append(f"| `{name}` | {kind} | {', '.join(f'`{x}`' for x in sorted(labels))} | "
                       f"{', '.join(r for r in ORDER if r in roles)} | {help_text} |")
        out.append("")
    return "\n".join(out)


def scrape(cluster):
    """{role: what one of its processes serves}."""
    return {role: cluster.metrics(next(n for n in cluster.names if n.startswith(role))) for role in ORDER}


def answer(cluster):
    """Some metrics come with the first request."""
    status, body = cluster.ask("3 4 5 6", max_tokens=4)
    if status != 200:
        raise RuntimeError(f"{status}: {body}")


def main():
    root, binaries = pathlib.Path(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as scratch, Cluster(binaries, root / "models/demo-m2", scratch) as cluster:
        cluster.start()
        answer(cluster)
        # Others with the first report of a member, or the first look at a clock: until nothing new has come for a while.
        text, since = "", time.monotonic()
        while time.monotonic() < since + QUIET:
            now = page(scrape(cluster))
            if now != text:
                text, since = now, time.monotonic()
            time.sleep(0.2)
    path = root / "docs/metrics.md"
    path.write_text(text)
    print(f"{path}: {text.count(chr(10) + '| `')} metrics")


if __name__ == "__main__":
    main()
