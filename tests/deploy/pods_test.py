"""The pods of the manifests, run as processes (pods.py)."""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import random
import threading
import time
import unittest
import urllib.error
import urllib.request

import manifests
import pods

BIN_DIR = pathlib.Path(os.environ["CONCLAVE_BIN_DIR"]).resolve()
SCHEDULER_NUMBER = 2  # the address of its Service
CLIENTS = 3
# How late clients learn which pods of a Service are ready; preStop has to be longer.
ENDPOINTS_LATE_S = 2


def make_key():
    made = subprocess.run([BIN_DIR / "conclave", "key", "--name", "test"], capture_output=True, text=True, check=True).stdout
    return re.search(r"^key\s+(\S+)$", made, re.MULTILINE).group(1), re.search(r"^line\s+(.+)$", made, re.MULTILINE).group(1)


def make_certificates(scratch, objects):
    """The Secrets that cert-manager would make of the manifests' Certificates: name -> {key: text}."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=scratch))

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, capture_output=True, check=True)
    certificates = [c["spec"] for c in manifests.of_kind(objects, "Certificate") if "isCA" not in c["spec"]]
    if not certificates:
        return {}
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "ca.key", "-out", "ca.crt",
            "-days", "2", "-subj", "/CN=conclave-ca")
    usage = {"server auth": "serverAuth", "client auth": "clientAuth"}
    out = {}
    for spec in certificates:
        names = [f"DNS:{n}" for n in spec["dnsNames"]] + [f"IP:{a}" for a in spec.get("ipAddresses", [])]
        (folder / "extensions").write_text(f"subjectAltName={','.join(names)}\nkeyUsage=critical,digitalSignature\n"
                                           f"extendedKeyUsage={','.join(usage[u] for u in spec['usages'] if u in usage)}\n")
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "tls.key", "-out", "tls.csr",
                "-subj", f"/CN={spec['commonName']}")
        openssl("x509", "-req", "-in", "tls.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1",
                "-extfile", "extensions", "-out", "tls.crt")
        out[spec["secretName"]] = {key: (folder / key).read_text() for key in ("ca.crt", "tls.crt", "tls.key")}
    return out


class Cluster:
    def __init__(self, scratch, kustomization):
        self.scratch, self.objects = scratch, manifests.rendered(kustomization)
        self.workloads = {w.role: w for w in manifests.workloads(self.objects)}
        self.key, line = make_key()
        self.secrets = {"conclave-cluster-secret": {"secret": "secret of a test\n"}, "conclave-api-keys": {"api-keys": line + "\n"},
                        **make_certificates(scratch, self.objects)}
        self.next_number = SCHEDULER_NUMBER
        self.lock = threading.Lock()
        self.all = []

    def start(self, role, name, **more):
        """A scheduler has the address of its Service, which the next one takes over."""
        with self.lock:
            self.next_number += role != "scheduler"
            number = SCHEDULER_NUMBER if role == "scheduler" else self.next_number
        pod = pods.Pod(self.scratch, self.objects, self.workloads[role], name, number, self.secrets,
                       {"conclave-scheduler": f"{pods.NETWORK}{SCHEDULER_NUMBER}"}, BIN_DIR, **more)
        with self.lock:
            self.all.append(pod)
        return pod

    def close(self):
        for pod in self.all:
            pod.kill()


def ask(router, key):
    """The answer to a question with one answer."""
    body = {"messages": [{"role": "user", "content": "Count from 3 to 20."}], "max_tokens": 80, "temperature": 0}
    request = urllib.request.Request(f"http://{router.address}:8000/v1/chat/completions", json.dumps(body).encode(),
                                     {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=pods.DEADLINE_S) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


class Service:
    """Which of its pods clients reach: those that were ready ENDPOINTS_LATE_S ago."""

    def __init__(self, pods_behind):
        self.pods = list(pods_behind)

    def known(self):
        return [p for p in list(self.pods) if p.kubelet.was_ready(time.monotonic() - ENDPOINTS_LATE_S)]

    def pick(self):
        """A pod for one request. Without any the request fails, as a connection to such a Service does."""
        known = self.known()
        if not known:
            raise AssertionError("no pod behind the Service is ready")
        return random.choice(known)


class Load:
    """Clients that ask the same question until stop(); each answer must be the first one's."""

    def __init__(self, service, key):
        self.service, self.key = service, key
        self.expected = ask(service.pick(), key)
        self.answers, self.faults = 0, []
        self.lock, self.stopping = threading.Lock(), threading.Event()
        self.threads = [threading.Thread(target=self.run) for _ in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def run(self):
        while not self.stopping.is_set():
            try:
                text = ask(self.service.pick(), self.key)
                fault = None if text == self.expected else f"another answer: {text!r}"
            except Exception as error:  # every kind of failure is one
                fault = repr(error)
            with self.lock:
                self.answers += 1
                if fault:
                    self.faults.append(fault)

    def wait_for_answers(self, more):
        """Until so many more answers have come."""
        with self.lock:
            until = self.answers + more
        while self.answers < until and not self.faults:
            time.sleep(0.02)

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()


class ClusterTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="conclave-pods-")
        self.scratch = scratch.name
        os.chmod(self.scratch, 0o755)
        self.addCleanup(scratch.cleanup)

    def start_demo(self, kustomization="cpu-demo"):
        """The demo with two workers and two shards, every probe succeeding."""
        self.cluster = Cluster(self.scratch, kustomization)
        self.addCleanup(self.cluster.close)
        self.scheduler = self.cluster.start("scheduler", "conclave-scheduler-0")
        self.members = [self.cluster.start("attention", f"conclave-attention-{i}") for i in range(2)]
        self.shards = [self.cluster.start("expert", f"conclave-expert-{i}") for i in range(2)]
        self.router = self.cluster.start("router", "conclave-router-0")
        for pod in self.fleet():
            for what in ("started", "ready", "alive"):
                pod.wait_for(what, self.fleet())

    def fleet(self):
        return [self.scheduler, *self.members, *self.shards, self.router]

    def assert_no_probe_would_kill(self):
        for pod in self.cluster.all:
            self.assertIsNone(pod.kubelet.verdict, pod.name)


