"""Faults made for real, one after the other, raise their alerts through Prometheus's API, and what can heal heals.

usage: alerts_test.py ROOT BINARIES

The rules are those of deploy/prometheus with `for:` cut to 2 s. Nothing waits for a fixed time. Exits 77 (skipped) when
Prometheus is missing. live_test.py has the alerts of a lost shard.
"""

import contextlib
import os
import pathlib
import resource
import shutil
import signal
import sys
import tempfile
import threading

from cluster import Cluster, Load, Prometheus, eventually, get
from live_test import SKIPPED, Failure, configuration, firing, require

LIMIT = 120  # seconds for any one alert to come or go

SETTINGS = [
    "logging.stall_report_s=2", "scheduler.lease_ms=2000", "scheduler.dead_after_ms=60000",
    "scheduler.dead_after_trouble_ms=60000",
    # Few places, so that a handful of requests fills them.
    "scheduler.max_waiting_requests=4", "scheduler.max_running_requests=4", "scheduler.queue_reserve_percent=0",
    "attention.kv_blocks=48"]


class Alerts:
    def __init__(self, prometheus):
        self.prometheus = prometheus
        self.raised = set()

    def now(self):
        return {name for name, _ in firing(self.prometheus)}

    def wait(self, *names, what):
        eventually(lambda: self.now() >= set(names), LIMIT, lambda: f"{names} after {what}; firing: {sorted(self.now())}")
        self.raised |= set(names)
        print(f"{what}: {', '.join(names)}", flush=True)

    def wait_gone(self, *names, what):
        eventually(lambda: not self.now() & set(names), LIMIT,
                   lambda: f"the end of {self.now() & set(names)} after {what}")


