"""Virtual environments of tests that need packages from PyPI."""

import hashlib
import subprocess


def make(venv, requirements):
    """Makes `venv` with the packages of the file `requirements`, unless it has them. Returns the environment's python,
    or None after a line that says why not."""
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = venv / "requirements.sha256"
    python = venv / "bin" / "python"
    if python.exists() and stamp.exists() and stamp.read_text() == digest:
        return python
    steps = [
        ["/usr/bin/python3", "-m", "venv", "--clear", str(venv)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)],
    ]
    try:
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, timeout=400)
            if done.returncode != 0:
                lines = (done.stderr + done.stdout).strip().splitlines()
                print("SKIPPED: the packages cannot be installed:", lines[-1] if lines else step, flush=True)
                return None
    except subprocess.TimeoutExpired:
        print("SKIPPED: installing the packages took too long", flush=True)
        return None
    stamp.write_text(digest)
    return python
