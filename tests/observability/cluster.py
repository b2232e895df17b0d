"""A cluster of real processes on loopback, with ports that the kernel chose, and Prometheus beside it."""

import http.client
import json
import os
import pathlib
import re
import subprocess
import threading
import time

# On a busy machine a process that gets no processor for seconds is not to count as lost, nor its answers as missing. One that is
# killed is lost at once all the same.
PATIENT = ("scheduler.lease_ms=4000", "scheduler.dead_after_ms=100000", "scheduler.dead_after_trouble_ms=100000",
           "scheduler.max_peer_troubles=1000000", "attention.dispatch_deadline_floor_ms=20000")
ROLES = ("scheduler", "expert", "attention", "router")


def eventually(condition, limit, what):
    """Its first true value; asks until `limit` seconds have passed, then raises with what was waited for."""
    end = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"{limit} s passed without: {what() if callable(what) else what}")
        time.sleep(0.05)


def get(address, path, limit=10):
    """(status, body) of a GET; (0, "") when nobody answers."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=limit)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


class Processes:
    """Ends what it started, however the block ends."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.running = {}

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for process in reversed(list(self.running.values())):
            if process.poll() is None:
                process.terminate()
        for process in self.running.values():
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if kind is not None:
            for log in sorted(self.directory.glob("*.log")):
                print(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]))

    def spawn(self, name, arguments, before=None, environment=None):
        """`before` runs in the child before the program; `environment` is what it has beside that of this process."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CONCLAVE_")} | (environment or {})
        with open(self.directory / f"{name}.log", "wb") as log:
            self.running[name] = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log,
                                                  stderr=subprocess.STDOUT, env=environment, preexec_fn=before)

    def log(self, name):
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def check(self, name):
        if self.running[name].poll() is not None:
            raise RuntimeError(f"{name} ended with {self.running[name].returncode}")


class Cluster(Processes):
    def __init__(self, binaries, model, directory, shards=2, workers=1, settings=()):
        super().__init__(directory)
        self.settings = [word for setting in settings for word in ("--set", setting)]
        self.binaries = pathlib.Path(binaries)
        self.model = str(model)
        self.names = ["scheduler", *(f"expert-{i}" for i in range(shards)),
                      *(f"attention-{i}" for i in range(workers)), "router"]

    def start(self, limit=60):
        for name in self.names:
            self.start_one(name)
        eventually(lambda: get(self.ops("router"), "/readyz")[0] == 200, limit, "a ready router")

    def start_one(self, name, *more, listen="127.0.0.1:0", ops_listen="127.0.0.1:0", threads=1, before=None,
                  environment=None):
        """Starts a process of the role that its name begins with; `listen` is the scheduler's."""
        role = name.split("-")[0]
        self.ready_file(name).unlink(missing_ok=True)
        arguments = [str(self.binaries / f"conclave-{role}"), "--ready-file", str(self.ready_file(name)),
                     "--ops-listen", ops_listen]
        if role == "scheduler":
            arguments += ["--listen", listen]
        else:
            arguments += ["--model", self.model, "--scheduler", self.address("scheduler", "grpc")]
        if role == "router":
            arguments += ["--http-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0",
                          "--admin-listen", "127.0.0.1:0"]
        if role in ("expert", "attention"):
            arguments += ["--name", name, "--threads", str(threads)]
        # Of a key that is set twice the last value holds.
        self.spawn(name, arguments + self.settings + list(more), before, environment)

    def ready_file(self, name):
        return self.directory / f"{name}.ready"

    def address(self, name, what):
        """What the process says of its addresses; that of "ops" comes first."""
        def read():
            if not self.ready_file(name).exists():
                self.check(name)
                return None
            return json.loads(self.ready_file(name).read_text()).get(what)
        return eventually(read, 30, f"the address {what} of {name}")

    def ops(self, name):
        return self.address(name, "ops")

    def metrics(self, name):
        status, body = get(self.ops(name), "/metrics")
        if status != 200:
            raise RuntimeError(f"/metrics of {name} answers {status}")
        return body

    def kill(self, name):
        self.running[name].kill()
        self.running[name].wait()

    def restart(self, name, *more, **how):
        """Kills it, unless it has ended, and starts it at the addresses that it had: others know no new ones."""
        how["ops_listen"] = self.ops(name)
        if name == "scheduler":
            how["listen"] = self.address(name, "grpc")
        if self.running[name].poll() is None:
            self.kill(name)
        self.start_one(name, *more, **how)
        eventually(lambda: get(self.ops(name), "/startupz")[0] == 200, 60, f"{name} again")

    def ask(self, prompt, max_tokens=24, limit=60):
        host, port = self.address("router", "http").rsplit(":", 1)
        connection = http.client.HTTPConnection(host, int(port), timeout=limit)
        try:
            connection.request("POST", "/v1/completions", json.dumps(
                {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


class Load:
    """Requests without a pause from a few threads, until the block ends. Their prompts begin alike."""

    def __init__(self, cluster, threads=3, limit=60):
        self.cluster, self.limit = cluster, limit
        self.stopping = threading.Event()
        self.errors = []
        self.answers = 0
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(threads)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def run(self, number):
        turn = 0
        while not self.stopping.is_set():
            turn += 1
            try:
                status, body = self.cluster.ask("Count from 3 to 40 and then back again. " * 3 + f"{number} {turn}",
                                                limit=self.limit)
                if status != 200:
                    self.errors.append(f"{status}: {body}")
                else:
                    self.answers += 1
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(repr(error))
            if self.errors:
                return


class Prometheus(Processes):
    def start(self, configuration):
        path = self.directory / "prometheus.yml"
        path.write_text(json.dumps(configuration))  # JSON is YAML
        self.spawn("prometheus", ["prometheus", f"--config.file={path}", "--web.listen-address=127.0.0.1:0",
                                  f"--storage.tsdb.path={self.directory / 'data'}"])

        def listening():
            self.check("prometheus")
            return re.search(r'msg="Listening on" address="?(127\.0\.0\.1:\d+)', self.log("prometheus"))
        self.address = eventually(listening, 30, "Prometheus's address")[1]
        eventually(lambda: get(self.address, "/-/ready")[0] == 200, 30, "a ready Prometheus")

    def api(self, path):
        status, body = get(self.address, "/api/v1/" + path, limit=60)
        document = json.loads(body) if body else {}
        if status != 200 or document.get("status") != "success":
            raise RuntimeError(f"/api/v1/{path}: {status} {body}")
        return document["data"]
