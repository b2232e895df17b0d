"""Faults made for real, in real processes, raise their alerts through Prometheus's API, and no others.

usage: alerts_test.py ROOT BINARIES [SCENE...]      (default: every scene)

The rules are those of deploy/prometheus with windows a twentieth as long (4 s at least) and `for:` cut to 2 s, both by
observability.shortened(); thresholds, sums and labels are as shipped. Before a fault the alerts that it raises are quiet; while it
lasts nothing fires but what it names (and, on a machine without a processor to spare, what SLOW has). Every alert of the rules is
raised by some fault here, or is in NOT_MADE with the reason. Nothing waits for a fixed time, but for faults that are one, such as a
process that is stopped for a while. Exits 77 (skipped) when Prometheus is missing. live_test.py has a few of these alerts with the
windows as shipped.
"""

import contextlib
import http.client
import os
import pathlib
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

import observability
from certificates import Authority
from cluster import PATIENT, Cluster, Load, Prometheus, eventually, get
from live_test import SKIPPED, Failure, call_in_clear, configuration, firing, require

LIMIT = 150  # seconds for any one alert to come or go
DIVISOR = 20

# {alert: why no fault here raises it}. rules_test.py raises those as well, from series made up.
NOT_MADE = {}

# What a machine on which processes wait seconds for a processor may raise beside any fault: it is about time.
SLOW = {"ConclaveFirstTokenSlow", "ConclaveTokensSlow", "ConclaveSchedulerStalls", "ConclaveDispatchDeadlines", "ConclaveRetryStorm",
        "ConclaveRowsHeld", "ConclaveRequestsStalled", "ConclavePartStalled", "ConclaveShardsUnreachable", "ConclaveTargetDown",
        "ConclaveRoleDown"}
# What may come with processes that are away or do not answer, beside the alerts named.
AWAY = {"ConclaveMemberLost", "ConclaveNoWorkers", "ConclaveFleetNotReady", "ConclavePlacementIncomplete"}


class Alerts:
    def __init__(self, prometheus):
        self.prometheus = prometheus
        self.raised = set()

    def now(self):
        return {name for name, _ in firing(self.prometheus)}

    def look_again(self):
        """Until every rule has been evaluated so often that an alert would have fired."""
        def times():
            return [rule["lastEvaluation"] for group in self.prometheus.api("rules")["groups"] for rule in group["rules"]]
        for _ in range(5):
            before = times()
            eventually(lambda: all(a != b for a, b in zip(before, times(), strict=True)), LIMIT, "another look at every rule")

    def quiet(self):
        """Nothing fires, or begins to."""
        self.look_again()  # at first targets are absent, until they were scraped
        eventually(lambda: not self.now() - SLOW, LIMIT, lambda: f"quiet: {sorted(self.now())}")
        self.look_again()
        require(not self.now() - SLOW, f"raised without a fault: {sorted(self.now())}")

    def expect(self, fault, *names, also=()):
        """When none of `names` fires, `fault` is made. It returns nothing, or what is to be done once a second until all of them
        have fired."""
        names, seen = set(names), set()
        self.wait_gone(*names, after=f"what came before {fault.__doc__}")
        again = fault()
        turn = time.monotonic()

        def all_seen():
            nonlocal turn
            seen.update(self.now())
            if again and not seen >= names and time.monotonic() >= turn + 1:
                again()
                turn = time.monotonic()
            return seen >= names
        eventually(all_seen, LIMIT, lambda: f"{sorted(names - seen)} after {fault.__doc__}; fired: {sorted(seen)}")
        others = seen - names - set(also) - SLOW
        require(not others, f"{fault.__doc__} raised {sorted(others)} as well")
        self.raised |= names
        print(f"{fault.__doc__}: {', '.join(sorted(names))}", flush=True)

    def wait_gone(self, *names, after):
        eventually(lambda: not self.now() & set(names), LIMIT, lambda: f"the end of {sorted(self.now() & set(names))} after {after}")


