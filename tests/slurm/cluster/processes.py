"""Processes by identity: a pid alone may have been recycled, a pid with its start time may not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MARK = "FP8LAUNCH_TEST_CLUSTER"  # in the environment of all that a cluster starts; its value is the root folder


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

    def ends(self, seconds: float) -> bool:
        """Waits for its end; False if it still lives after ``seconds``."""
        return until(lambda: not self.alive, seconds)

    def kill(self) -> None:
        """KILL, and waits for the end."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.ends(5)


def until(condition: Callable[[], bool], seconds: float, every: float = 0.02) -> bool:
    """Waits until ``condition`` holds; False if it still does not after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(every)
    return True


def spawn(
    argv: Sequence[str], log: Path, root: Path, env: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Starts a daemon in the foreground, in a session of its own (Ctrl-C in a terminal does not reach it)."""
    with log.open("ab") as out:
        return subprocess.Popen(
            argv, stdin=stdin, stdout=out, stderr=out, env={**env, MARK: str(root)}, start_new_session=True, cwd="/"
        )


def belonging_to(root: Path) -> list[Process]:
    """Everything that a cluster's daemons started, user jobs included, except this process and its ancestors.

    A job's own processes do not carry the mark (their environment is the submitter's), but descend from one that does.
    """
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    parents = {pid: int(fields[1]) for pid in pids if (fields := _stat(pid))}
    marked = {pid for pid in parents if _environment(pid).get(MARK) == str(root)}
    own, pid = {os.getpid()}, os.getpid()
    while pid := parents.get(pid, 0):
        own.add(pid)

    def ours(pid: int) -> bool:
        while pid:
            if pid in marked:
                return True
            pid = parents.get(pid, 0)
        return False

    return [found for pid in parents if pid not in own and ours(pid) and (found := Process.of(pid))]


def children(pid: int) -> list[Process]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [child for name in text.split() if (child := Process.of(int(name)))]


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from field 3 (the state) on: field 2 is the name, in brackets, and may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs}