@contextlib.contextmanager
def crowd(cluster, clients, max_tokens):
    """So many clients that ask again and again, whatever they are answered."""
    stopping = threading.Event()

    def run(number):
        while not stopping.is_set():
            with contextlib.suppress(OSError):
                cluster.ask(f"Count from {number} to 90 and back. " * 6, max_tokens=max_tokens)
    threads = [threading.Thread(target=run, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def saturation(cluster, alerts):
    with crowd(cluster, clients=14, max_tokens=120):
        alerts.wait("ConclaveQueueFull", "ConclaveKvUsageHigh", what="more requests than there is room for")


def mismatch(cluster, alerts):
    """A worker of another precision is refused, again and again."""
    cluster.start_one("attention-9", "--set", "model.precision=f32")
    alerts.wait("ConclaveMembersRefused", what="a worker of another numerics_id")
    cluster.kill("attention-9")
    require("ConclaveMemberLost" not in alerts.now(), "a refused worker counts as lost")


def stall(cluster, alerts):
    """The worker is stopped in the middle of its work."""
    with Load(cluster, threads=2) as load:
        eventually(lambda: load.answers > 0 or load.errors, LIMIT, "an answer")
        worker = cluster.running["attention-0"]
        worker.send_signal(signal.SIGSTOP)
        try:
            alerts.wait("ConclaveRequestsStalled", "ConclavePartStalled", what="a worker that is stopped")
        finally:
            worker.send_signal(signal.SIGCONT)
        alerts.wait_gone("ConclaveRequestsStalled", "ConclavePartStalled", what="the worker going on")
    require(not load.errors, f"requests failed: {load.errors}")


def descriptors(cluster, alerts):
    router = cluster.running["router"].pid
    before = resource.prlimit(router, resource.RLIMIT_NOFILE)
    resource.prlimit(router, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{router}/fd")) + 8, before[1]))
    alerts.wait("ConclaveFileDescriptorsHigh", what="a router with few descriptors left")
    resource.prlimit(router, resource.RLIMIT_NOFILE, before)
    alerts.wait_gone("ConclaveFileDescriptorsHigh", what="a higher limit")


def keys(cluster, alerts, file):
    file.write_text("this is no line of keys\n")
    cluster.running["router-1"].send_signal(signal.SIGHUP)
    alerts.wait("ConclaveKeyReloadFailed", what="a file of keys with a fault")


def restart(cluster, name, ops, **how):
    """At the addresses that it had: Prometheus and its peers know no others."""
    if cluster.running[name].poll() is None:
        cluster.kill(name)
    cluster.start_one(name, ops_listen=ops, **how)
    eventually(lambda: get(cluster.ops(name), "/startupz")[0] == 200, 60, f"{name} again")


def worker_lost(cluster, alerts):
    address = cluster.ops("attention-0")
    cluster.kill("attention-0")
    alerts.wait("ConclaveNoWorkers", "ConclaveTargetDown", "ConclaveRoleDown", "ConclaveMemberLost", "ConclaveFleetNotReady",
                what="the only worker lost")
    require(("ConclaveTargetDown", address) in firing(alerts.prometheus), f"TargetDown of {address}")
    restart(cluster, "attention-0", ops=address)
    alerts.wait_gone("ConclaveNoWorkers", "ConclaveTargetDown", "ConclaveRoleDown", "ConclaveFleetNotReady",
                     what="its restart")


def scheduler_lost(cluster, alerts):
    grpc, ops = cluster.address("scheduler", "grpc"), cluster.ops("scheduler")
    cluster.kill("scheduler")
    alerts.wait("ConclaveRoleDown", "ConclaveFleetNotReady", what="the scheduler lost")
    roles = {a["labels"].get("job") for (name, _), a in firing(alerts.prometheus).items() if name == "ConclaveRoleDown"}
    require(roles == {"conclave-scheduler"}, f"roles down: {roles}")
    restart(cluster, "scheduler", listen=grpc, ops=ops)
    alerts.wait_gone("ConclaveRoleDown", "ConclaveFleetNotReady", what="its restart")


def flapping(cluster, alerts):
    """A shard that dies again and again."""
    for _ in range(6):
        restart(cluster, "expert-1", ops=cluster.ops("expert-1"))
        eventually(lambda: get(cluster.ops("expert-1"), "/readyz")[0] == 200, 60, "the shard as a member")
    alerts.wait("ConclaveProcessRestarts", "ConclaveMembersFlap", what="a shard that dies six times")


def main():
    root, binaries = pathlib.Path(sys.argv[1]), sys.argv[2]
    if shutil.which("prometheus") is None:
        print("SKIPPED: Debian's package prometheus is missing")
        return SKIPPED
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        for part in ("cluster", "prometheus"):
            (directory / part).mkdir()
        key_file = directory / "keys"
        key_file.write_text("")
        try:
            with Cluster(binaries, root / "models/demo-m2", directory / "cluster", settings=SETTINGS) as cluster:
                cluster.start()
                cluster.names.append("router-1")
                cluster.start_one("router-1", "--set", f"router.api_keys_file={key_file}")
                with Prometheus(directory / "prometheus") as prometheus:
                    prometheus.start(configuration(root, cluster, directory / "prometheus"))
                    alerts = Alerts(prometheus)
                    eventually(lambda: all(t["health"] == "up" for t in prometheus.api("targets")["activeTargets"]), LIMIT,
                               "a first scrape of every target")
                    require(not alerts.now(), f"raised without a fault: {alerts.now()}")
                    saturation(cluster, alerts)
                    mismatch(cluster, alerts)
                    stall(cluster, alerts)
                    descriptors(cluster, alerts)
                    keys(cluster, alerts, key_file)
                    require(not alerts.now() & {"ConclaveMemberLost", "ConclaveRoleDown", "ConclaveNoWorkers"},
                            f"raised by something else: {alerts.now()}")
                    worker_lost(cluster, alerts)
                    scheduler_lost(cluster, alerts)
                    flapping(cluster, alerts)
        except (Failure, TimeoutError) as error:
            print(error)
            return 1
    print(f"{len(alerts.raised)} alerts were raised by faults")
    return 0


if __name__ == "__main__":
    sys.exit(main())
