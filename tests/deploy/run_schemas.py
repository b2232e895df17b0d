"""Runs schema_test.py in a virtual environment.

usage: run_schemas.py VENV_DIR

Exits 77 (skipped) when the packages cannot be had.
"""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

import virtual_environment  # noqa: E402


def main():
    python = virtual_environment.make(pathlib.Path(sys.argv[1]), HERE / "requirements.txt")
    if python is None:
        return 77
    return subprocess.run([str(python), "-m", "unittest", "-v", "schema_test"], cwd=HERE, timeout=250,
                          env=dict(os.environ, PYTHONDONTWRITEBYTECODE="1")).returncode


if __name__ == "__main__":
    sys.exit(main())
