"""Messages to the user, Slurm's commands, the end of a log: what all parts of the supervisor use.

Standard library only, on any Python from 3.7: this runs on a compute node's own Python, outside the image.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

TAIL = 8 << 20
LOCAL_RUN = "FP8LAUNCH_LOCAL_RUN"  # set for the processes of a run on this machine
PAUSES = (0, 5, 10, 20, 40, 60, 120)  # seconds before each try
# What Slurm's commands say when the controller is away, starting or busy, or has no room for one more job just now.
_PASSING = (
    "did not answer",
    "contact slurm controller",
    "backup controller",
    "timed out",
    "temporarily unavailable",
    "temporarily unable",
    "communication connection failure",
    "zero bytes were transmitted",
)


def say(*words: str) -> None:
    with contextlib.suppress(OSError):  # a full disk
        print("fp8launch:", *words, file=sys.stderr, flush=True)


def tail(path: Path, start: int = 0) -> str:
    """Return the end of a file, at most `TAIL` bytes of what follows byte `start`; nothing of an unreadable file."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, 2) - TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def will_pass(complaint: str) -> bool:
    """Whether Slurm's words say nothing about the request: the same may be accepted a little later."""
    low = complaint.lower()
    return any(words in low for words in _PASSING)


class Answer(NamedTuple):
    """The output of a Slurm command, or None and its error message where it failed."""

    output: str | None
    complaint: str = ""


def slurm(*command: str, tries: int = len(PAUSES)) -> str | None:
    """Return what a Slurm command prints; None when it fails."""
    return ask(*command, tries=tries).output


def ask(*command: str, tries: int = len(PAUSES)) -> Answer:
    """Run a Slurm command. A controller that does not answer is asked for minutes: the run would end with it."""
    if LOCAL_RUN in os.environ:
        return Answer(None)  # a run on this machine has no job in Slurm, even where there is a Slurm
    # A job must not inherit the size, the binding or the name of the one that submits it.
    kept = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
    env = {k: v for k, v in os.environ.items() if k in kept or not k.startswith(("SLURM", "SBATCH", "PMI"))}
    env.update(LC_ALL="C", SLURM_TIME_FORMAT="standard")
    complaint = ""
    for pause in PAUSES[:tries]:
        time.sleep(pause)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=env,
                timeout=60, check=False,
            )  # fmt: skip
        except FileNotFoundError:
            complaint = "there is no such command on this node"
            say(f"{command[0]}: {complaint}")
            break
        except (OSError, subprocess.TimeoutExpired) as problem:
            complaint = f"did not answer: {problem}"
            say(f"{command[0]} {complaint}")
            continue
        if done.returncode == 0:
            return Answer(done.stdout)
        complaint = " ".join(done.stderr.split())
        say(f"{' '.join(command[:3])}: {complaint}")
        if not will_pass(complaint):
            break
    return Answer(None, complaint)