@contextlib.contextmanager
def scene(root, binaries, directory, settings=(), before=None, **shape):
    """(cluster, alerts): a cluster with Prometheus beside it, in which all is well. `before` starts more of it."""
    for part in ("cluster", "prometheus"):
        (directory / part).mkdir()
    settings = {setting.split("=")[0]: setting for setting in [*PATIENT, *settings]}.values()
    with Cluster(binaries, root / "models/demo-m2", directory / "cluster", settings=settings, **shape) as cluster:
        cluster.start(LIMIT)
        if before:
            before(cluster)
        with Prometheus(directory / "prometheus") as prometheus:
            prometheus.start(configuration(root, cluster, directory / "prometheus", DIVISOR))
            eventually(lambda: all(t["health"] == "up" for t in prometheus.api("targets")["activeTargets"]), LIMIT,
                       "a first scrape of every target")
            alerts = Alerts(prometheus)
            with Load(cluster, limit=LIMIT) as load:
                eventually(lambda: load.answers or load.errors, LIMIT, "an answer")
                alerts.quiet()
            require(not load.errors, f"requests failed: {load.errors}")
            yield cluster, alerts


class Crowd:
    """Clients that ask again and again, whatever they are answered, until the block ends."""

    def __init__(self, cluster, max_tokens):
        self.cluster, self.max_tokens = cluster, max_tokens
        self.stopping = threading.Event()
        self.threads = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def add(self, clients=1):
        for _ in range(clients):
            thread = threading.Thread(target=self.run, args=(len(self.threads),))
            self.threads.append(thread)
            thread.start()

    def run(self, number):
        turn = 0
        while not self.stopping.is_set():
            turn += 1
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, _ = self.cluster.ask(f"{number} and {turn}: count from {number} to 90 and back. " * 3,
                                             max_tokens=self.max_tokens)
                if status != 200:
                    self.stopping.wait(0.2)  # as a client that was told to come again