class Pods(ClusterTest):
    def test_every_pods_command_environment_and_configuration_are_accepted(self):
        for name in manifests.KUSTOMIZATIONS:
            cluster = Cluster(self.scratch, name)
            self.addCleanup(cluster.close)
            started = []
            for i, workload in enumerate(manifests.workloads(cluster.objects)):
                cluster.workloads[workload.role] = workload
                # Ends each program right after it has read its configuration and opened its operations port.
                started.append(cluster.start(workload.role, f"{name}-{workload.role}-{i}",
                                             more_args=["--ready-file", "/nowhere/ready"], models=manifests.ROOT / "models",
                                             probes=False))
            for pod in started:
                with self.subTest(pod.name):
                    self.assertEqual(pod.process.wait(timeout=pods.DEADLINE_S), 2, pod.log())
                    program = pod.workload.container["command"][0].rpartition("/")[2]
                    self.assertEqual(pod.log(), f"{program}: --ready-file: '/nowhere/ready' cannot be written\n")
            cluster.close()
            for pod in started:
                subprocess.run(["ip", "link", "del", pod.link], capture_output=True)

    def test_the_demo_starts_answers_and_ends(self):
        self.start_demo("demo_mtls")  # Rolling runs the one in clear
        env = manifests.environment(self.cluster.objects, self.shards[0].workload)
        first, last = (int(port) for port in env["UCX_TCP_PORT_RANGE"].split("-"))
        for pod in self.members + self.shards:
            declared = {p["containerPort"] for p in pod.workload.container["ports"]}
            data = pod.listening_ports() - declared
            self.assertTrue(data and all(first <= port <= last for port in data), (pod.name, data))
        self.assertIn("3 4 5 6 7", ask(self.router, self.cluster.key))
        with self.assertRaises(urllib.error.HTTPError) as refused:
            ask(self.router, "ck-another")
        refused.exception.close()
        self.assertEqual(refused.exception.code, 401)
        with urllib.request.urlopen(f"http://{self.scheduler.address}:7071/metrics", timeout=pods.DEADLINE_S) as answer:
            metrics = answer.read().decode()
        self.assertRegex(metrics, r"(?m)^conclave_tls_certificate_expiry_seconds [1-9]")
        self.assertEqual(re.findall(r"(?m)^conclave_tls_refused_handshakes_total.* (?!0$).*$", metrics), [])
        for pod in self.fleet():
            self.assertNotIn("has no effect", pod.log())
        for pod in [self.router, *self.members]:
            self.assertTrue(pod.stop(), pod.log()[-2000:])


