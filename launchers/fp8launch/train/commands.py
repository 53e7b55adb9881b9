"""What runs on the batch host shares: words to the user, Slurm's commands, the end of a log.

Standard library only, on any Python from 3.7: this runs on a compute node's own Python, outside the image.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

TAIL = 8 << 20
PAUSES = (0, 5, 10, 20, 40, 60, 120)  # seconds before each try


def say(*words: str) -> None:
    with contextlib.suppress(OSError):  # a full disk
        print("fp8launch:", *words, file=sys.stderr, flush=True)


def tail(path: Path, start: int = 0) -> str:
    """The end of a file, at most `TAIL` bytes of what follows byte `start`; nothing of one that cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, 2) - TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def slurm(*command: str, tries: int = len(PAUSES)) -> str | None:
    """What a Slurm command prints; None when it fails. A controller that does not answer is asked for minutes: the run
    would end with it."""
    # A job must not inherit the size, the binding or the name of the one that submits it.
    kept = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
    env = {k: v for k, v in os.environ.items() if k in kept or not k.startswith(("SLURM", "SBATCH", "PMI"))}
    env.update(LC_ALL="C", SLURM_TIME_FORMAT="standard")
    for pause in PAUSES[:tries]:
        time.sleep(pause)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=env,
                timeout=60, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as problem:
            say(f"{command[0]}: {problem}")
            continue
        if done.returncode == 0:
            return done.stdout
        say(f"{' '.join(command[:3])}: {' '.join(done.stderr.split())}")
        if "ontroller" not in done.stderr and "ocket" not in done.stderr:
            break
    return None
