"""MiniMax-M2's real geometry at 3 layers in FP8 (13.5 GB): `conclave up` with one worker and two shards answers, and
gives the text that a cluster in one process with one shard gives. Prints what it took in time and memory.

Needs CONCLAVE_BIN_DIR, 16 GB of disk under the temporary folder (TMPDIR) and about as much memory for page cache.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

BIN = pathlib.Path(os.environ["CONCLAVE_BIN_DIR"])
NEEDED_BYTES = 16 << 30
PROMPT = "The experts of this model live in other processes."


def children(pid):
    out = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in out.stdout.split()]


def memory_mib(pid):
    """(anonymous, file-backed) resident MiB."""
    fields = {}
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        fields[key] = value.split()[0] if value.split() else ""
    return int(fields["RssAnon"]) // 1024, int(fields["RssFile"]) // 1024


class Cluster:
    def __init__(self, folder, model, *flags):
        # Opened for reading and writing, so that neither side waits for the other to open it.
        fifo = folder / f"ready-{time.monotonic_ns()}"
        os.mkfifo(fifo)
        self.ready = os.fdopen(os.open(fifo, os.O_RDWR), "r")
        start = time.monotonic()
        self.process = subprocess.Popen(
            [BIN / "conclave", "up", "--model", model, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
             "--ready-file", fifo, *flags],
            stdout=subprocess.DEVNULL)
        self.url = self.ready.readline().strip()
        self.start_seconds = time.monotonic() - start

    def generate(self, max_tokens):
        out = subprocess.run(
            [BIN / "conclave", "generate", "--url", self.url, "--prompt", PROMPT, "--max-tokens", str(max_tokens),
             "--temperature", "0", "--json"], capture_output=True, text=True, timeout=600, check=True)
        return json.loads(out.stdout)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)
        self.ready.close()


class RealGeometry(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="real-geometry-"))
        if shutil.disk_usage(cls.folder).free < NEEDED_BYTES:
            cls.folder.rmdir()
            raise unittest.SkipTest(f"needs {NEEDED_BYTES >> 30} GiB free under {tempfile.gettempdir()}")
        cls.model = cls.folder / "m2-3-layers"
        start = time.monotonic()
        subprocess.run([BIN / "conclave", "model", "make", "--geometry", "m2", "--layers", "3", "--dtype", "fp8",
                        "--seed", "1", "--out", cls.model], check=True, stdout=subprocess.DEVNULL)
        print(f"made in {time.monotonic() - start:.0f} s")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder, ignore_errors=True)

    def answer(self, *flags):
        cluster = Cluster(self.folder, self.model, *flags)
        try:
            first = cluster.generate(1)
            full = cluster.generate(24)
            print(f"\n{' '.join(flags)}: ready in {cluster.start_seconds:.1f} s; first answer's token after "
                  f"{first['first_token_ms']:.0f} ms; {full['prompt_tokens']} prompt and {full['completion_tokens']} "
                  f"tokens in {full['total_ms'] / 1000:.2f} s, first after {full['first_token_ms']:.0f} ms")
            for pid in [cluster.process.pid, *children(cluster.process.pid)]:
                name = pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
                anonymous, mapped = memory_mib(pid)
                print(f"  {name}: {anonymous} MiB anonymous, {mapped} MiB mapped")
            return full
        finally:
            cluster.stop()

    def test_processes_and_one_process_agree(self):
        separate = self.answer("--attention", "1", "--experts", "2")
        self.assertEqual(separate["completion_tokens"], 24)
        together = self.answer("--in-process", "--experts", "1")
        self.assertEqual(separate["text"], together["text"])


if __name__ == "__main__":
    unittest.main()
