"""What the tests here share: a cluster, the `conclave` command beside it, and how a test says that it failed."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "observability"))

from cluster import Cluster, Load, eventually, get  # noqa: E402,F401


class Failure(Exception):
    pass


def require(condition, message):
    if not condition:
        raise Failure(message() if callable(message) else message)


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CONCLAVE_", "UCX_")) and k != "NO_COLOR"}
    return {**kept, **more}


class Command:
    """The `conclave` command of a build, pointed at a cluster's scheduler."""

    def __init__(self, binaries, cluster=None):
        self.program = str(pathlib.Path(binaries) / "conclave")
        self.cluster = cluster

    def arguments(self, *words):
        at = ["--scheduler", self.cluster.address("scheduler", "grpc")] if self.cluster else []
        return [self.program, *words, *at]

    def run(self, *words, limit=60, before=None, **env):
        return subprocess.run(self.arguments(*words), capture_output=True, text=True, timeout=limit,
                              stdin=subprocess.DEVNULL, env=environment(**env), preexec_fn=before)

    def json(self, *words, codes=(0,), **more):
        done = self.run(*words, **more)
        require(done.returncode in codes, f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return json.loads(done.stdout)


def main(test, cluster_options=None):
    """test(command, cluster, directory); the exit code of the program."""
    root, binaries = pathlib.Path(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with Cluster(binaries, root / "models/demo-m2", scratch, **(cluster_options or {})) as cluster:
                cluster.start()
                test(Command(binaries, cluster), cluster, pathlib.Path(scratch))
        except (Failure, TimeoutError, subprocess.TimeoutExpired) as error:
            print(f"FAILED: {error}")
            return 1
    return 0