class Changes(ClusterTest):
    """Changes of a cluster that serves. No request may fail, none may be answered otherwise, no probe may kill."""

    def setUp(self):
        super().setUp()
        self.start_demo(self.KUSTOMIZATION)
        self.service = Service([self.router])
        while not self.service.known():  # the router is ready
            time.sleep(0.05)
        self.load = Load(self.service, self.cluster.key)
        self.addCleanup(self.load.stop)
        self.assertIn("3 4 5 6 7", self.load.expected)
        self.load.wait_for_answers(CLIENTS)

    def replace(self, pods_of_set, role, name):
        """A StatefulSet's rolling update: from the last pod on, each new one ready before the next goes."""
        for i in reversed(range(len(pods_of_set))):
            self.assertTrue(pods_of_set[i].stop(), pods_of_set[i].log()[-2000:])
            pods_of_set[i] = self.cluster.start(role, f"{name}-{i}")
            for what in ("started", "ready"):
                pods_of_set[i].wait_for(what)
            self.load.wait_for_answers(CLIENTS)

    def together(self, *steps):
        """Runs steps at the same time; the first fault of any of them is this test's."""
        faults = []

        def run(step):
            try:
                step()
            except BaseException as fault:  # carried to the test's own thread
                faults.append(fault)
        threads = [threading.Thread(target=run, args=(step,)) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for fault in faults:
            raise fault

    def finish(self):
        self.load.wait_for_answers(CLIENTS)
        self.load.stop()
        self.assertEqual(self.load.faults[:5], [], f"{len(self.load.faults)} requests failed")
        self.assert_no_probe_would_kill()
        for pod in self.fleet():
            self.assertTrue(pod.probe("livenessProbe"), pod.name)
        print(f"{self.id()}: {self.load.answers} answers, none failed; pods that were not ready for a while: "
              f"{[p.name for p in self.cluster.all if p.kubelet.times_unready]}", flush=True)


class Rolling(Changes):
    KUSTOMIZATION = "cpu-demo"

    def test_shards_roll_and_scale_under_load(self):
        self.replace(self.shards, "expert", "conclave-expert")
        for i in (2, 3):
            self.shards.append(self.cluster.start("expert", f"conclave-expert-{i}"))
        for pod in self.shards[2:]:
            pod.wait_for("ready", self.fleet())
        self.load.wait_for_answers(CLIENTS)
        # Both at once, as a StatefulSet with this policy does it.
        self.assertEqual(self.shards[0].workload.spec["podManagementPolicy"], "Parallel")
        gone, self.shards = self.shards[2:], self.shards[:2]
        self.together(*[lambda pod=pod: self.assertTrue(pod.stop(), pod.log()[-2000:]) for pod in gone])
        self.finish()

    def test_a_change_of_everything_rolls_everything(self):
        def scheduler():  # Recreate
            self.assertTrue(self.scheduler.stop(), self.scheduler.log()[-2000:])
            self.scheduler = self.cluster.start("scheduler", "conclave-scheduler-1")
            self.scheduler.wait_for("ready")

        def router():  # one more, then one less
            old, new = self.router, self.cluster.start("router", "conclave-router-1")
            self.service.pods.append(new)
            new.wait_for("ready")
            self.assertTrue(old.stop(), old.log()[-2000:])
            self.router = new
        self.together(scheduler, router, lambda: self.replace(self.members, "attention", "conclave-attention"),
                      lambda: self.replace(self.shards, "expert", "conclave-expert"))
        self.finish()


class RollingMtls(Rolling):
    KUSTOMIZATION = "demo_mtls"


class RollingGroups(Changes):
    """The pods of a LeaderWorkerSet, with mutual TLS."""

    KUSTOMIZATION = "demo_groups"

    def start_group(self, index):
        """A leader and its workers, by the names that the controller gives them."""
        leader = self.cluster.workloads["attention"]
        self.members.append(self.cluster.start("attention", f"conclave-group-{index}"))
        for i in range(1, leader.spec["leaderWorkerTemplate"]["size"]):
            self.shards.append(self.cluster.start("expert", f"conclave-group-{index}-{i}"))
        return [p for p in self.members + self.shards if p.name.startswith(f"conclave-group-{index}")]

    def start_demo(self, kustomization):
        self.cluster = Cluster(self.scratch, kustomization)
        self.addCleanup(self.cluster.close)
        self.scheduler = self.cluster.start("scheduler", "conclave-scheduler-0")
        self.members, self.shards = [], []
        self.groups = [self.start_group(i) for i in range(self.cluster.workloads["attention"].spec["replicas"])]
        self.router = self.cluster.start("router", "conclave-router-0")
        for pod in self.fleet():
            for what in ("started", "ready", "alive"):
                pod.wait_for(what, self.fleet())

    def test_groups_roll_under_load(self):
        """Groups are replaced as wholes: from the last one on, all pods of one at the same time."""
        for i in reversed(range(len(self.groups))):
            gone = self.groups[i]
            self.together(*[lambda pod=pod: self.assertTrue(pod.stop(), pod.log()[-2000:]) for pod in gone])
            self.members = [p for p in self.members if p not in gone]
            self.shards = [p for p in self.shards if p not in gone]
            self.groups[i] = self.start_group(i)
            for pod in self.groups[i]:
                pod.wait_for("ready", self.fleet())
            self.load.wait_for_answers(CLIENTS)
        self.finish()


if __name__ == "__main__":
    pods.enter_node()
    unittest.main(verbosity=2)
