"""Runs the tests of public clients against a server of our own.

usage: run_clients.py SERVER_PROGRAM VENV_DIR [CHECKPOINT]

Serves CHECKPOINT where there is one, else a little random one.

Makes the virtual environment when its requirements changed. Exits 77 (skipped) when the packages cannot be had.
"""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

import virtual_environment  # noqa: E402

SKIPPED = 77


def main():
    server_program, venv = sys.argv[1], pathlib.Path(sys.argv[2])
    python = virtual_environment.make(venv, HERE / "requirements.txt")
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
