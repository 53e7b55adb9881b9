"""Slurm's commands as a job calls them."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import subprocess
import time
from typing import NamedTuple

from fp8launch.injob.supervisor.job_scheduler import PAUSES
from fp8launch.injob.supervisor.log_lines import say

# Errors of Slurm's commands if the controller is down, starting or busy, or cannot take another job right now.
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


def will_pass(complaint: str) -> bool:
    """Return whether Slurm's error is temporary: the same request may be accepted a little later."""
    low = complaint.lower()
    return any(words in low for words in _PASSING)


class Answer(NamedTuple):
    """The output of a Slurm command, or None and its error message if it failed."""

    output: str | None
    complaint: str = ""


def slurm(*command: str, tries: int = len(PAUSES)) -> str | None:
    """Return the output of a Slurm command; None if it fails."""
    return ask(*command, tries=tries).output


def ask(*command: str, tries: int = len(PAUSES)) -> Answer:
    """Run a Slurm command. If the controller does not answer, retry for minutes: giving up would end the run."""
    # A job must not inherit the size, the binding or the name of the job that submits it.
    kept = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
    env = {k: v for k, v in os.environ.items() if k in kept or not k.startswith(("SLURM", "SBATCH", "PMI"))}
    env.update(LC_ALL="C", SLURM_TIME_FORMAT="standard")
    complaint = ""
    for pause in PAUSES[:tries]:
        time.sleep(pause)
        try:
            done = subprocess.run(command, capture_output=True, errors="replace", env=env, timeout=60, check=False)
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
