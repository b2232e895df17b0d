"""Runs the tests of public clients against a server of our own.

usage: run_clients.py SERVER_PROGRAM VENV_DIR [CHECKPOINT]

Serves CHECKPOINT where there is one, else a little random one.

Makes the virtual environment when its requirements changed. Exits 77 (skipped) when the packages cannot be had.
"""

import hashlib
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
SKIPPED = 77


def make_venv(venv):
    """The environment's python, or None and a line that says why not."""
    requirements = HERE / "requirements.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = venv / "requirements.sha256"
    python = venv / "bin" / "python"
    if python.exists() and stamp.exists() and stamp.read_text() == digest:
        return python
    steps = [
        ["/usr/bin/python3", "-m", "venv", "--clear", str(venv)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, timeout=400)
        if done.returncode != 0:
            lines = (done.stderr + done.stdout).strip().splitlines()
            print("SKIPPED: the clients' packages cannot be installed:", lines[-1] if lines else step, flush=True)
            return None
    stamp.write_text(digest)
    return python


def main():
    server_program, venv = sys.argv[1], pathlib.Path(sys.argv[2])
    try:
        python = make_venv(venv)
    except subprocess.TimeoutExpired:
        print("SKIPPED: installing the clients' packages took too long", flush=True)
        python = None
    if python is None:
        return SKIPPED
    checkpoint = sys.argv[3:4] if len(sys.argv) > 3 and pathlib.Path(sys.argv[3], "config.json").exists() else []
    server = subprocess.Popen([server_program, *checkpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        if not line:
            print("the server did not start")
            return 1
        environment = dict(os.environ, CONCLAVE_SERVERS=line, PYTHONDONTWRITEBYTECODE="1")
        tests = subprocess.run(
            [str(python), "-m", "unittest", "discover", "-v", "-s", str(HERE), "-p", "*_test.py"],
            env=environment, timeout=300)
        if tests.returncode != 0:
            return 1
        server.stdin.close()
        ended = server.wait(timeout=30)
        if ended != 0:
            print(f"the server ended with {ended}")
        return 1 if ended != 0 else 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