class Arrivals:
    """Requests that come one by one and go when they are answered."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.threads = []
        self.faults = []

    def one(self, max_tokens=8):
        def run(number):
            try:
                status, body = self.cluster.ask(f"Count from {number} to 70.", max_tokens=max_tokens, limit=2 * LIMIT)
                if status != 200:
                    self.faults.append(f"{status}: {body}")
            except (OSError, http.client.HTTPException) as error:
                self.faults.append(repr(error))
        thread = threading.Thread(target=run, args=(len(self.threads),))
        self.threads.append(thread)
        thread.start()

    def end(self):
        for thread in self.threads:
            thread.join()
        require(not self.faults, f"requests failed: {self.faults[:3]}")


def busy(root, binaries, directory):
    """More requests than there is room for."""
    with scene(root, binaries, directory, settings=[
            "scheduler.max_waiting_requests=80", "scheduler.queue_reserve_percent=0", "scheduler.admission_reserve_tokens=16",
            "attention.kv_blocks=240"]) as (cluster, alerts):
        with Crowd(cluster, max_tokens=120) as crowd:
            def full():
                """more clients than there are pages for"""
                crowd.add(36)
            alerts.expect(full, "ConclaveKvUsageHigh", "ConclavePreemptions", also={"ConclaveQueueGrowing"})

            def more():
                """a client more each second"""
                return crowd.add
            alerts.expect(more, "ConclaveQueueGrowing", also={"ConclaveKvUsageHigh", "ConclavePreemptions"})

            def flood():
                """more clients than there are places in the queue"""
                crowd.add(80)
            alerts.expect(flood, "ConclaveQueueFull", "ConclaveRequestsFail",
                          also={"ConclaveKvUsageHigh", "ConclavePreemptions", "ConclaveQueueGrowing"})
        alerts.wait_gone("ConclaveQueueFull", "ConclaveKvUsageHigh", "ConclavePreemptions", after="the crowd")
    return alerts.raised


def speak_nonsense(cluster):
    """A gRPC call of the scheduler whose message is no message."""
    def frame(kind, flags, stream, payload):
        return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload

    def header(name, value):
        return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
    headers = b"".join([b"\x83\x86", header(b":path", b"/conclave.v1.Cluster/Gateway"), header(b":authority", b"scheduler"),
                        header(b"content-type", b"application/grpc"), header(b"te", b"trailers")])
    message = b"\xff" * 8
    host, port = cluster.address("scheduler", "grpc").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as caller, caller.makefile("rb") as answer:
        caller.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, headers) +
                       frame(0, 0, 1, b"\0" + struct.pack(">I", len(message)) + message))
        # Until the call is over: a frame of its stream that ends it.
        while head := answer.read(9):
            answer.read(int.from_bytes(head[:3], "big"))
            if head[5:] == b"\0\0\0\1" and (head[3] == 3 or head[4] & 1):
                return
    raise Failure("the scheduler hung up before it had answered")


def stopped(root, binaries, directory):
    """Processes that stand still or run short. Who stands still for so long may lose its connection: it did not answer a probe."""
    key_file = directory / "keys"
    key_file.write_text("")

    def second_router(cluster):
        cluster.names.append("router-1")
        cluster.start_one("router-1", "--set", f"router.api_keys_file={key_file}")
    with scene(root, binaries, directory, before=second_router, shards=3, settings=[
            "logging.stall_report_s=2", "scheduler.lease_ms=100000", "scheduler.max_running_requests=2"]) as (cluster, alerts):
        router, worker = cluster.running["router"], cluster.running["attention-0"]

        def keys():
            """a file of keys with a fault"""
            key_file.write_text("this is no line of keys\n")
            cluster.running["router-1"].send_signal(signal.SIGHUP)
        alerts.expect(keys, "ConclaveKeyReloadFailed")

        before = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as stack:
            def count():
                return len(os.listdir(f"/proc/{router.pid}/fd"))

            def descriptors():
                """a router with few file descriptors left"""
                # Idle clients have most of them, so that some are left for those who look.
                least = count() + 60
                host, port = cluster.address("router", "http").rsplit(":", 1)
                for _ in range(60):
                    stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
                eventually(lambda: count() >= least, LIMIT, "connections accepted")
                resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (count() * 100 // 88, before[1]))
            alerts.expect(descriptors, "ConclaveFileDescriptorsHigh", also={"ConclaveKeyReloadFailed"})
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, before)
        alerts.wait_gone("ConclaveFileDescriptorsHigh", after="a higher limit")

        def nonsense():
            """a caller of the scheduler who speaks nonsense"""
            speak_nonsense(cluster)
        alerts.expect(nonsense, "ConclaveRejectedMessages", also={"ConclaveKeyReloadFailed"})

        def precision():
            """a worker of another precision"""
            cluster.start_one("attention-9", "--set", "model.precision=f32")
        alerts.expect(precision, "ConclaveMembersRefused", also={"ConclaveKeyReloadFailed", "ConclaveRejectedMessages"})
        cluster.kill("attention-9")

        before_it = {"ConclaveKeyReloadFailed", "ConclaveRejectedMessages", "ConclaveMembersRefused"}
        arrivals, begin = Arrivals(cluster), time.monotonic()
        try:
            def stop():
                """a worker that is stopped while requests come"""
                arrivals.one()
                worker.send_signal(signal.SIGSTOP)
                return arrivals.one
            alerts.expect(stop, "ConclaveRequestsStalled", "ConclavePartStalled", also=AWAY | before_it)
            time.sleep(max(0, begin + 9 - time.monotonic()))  # longer than a first token may take
        finally:
            worker.send_signal(signal.SIGCONT)

        def answers():
            """what waited for it"""
            arrivals.end()
        alerts.expect(answers, "ConclaveFirstTokenSlow", also=AWAY | before_it)
        alerts.quiet()

        with Load(cluster, limit=LIMIT) as load:
            def drain():
                """all the work on one shard of three"""
                for shard in ("expert-1", "expert-2"):
                    subprocess.run([cluster.binaries / "conclave", "drain", shard, "--wait", "--scheduler",
                                    cluster.address("scheduler", "grpc")], check=True, capture_output=True, timeout=LIMIT)
            alerts.expect(drain, "ConclaveExpertImbalance", also={"ConclavePlacementIncomplete"})
        require(not load.errors, f"requests failed: {load.errors}")
    return alerts.raised


def lossy(root, binaries, directory):
    """A worker whose network loses every tenth message to a shard."""
    with scene(root, binaries, directory, settings=["attention.dispatch_deadline_floor_ms=2000"]) as (cluster, alerts):
        def replace(**how):
            # Asked to end while it has nothing to do, it leaves. Whoever leaves counts as lost.
            worker = cluster.running["attention-0"]
            worker.terminate()
            require(worker.wait(timeout=LIMIT) == 0, "the worker did not end well")
            cluster.restart("attention-0", **how)
            eventually(lambda: get(cluster.ops("router"), "/readyz")[0] == 200, LIMIT, "a ready router")
        with Crowd(cluster, max_tokens=4) as crowd:
            def loss():
                """a network that loses every tenth message"""
                replace(environment={"CONCLAVE_TEST_FAULTS": "seed=3,drop_out=0.1"})
                crowd.add(3)
            alerts.expect(loss, "ConclaveDispatchDeadlines", "ConclaveRetryStorm", "ConclaveTokensSlow", also=AWAY)
        replace()
        with Crowd(cluster, max_tokens=4) as crowd:
            crowd.add(3)
            alerts.wait_gone("ConclaveDispatchDeadlines", "ConclaveRetryStorm", "ConclaveTokensSlow", after="a network that works")
    return alerts.raised


def lost(root, binaries, directory):
    """Processes that are killed."""
    with scene(root, binaries, directory, settings=["scheduler.lease_ms=1000"]) as (cluster, alerts):
        # All but what lasts as long as its window.
        gone = AWAY - {"ConclaveMemberLost"} | {"ConclaveRoleDown", "ConclaveTargetDown", "ConclaveShardsUnreachable"}

        def ready(name):
            eventually(lambda: get(cluster.ops(name), "/readyz")[0] == 200, LIMIT, f"{name} again")

        def late():
            """a scheduler that is stopped again and again"""
            def again():
                cluster.running["scheduler"].send_signal(signal.SIGSTOP)
                time.sleep(1.8)  # late by more than half a lease, whenever it looked last
                cluster.running["scheduler"].send_signal(signal.SIGCONT)
            return again
        alerts.expect(late, "ConclaveSchedulerStalls")
        require("ConclaveMemberLost" not in alerts.now(), "a scheduler that stood still blames others")

        def one_shard():
            """a shard of two killed"""
            cluster.kill("expert-1")
        alerts.expect(one_shard, "ConclaveMemberLost", "ConclaveTargetDown", "ConclavePlacementIncomplete",
                      also=AWAY - {"ConclaveNoWorkers", "ConclaveFleetNotReady"})
        require(("ConclaveTargetDown", cluster.ops("expert-1")) in firing(alerts.prometheus), "another target is down")
        cluster.restart("expert-1")
        alerts.wait_gone(*gone, after="the shard's restart")

        def worker():
            """the only worker killed"""
            cluster.kill("attention-0")
        alerts.expect(worker, "ConclaveNoWorkers", "ConclaveTargetDown", "ConclaveRoleDown", "ConclaveFleetNotReady", also=AWAY)
        cluster.restart("attention-0")
        alerts.wait_gone(*gone, after="the worker's restart")

        def scheduler():
            """the scheduler killed"""
            cluster.kill("scheduler")
        alerts.expect(scheduler, "ConclaveRoleDown", "ConclaveTargetDown", "ConclaveFleetNotReady", also=AWAY)
        roles = {a["labels"].get("job") for (name, _), a in firing(alerts.prometheus).items() if name == "ConclaveRoleDown"}
        require("conclave-scheduler" in roles, f"roles down: {roles}")
        cluster.restart("scheduler")
        ready("router")
        alerts.quiet()

        with Load(cluster, limit=LIMIT) as load:
            eventually(lambda: load.answers or load.errors, LIMIT, "an answer")

            def all_shards():
                """all shards killed in the middle of the work"""
                def kill():
                    cluster.kill("expert-0")
                    cluster.kill("expert-1")
                kill()
                turns = iter(range(1, 1000))

                def again():
                    # If no step was on its way just then: once more, after a good while for the alert.
                    if next(turns) % 10 == 0:
                        cluster.restart("expert-0")
                        cluster.restart("expert-1")
                        answers = load.answers
                        eventually(lambda: load.answers > answers or load.errors, LIMIT, "an answer")
                        kill()
                return again
            alerts.expect(all_shards, "ConclaveRowsHeld", "ConclaveRoleDown", also=AWAY | {"ConclaveProcessRestarts"})
            cluster.restart("expert-0")
            cluster.restart("expert-1")
            answers = load.answers
            eventually(lambda: load.answers > answers or load.errors, LIMIT, "an answer after it")
        require(not load.errors, f"requests failed: {load.errors}")
        alerts.quiet()

        def flap():
            """a shard that dies again and again"""
            def again():
                cluster.restart("expert-1")
                ready("expert-1")
            return again
        alerts.expect(flap, "ConclaveProcessRestarts", "ConclaveMembersFlap", also=AWAY)
    return alerts.raised


def strangers(root, binaries, directory):
    """Who may not come in, and certificates."""
    authority = Authority(directory / "tls")
    authority.issue("all", days=30)
    secrets = {}
    for name in ("ours", "another"):
        secrets[name] = directory / name
        secrets[name].write_text(f"the secret that is {name}\n")
    with scene(root, binaries, directory, settings=[
            *authority.settings("all"), f"transport.secret_file={secrets['ours']}"]) as (cluster, alerts):
        def in_clear():
            """a caller of the scheduler without TLS"""
            call_in_clear(cluster)
        alerts.expect(in_clear, "ConclaveTlsRefused")

        def expires():
            """a certificate of less than a day"""
            authority.issue("all", days=1)
        alerts.expect(expires, "ConclaveCertificateExpires", also={"ConclaveTlsRefused"})
        authority.issue("all", days=30)
        alerts.wait_gone("ConclaveCertificateExpires", after="its renewal")

        def spoilt():
            """a file of certificates with none in it"""
            authority.spoil("all")
        alerts.expect(spoilt, "ConclaveCertificateReloadFailed", also={"ConclaveTlsRefused"})
        authority.issue("all", days=30)
        alerts.quiet()

        def uninvited():
            """a shard and a worker with another secret"""
            for name in ("expert-8", "attention-8"):
                cluster.start_one(name, "--set", f"transport.secret_file={secrets['another']}")
        alerts.expect(uninvited, "ConclaveMembersRefused")
        refusing = {address for name, address in firing(alerts.prometheus) if name == "ConclaveMembersRefused"}
        require(refusing == {cluster.ops("scheduler")}, f"refused by {refusing}")
        cluster.kill("expert-8")
        cluster.kill("attention-8")

        # Who has been let in stays. A worker that comes later cannot connect with it.
        changing = directory / "changing"
        changing.write_text(secrets["ours"].read_text())
        cluster.start_one("expert-9", "--set", f"transport.secret_file={changing}")
        eventually(lambda: get(cluster.ops("expert-9"), "/readyz")[0] == 200, LIMIT, "a third shard")

        def changed():
            """a shard whose secret is changed, and a worker that starts anew"""
            changing.write_text(secrets["another"].read_text())
            cluster.running["expert-9"].send_signal(signal.SIGHUP)
            eventually(lambda: "was read again" in cluster.log("expert-9"), LIMIT, "another secret")
            cluster.kill("attention-0")
            cluster.restart("attention-0")
        alerts.expect(changed, "ConclaveShardsUnreachable", also=AWAY | {"ConclaveMembersRefused"})
        cluster.kill("expert-9")
        alerts.wait_gone("ConclaveShardsUnreachable", after="its end")
    return alerts.raised


SCENES = (busy, stopped, lossy, lost, strangers)


def main():
    root, binaries, chosen = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if shutil.which("prometheus") is None:
        print("SKIPPED: Debian's package prometheus is missing")
        return SKIPPED
    raised = set()
    with tempfile.TemporaryDirectory() as scratch:
        for one in SCENES:
            if chosen and one.__name__ not in chosen:
                continue
            directory = pathlib.Path(scratch, one.__name__)
            directory.mkdir()
            begin = time.monotonic()
            try:
                raised |= one(root, binaries, directory)
            except (Failure, TimeoutError, RuntimeError, subprocess.SubprocessError) as error:
                print(f"{one.__name__}: {error}")
                return 1
            print(f"-- {one.__name__}: {time.monotonic() - begin:.0f} s", flush=True)
    if chosen:
        return 0
    wanted = set(observability.alerts(root)) - set(NOT_MADE)
    print(f"{len(raised)} of {len(observability.alerts(root))} alerts were raised by faults")
    if raised != wanted:
        print(f"not raised: {sorted(wanted - raised)}; raised, though NOT_MADE says otherwise: {sorted(raised & set(NOT_MADE))}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
