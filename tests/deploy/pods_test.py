"""The pods of the manifests, run as processes (pods.py)."""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import threading
import unittest
import urllib.error
import urllib.request

import manifests
import pods

BIN_DIR = pathlib.Path(os.environ["CONCLAVE_BIN_DIR"]).resolve()
SCHEDULER_NUMBER = 2  # the address of its Service
CLIENTS = 3


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
        self.all = []

    def start(self, role, name, **more):
        number, self.next_number = self.next_number, self.next_number + 1
        pod = pods.Pod(self.scratch, self.objects, self.workloads[role], name, number, self.secrets,
                       {"conclave-scheduler": f"{pods.NETWORK}{SCHEDULER_NUMBER}"}, BIN_DIR, **more)
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


class Load:
    """Clients that ask the same question until stop(); each answer must be the first one's."""

    def __init__(self, router, key):
        self.router, self.key = router, key
        self.expected = ask(router, key)
        self.answers, self.faults = 0, []
        self.lock, self.stopping = threading.Lock(), threading.Event()
        self.threads = [threading.Thread(target=self.run) for _ in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def run(self):
        while not self.stopping.is_set():
            try:
                text = ask(self.router, self.key)
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
            self.stopping.wait(0.02)

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
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                pod.wait_for(kind, self.fleet())

    def fleet(self):
        return [self.scheduler, *self.members, *self.shards, self.router]


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
                                             more_args=["--ready-file", "/nowhere/ready"], models=manifests.ROOT / "models"))
            for pod in started:
                with self.subTest(pod.name):
                    self.assertEqual(pod.process.wait(timeout=pods.DEADLINE_S), 2, pod.log())
                    program = pod.workload.container["command"][0].rpartition("/")[2]
                    self.assertEqual(pod.log(), f"{program}: --ready-file: '/nowhere/ready' cannot be written\n")
            cluster.close()
            for pod in started:
                subprocess.run(["ip", "link", "del", f"pod{pod.address.rpartition('.')[2]}"], capture_output=True)

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


class Rolling(ClusterTest):
    def test_shards_roll_and_scale_under_load(self):
        self.start_demo()
        load = Load(self.router, self.cluster.key)
        self.addCleanup(load.stop)
        self.assertIn("3 4 5 6 7", load.expected)
        load.wait_for_answers(CLIENTS)
        for i in reversed(range(2)):  # a rolling update: from the last, each ready before the next goes
            self.assertTrue(self.shards[i].stop(), self.shards[i].log()[-2000:])
            self.shards[i] = self.cluster.start("expert", f"conclave-expert-{i}")
            for kind in ("startupProbe", "readinessProbe"):
                self.shards[i].wait_for(kind, self.fleet())
            load.wait_for_answers(CLIENTS)
        for i in (2, 3):
            self.shards.append(self.cluster.start("expert", f"conclave-expert-{i}"))
        for pod in self.shards[2:]:
            pod.wait_for("readinessProbe", self.fleet())
        load.wait_for_answers(CLIENTS)
        for _ in range(2):
            gone = self.shards.pop()
            self.assertTrue(gone.stop(), gone.log()[-2000:])
        load.wait_for_answers(CLIENTS)
        load.stop()
        self.assertEqual(load.faults, [])
        for pod in self.fleet():
            self.assertTrue(pod.probe("livenessProbe"), pod.name)


if __name__ == "__main__":
    pods.enter_node()
    unittest.main(verbosity=2)
