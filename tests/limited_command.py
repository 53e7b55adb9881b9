"""Commands with little memory and time, and files that would need a lot of both if they were read as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# A command needs 0.4 GiB of address space and two seconds. What is read without a limit needs more.
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
resource.setrlimit(resource.RLIMIT_CPU, (25, 25))
from fp8launch.cli import run
sys.exit(run(sys.argv[1:]))
"""


def command(home: Path, *words: object) -> tuple[int, str]:
    """Exit code and output of a command with 1.5 GiB of memory and 25 s of processor time."""
    environment = {**os.environ, "FP8LAUNCH_RUNS": str(home / "runs"), "SLURM_CONF": "/nonexistent/slurm.conf"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, words)],
        env=environment,
        cwd=home,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert "a bug in" not in said and "Traceback" not in said, said
    return done.returncode, said


def sparse(file: Path, size: int = 6 << 30) -> None:
    with file.open("wb") as stream:
        stream.truncate(size)


def spoil(file: Path, kind: str) -> None:
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        sparse(file)


WRONG = {"pipe": "it is not a regular file", "device": "it is not a regular file", "sparse": "it is larger than"}
