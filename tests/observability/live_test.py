"""Prometheus beside a loaded cluster: its metrics are clean, every rule and panel has data, and a fault raises its alert.

usage: live_test.py ROOT BINARIES

The cluster has mutual TLS; what it serves is looked at without as well. Nothing waits for a fixed time: each step asks for what
it needs until it is there, or until a generous limit. Exits 77 (skipped) when Prometheus is missing. Alerts of every other
fault: alerts_test.py.
"""

import contextlib
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.parse

import observability
import reference
import yaml
from certificates import Authority
from cluster import PATIENT, Cluster, Load, Prometheus, eventually

SKIPPED = 77
LIMIT = 90  # seconds for any one thing to come

# {(dashboard, panel): why it shows nothing while nothing is wrong}. Such an expression must still be free of errors.
MAY_BE_EMPTY = {}


class Failure(Exception):
    pass


def require(condition, message):
    if not condition:
        raise Failure(message)


def configuration(root, cluster, directory, divisor=1, named=False):
    """deploy/prometheus as it is, but for the addresses, shorter intervals and rules that are observability.shortened().
    `named`: the label instance is the process's name instead of its address."""
    config = yaml.safe_load((root / "deploy/prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    require(jobs == {f"conclave-{role}" for role in reference.ORDER}, f"the example scrapes {jobs}")
    config["scrape_configs"] = [{
        "job_name": f"conclave-{role}",
        "static_configs": [{"targets": [cluster.ops(n)], "labels": {"instance": n} if named else {}}
                           for n in cluster.names if n.startswith(role)],
    } for role in reference.ORDER]
    config["rule_files"] = []
    for path in observability.rule_files(root):
        copy = directory / path.name
        copy.write_text(observability.shortened(path.read_text(), divisor))
        config["rule_files"].append(str(copy))
    return config


def check_metrics(cluster):
    """promtool on what each role serves."""
    for name in cluster.names:
        done = subprocess.run(["promtool", "check", "metrics"], input=cluster.metrics(name), capture_output=True, text=True,
                              timeout=60)
        require(done.returncode == 0 and not (done.stdout + done.stderr).strip(),
                f"promtool check metrics on {name}:\n{done.stdout}{done.stderr}")


def check_reference(root, cluster):
    committed = (root / "docs/metrics.md").read_text()
    page = ""

    def is_current():
        nonlocal page
        page = reference.page(reference.scrape(cluster))
        return page == committed

    def difference():
        old, new = set(committed.splitlines()), set(page.splitlines())
        return ("docs/metrics.md as the cluster serves it; run tests/observability/reference.py:\n" +
                "\n".join([f"- {line}" for line in sorted(old - new)] + [f"+ {line}" for line in sorted(new - old)]))
    reference.answer(cluster)
    eventually(is_current, 30, difference)


def check_pool_protocol(cluster):
    """What an endpoint picker asks of a router's port is what the scheduler says of the cluster."""
    def both():
        found = [reference.parse(cluster.metrics(name)) for name in ("router", "scheduler")]
        return found if "conclave_router_fleet_kv_usage_ratio" in found[0] else None
    router, scheduler = eventually(both, LIMIT, "a router's figures of its cluster")
    for what in ("waiting_requests", "running_requests", "kv_usage_ratio"):
        for kind, metrics in (("router_fleet", router), ("scheduler", scheduler)):
            require(metrics.get(f"conclave_{kind}_{what}", [""])[0] == "gauge", f"no gauge {kind} {what}")
    # A router leaves them out of a scrape in which its scheduler was too busy to answer.
    ratio = eventually(lambda: re.search(r"^conclave_router_fleet_kv_usage_ratio (\S+)$", cluster.metrics("router"), re.MULTILINE),
                       LIMIT, "a router's figure of the KV cache")
    require(0 <= float(ratio[1]) <= 1, f"{ratio[1]} of the KV cache")


def query(prometheus, expression):
    return prometheus.api("query?query=" + urllib.parse.quote(expression))["result"]


def has_figures(result):
    """Some sample that is a number; a share of nothing is none."""
    return any(sample["value"][1] not in ("NaN", "+Inf", "-Inf") for sample in result)


def check_expressions(root, prometheus):
    """Every panel and recording rule returns data. An alert's expression returns none while it is quiet, which is what it is
    for: it is evaluated without an error, and the series that it reads are there."""
    expressions = {}
    for dashboard, panel, expression in observability.dashboard_expressions(root):
        expressions.setdefault(expression.replace("$__rate_interval", "1m"), (dashboard, panel))
    for name in observability.records(root):
        expressions.setdefault(name, ("rule", name))
    missing = dict(expressions)

    def all_have_data():
        for expression in list(missing):
            result = query(prometheus, expression)  # raises when it is an error
            if has_figures(result) or missing[expression] in MAY_BE_EMPTY:
                del missing[expression]
        return not missing
    eventually(all_have_data, LIMIT, lambda: "data for\n" + "\n".join(f"{where}: {e}" for e, where in missing.items()))

    seen = set(prometheus.api("label/__name__/values"))
    for alert, expression in observability.expressions_with_records(root).items():
        absent = observability.metric_names(expression) - seen
        require(not absent, f"{alert} reads series that are not there: {absent}")

    def all_evaluated():
        return all(rule["health"] != "unknown" for group in prometheus.api("rules")["groups"] for rule in group["rules"])
    eventually(all_evaluated, LIMIT, "an evaluation of every rule")
    for group in prometheus.api("rules")["groups"]:
        for rule in group["rules"]:
            require(rule["health"] == "ok", f"{rule['name']}: {rule.get('lastError')}")
    return len(expressions)


def firing(prometheus):
    return {(a["labels"]["alertname"], a["labels"].get("instance", "")): a for a in prometheus.api("alerts")["alerts"]
            if a["state"] == "firing"}


def call_in_clear(cluster):
    """A stranger at the scheduler's port who knows nothing of TLS."""
    host, port = cluster.address("scheduler", "grpc").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: scheduler\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while stranger.recv(4096):  # until it hangs up
                pass


def check_stranger(cluster, prometheus):
    wanted = ("ConclaveTlsRefused", cluster.ops("scheduler"))
    require(wanted not in firing(prometheus), f"{wanted} without a fault")
    call_in_clear(cluster)
    eventually(lambda: wanted in firing(prometheus), LIMIT, lambda: f"{wanted}; firing: {sorted(firing(prometheus))}")
    require(firing(prometheus)[wanted]["labels"]["reason"] == "not_tls", "another reason than not_tls")


def check_alerts(cluster, prometheus):
    """A shard that is killed and stays away."""
    victim = "expert-1"
    address = cluster.ops(victim)
    wanted = [("ConclaveTargetDown", address), ("ConclaveMemberLost", cluster.ops("scheduler"))]
    # Slow machines may raise what is about speed; nothing may be raised about parts that are missing.
    quiet = {"ConclaveTargetDown", "ConclaveMemberLost", "ConclaveRoleDown", "ConclaveNoWorkers", "ConclaveMembersRefused",
             "ConclaveRejectedMessages", "ConclaveProcessRestarts", "ConclaveRequestsFail", "ConclaveKeyReloadFailed",
             "ConclaveCertificateExpires", "ConclaveCertificateReloadFailed"}
    raised = {name for name, _ in firing(prometheus)} & quiet
    require(not raised, f"raised without a fault: {raised}")
    cluster.kill(victim)
    eventually(lambda: all(alert in firing(prometheus) for alert in wanted), LIMIT,
               lambda: f"{wanted}; firing: {sorted(firing(prometheus))}")
    now = firing(prometheus)
    summary = now["ConclaveTargetDown", address]["annotations"]["summary"]
    require(summary == f"conclave-expert at {address} does not answer on its operations port", summary)
    others = {name for name, _ in now} & (quiet - {"ConclaveTargetDown", "ConclaveMemberLost"})
    require(not others, f"a lost shard raised {others} as well")


def main():
    root, binaries = pathlib.Path(sys.argv[1]), sys.argv[2]
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        print("SKIPPED: Debian's package prometheus is missing")
        return SKIPPED
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        for part in ("cluster", "clear", "prometheus"):
            (directory / part).mkdir()
        model = root / "models/demo-m2"
        authority = Authority(directory / "tls")
        authority.issue("all", days=30)
        try:
            with Cluster(binaries, model, directory / "clear") as cluster:
                cluster.start()
                with Load(cluster) as load:
                    eventually(lambda: load.errors or load.answers > 3, LIMIT, "answers")
                    check_metrics(cluster)
                require(not load.errors, f"requests failed: {load.errors}")
            with Cluster(binaries, model, directory / "cluster", settings=[*PATIENT, *authority.settings("all")]) as cluster:
                cluster.start()
                check_reference(root, cluster)
                check_pool_protocol(cluster)
                with Prometheus(directory / "prometheus") as prometheus, Load(cluster) as load:
                    prometheus.start(configuration(root, cluster, directory / "prometheus"))
                    count = check_expressions(root, prometheus)
                    check_metrics(cluster)
                    check_stranger(cluster, prometheus)
                    check_alerts(cluster, prometheus)
                    answers = load.answers
                    eventually(lambda: load.errors or load.answers > answers, LIMIT, "an answer after the fault")
                    require(not load.errors, f"requests failed: {load.errors}")
        except (Failure, TimeoutError) as error:
            print(error)
            return 1
    print(f"{count} expressions have data; {load.answers} requests were answered meanwhile")
    return 0


if __name__ == "__main__":
    sys.exit(main())
