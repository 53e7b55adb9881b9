"""A run on this machine, seen from inside: its processes, identified by environment variables that they inherit.

They are torchrun's process (`rank/node.py`) and the ranks below it. Each rank runs in its own session, and may
outlive torchrun.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from fp8launch.injob.supervisor import run_records
from fp8launch.injob.supervisor.job_scheduler import JobScheduler, Training

LOCAL_RUN = "FP8LAUNCH_LOCAL_RUN"  # the run folder, for the processes of a run on this machine
LOCAL_KEY = "FP8LAUNCH_SUBMISSION"  # the key of the submission, for the same processes
START = "FP8LAUNCH_START"  # counts the starts of a run's script, each of which has its own log
# What the script of a run passes to its own processes only.
_OF_THE_SCRIPT = (START, "FP8LAUNCH_STOP_AT", LOCAL_KEY, LOCAL_RUN)
LAUNCHER = b"/rank/node.py"
AGENT = "FP8LAUNCH_AGENT"  # rank/rank_watch.py: set below node.py
GRACE = 30.0  # seconds from SIGTERM to SIGKILL on this machine; Slurm's default KillWait


class LocalProcesses(Training):
    def __init__(self, run: str) -> None:
        """`run` is the value of LOCAL_RUN, the run's folder."""
        self.run = run

    @property
    def launchers(self) -> set[int]:
        """torchrun's process, without its wrappers (a container runtime, a script), whose command lines contain it,
        too."""
        found = set(filter(_runs_launcher, processes_with(LOCAL_RUN, self.run)))
        return found - set(map(run_records.parent_of, found))

    @property
    def all(self) -> set[int]:
        ranks = {pid for pid in processes_with(LOCAL_RUN, self.run) if _has_variable(pid, AGENT)}
        return self.launchers | ranks

    def ask_for_stacks(self) -> None:
        send(signal.SIGUSR1, self.launchers)  # it asks the ranks, and prints each answer

    def ask_to_save(self) -> bool:
        """Ask the ranks to save and exit."""
        send(signal.SIGTERM, self.launchers)
        return True

    def end(self, at_once: bool = False) -> bool:
        """Ask all processes to exit, and kill the remaining ones after the grace time; with `at_once`, immediately."""
        end_all(lambda: self.all, 0.0 if at_once else GRACE)
        return True


class LocalJob(JobScheduler):
    """A job without a scheduler: another attempt runs the script again (`continue_by: rerun`)."""

    def release(self, folder: Path, job: str | None) -> bool:
        """Start the script of a run that waits for this one, unless it has been started."""
        lock = os.open(str(folder / ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # `fp8launch resume` may start it as well
            if job is None and not any(processes_with(LOCAL_RUN, str(folder))):
                _start_waiting(folder)
        finally:
            os.close(lock)
        return True

    def training(self) -> LocalProcesses | None:
        processes = LocalProcesses(self.env[LOCAL_RUN])
        return processes if processes.launchers else None


def _start_waiting(folder: Path) -> None:
    """Start a run's first job, recorded in its manifest as `fp8launch submit` records jobs."""
    file = folder / run_records.MANIFEST
    manifest = run_records.read_json(file)
    if manifest["jobs"]:
        return
    submission = run_records.new_submission(f"{folder.name}.s0-{os.getpid()}")
    run_records.write_json(file, {**manifest, "submission": {**submission, "reported": True}})
    environment = {name: value for name, value in os.environ.items() if name not in _OF_THE_SCRIPT}
    pid = start_script(folder, folder / "job.sh", submission["key"], 0, environment)
    manifest["jobs"] = [{"id": f"{pid}:{run_records.start_of(pid)}", "submitted": run_records.now()}]
    manifest["submission"] = {**submission, "reported": True, "answered": True}
    run_records.write_json(file, manifest)


def start_script(folder: Path, script: Path, key: str, start: int, environment: Mapping[str, str]) -> int:
    """Start a run's script in its own process session, marked so that its processes can be found. Return its pid."""
    marks = {LOCAL_RUN: str(folder), LOCAL_KEY: key, START: str(start)}
    with (folder / "logs" / "local.out").open("ab") as out:
        process = subprocess.Popen(
            ["bash", str(script)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment, **marks},
        )
    return process.pid


def processes_with(name: str, value: str) -> Iterator[int]:
    """Yield the processes that inherited a variable. Zombies and other users' processes show no environment."""
    mark = f"{name}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        if mark in _words(folder / "environ"):
            yield int(folder.name)


def end_all(alive: Callable[[], set[int]], grace: float) -> None:
    """Ask the processes that `alive` returns to exit, and kill the remaining ones after `grace` seconds.

    A process shows no environment while it executes another program, so a single scan may miss some.
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
            send(number, left - signalled)  # once per process, including processes that an earlier scan missed
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
    except OSError:  # it has ended, or belongs to another user
        return []
