"""The processes of a training as the hang watchdog reaches them: to ask for their stacks, and to end them.

In Slurm they are the steps that srun started. On a machine without Slurm they are torchrun's process (`rank/node.py`)
and the ranks below it, known by variables that they inherit: a rank has a session of its own, and may outlive torchrun.

Standard library only, on any Python from 3.7: this runs on a compute node's own Python, outside the image.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fp8launch.injob.supervisor.slurm_cli import LOCAL_RUN, slurm

LAUNCHER = b"/rank/node.py"
AGENT = "FP8LAUNCH_AGENT"  # rank/rank_watch.py: set below node.py
GRACE = 30.0  # seconds from SIGTERM to SIGKILL on this machine, as Slurm's KillWait by default


class SlurmSteps(NamedTuple):
    """Steps of a Slurm job, by their names."""

    names: tuple[str, ...]

    def ask_for_stacks(self) -> None:
        slurm("scancel", "--signal=USR1", *self.names)  # rank/signals.py answers it

    def end(self, at_once: bool = False) -> bool:
        """End the steps, without time to save if `at_once`. False where Slurm does not take the request."""
        options = ("--signal=KILL",) if at_once else ()
        return slurm("scancel", *options, *self.names) is not None


class LocalProcesses(NamedTuple):
    """The processes of a run on this machine, by its folder."""

    run: str

    @property
    def launchers(self) -> set[int]:
        """torchrun's process, without what wraps it (a container's program, a script) and so has the same words."""
        found = set(filter(_runs_launcher, processes_with(LOCAL_RUN, self.run)))
        return found - set(map(_parent, found))

    @property
    def all(self) -> set[int]:
        ranks = {pid for pid in processes_with(LOCAL_RUN, self.run) if _has_variable(pid, AGENT)}
        return self.launchers | ranks

    def ask_for_stacks(self) -> None:
        send(signal.SIGUSR1, self.launchers)  # asks the ranks, and prints what each answers

    def end(self, at_once: bool = False) -> bool:
        """Ask all processes to leave, and kill those that are still there after the grace time: none if `at_once`."""
        end_all(lambda: self.all, 0.0 if at_once else GRACE)
        return True


def training_step(job: str, env: Mapping[str, str]) -> SlurmSteps | LocalProcesses | None:
    """The step in which the training runs; None where there is none."""
    if LOCAL_RUN in env:
        processes = LocalProcesses(env[LOCAL_RUN])
        return processes if processes.launchers else None
    answer = slurm("squeue", "-h", "-s", "-j", job, "-o", "%i") or ""
    # Without the steps of Slurm's own, such as the batch script.
    names = tuple(step for step in answer.split() if step.split(".")[-1].isdigit())
    return SlurmSteps(names) if names else None


def processes_with(name: str, value: str) -> Iterator[int]:
    """Yield the processes that inherited a variable. Those of other users, and zombies, show no environment."""
    mark = f"{name}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        if mark in _words(folder / "environ"):
            yield int(folder.name)


def end_all(alive: Callable[[], set[int]], grace: float) -> None:
    """Ask the processes that `alive` returns to leave, and kill those that are still there after `grace` seconds.

    A process shows no environment while it is being replaced by another program, so one look does not see them all.
    """
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        signalled: set[int] = set()
        seen_none = False
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            left = alive()
            if seen_none and not left:
                return
            seen_none = not left
            send(number, left - signalled)  # each process once, also one that was just being started
            signalled |= left
            time.sleep(0.1)


def send(number: int, processes: Iterable[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _has_variable(pid: int, name: str) -> bool:
    start = f"{name}=".encode()
    return any(word.startswith(start) for word in _words(Path(f"/proc/{pid}/environ")))


def _runs_launcher(pid: int) -> bool:
    return any(word.endswith(LAUNCHER) for word in _words(Path(f"/proc/{pid}/cmdline")))


def _words(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to somebody else
        return []


def _parent(pid: int) -> int:
    try:
        # The command's name, in parentheses, may hold anything; after it come the state and the parent.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0
