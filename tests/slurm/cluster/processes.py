"""Processes by identity: a pid alone may have been recycled, a pid with its start time may not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    pid: int
    start: int  # clock ticks after boot, field 22 of /proc/PID/stat

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """None if there is no such process, or it is dead and only waits for its parent (a zombie)."""
        fields = _stat(pid)
        return cls(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None

    @property
    def alive(self) -> bool:
        return Process.of(self.pid) == self


def until(condition: Callable[[], object], seconds: float, every: float = 0.02) -> bool:
    """Waits until ``condition`` holds; False if it still does not after ``seconds``.

    A condition that starts commands is asked less often, or it would take the processor from what it waits for.
    """
    end = time.monotonic() + seconds
    while True:
        begin = time.monotonic()
        if condition():
            return True
        now = time.monotonic()
        if now > end:
            return False
        time.sleep(max(every, min(4 * (now - begin), 2)))


def kill(processes: Iterable[Process]) -> None:
    """KILL to all at once, then waits until they are gone."""
    victims = [process for process in processes if process.alive]
    for process in victims:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    until(lambda: not any(process.alive for process in victims), 5)


def spawn(argv: Sequence[str], log: Path, env: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes]:
    """Starts a daemon in the foreground, in a session of its own: Ctrl-C in a terminal does not reach it."""
    with log.open("ab") as out:
        return subprocess.Popen(argv, stdin=stdin, stdout=out, stderr=out, env=env, start_new_session=True, cwd="/")


def writing_to(logs: Callable[[Path], bool]) -> list[Process]:
    """Processes that hold one of these files open for writing, and their descendants; never this one's own line.

    That is how to find what a daemon left behind: slurmstepd overwrites its environment with its title and runs on
    when slurmd is killed, but it keeps writing to slurmd's log.
    """
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    parents = {pid: int(fields[1]) for pid in pids if (fields := _stat(pid))}
    writers = {pid for pid in parents if any(map(logs, _written(pid)))}
    own = set(_line(os.getpid(), parents))
    found = [Process.of(pid) for pid in parents if pid not in own and writers.intersection(_line(pid, parents))]
    return [process for process in found if process]


def _line(pid: int, parents: Mapping[int, int]) -> list[int]:
    """A process, its parent, and so on up to process 1."""
    line = []
    while pid:
        line.append(pid)
        pid = parents.get(pid, 0)
    return line


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from field 3 (the state) on: field 2 is the name, in brackets, and may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _written(pid: int) -> list[Path]:
    """Files that a process of ours holds open for writing."""
    found = []
    with suppress(OSError):  # somebody else's, or just gone
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = entry.readlink()
            flags = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text().partition("flags:")[2].split()[0]
            if target.is_absolute() and int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                found.append(target)
    return found
