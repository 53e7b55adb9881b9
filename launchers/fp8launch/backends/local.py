"""This machine: the same processes under torchrun, in a session of their own so that they outlive the shell.

torchrun gives each rank a session of its own too, and a rank outlives a torchrun that is killed. So a run's processes
are known by a variable that all of them inherit, not by their group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8launch.backends.base import JobState
from fp8launch.backends.slurm import clean_environment
from fp8launch.job.job import Job
from fp8launch.job.script import local_script
from fp8launch.problems import error
from fp8launch.runs.disk import start_of
from fp8launch.runs.folder import RunFolder

GRACE_SECONDS = 20.0
MARK = "FP8LAUNCH_LOCAL_RUN"


class LocalBackend:
    """A job id is `pid:start`, the start time being the kernel's, so that a recycled pid is never taken for the run."""

    name = "local"

    def script(self, job: Job) -> tuple[str, str]:
        return "job.sh", local_script(job)

    def submit(self, job: Job, run: RunFolder) -> str:
        if job.nodes > 1:
            raise error(
                "local-is-one-node",
                f"the local backend is one machine, and the recipe asks for {job.nodes} nodes",
                "resources.nodes",
                "use --nodes 1, or a Slurm backend",
            )
        with (run.path / "logs" / "local.out").open("ab") as out:
            process = subprocess.Popen(
                ["bash", str(run.script)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**clean_environment(), MARK: str(run.path)},
            )
        return f"{process.pid}:{start_of(process.pid)}"

    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        return [_state(run) for run in runs]

    def cancel(self, run: RunFolder) -> None:
        if not _alive(run):
            return
        run.update(cancelled=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        for sig, wait in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 5.0)):
            told: set[int] = set()
            end = time.monotonic() + wait
            while time.monotonic() < end:
                alive = set(_alive(run))
                if not alive:
                    return
                # Each process once, those too that were just being started.
                for pid in alive - told:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sig)
                told |= alive
                time.sleep(0.1)


def started_here(run: RunFolder) -> str | None:
    """The job id of a run whose launcher was killed before it wrote it down; None for one that was not started."""
    alive = sorted(_marked(run), key=lambda pid: (int(start_of(pid) or 0), pid))
    if alive:
        return f"{alive[0]}:{start_of(alive[0])}"
    return "0:" if run.attempts() else None  # it has ended, and its log tells how


def _state(run: RunFolder) -> JobState:
    if _alive(run):
        return JobState("running", "on this machine", source="process table")
    manifest = run.manifest()
    if not manifest.get("jobs"):
        return JobState("unknown", "was never started", source="run folder")
    if manifest.get("host") not in (None, os.uname().nodename):
        return JobState("unknown", f"runs on {manifest['host']}; ask there", source="run folder")
    if manifest.get("cancelled"):
        return JobState("cancelled", "by fp8launch cancel", source="run folder")
    attempts = run.attempts()
    status = attempts[-1].exit_status if attempts else None
    if status is None:
        how = "ended without an exit status (killed, or the machine went down)"
        return JobState("failed", how, source="run folder")
    return JobState("completed" if status == 0 else "failed", f"exit status {status}", status, "run folder")


def _alive(run: RunFolder) -> list[int]:
    """The processes of the run on this machine: its script, and whatever that started and has not ended."""
    manifest = run.manifest()
    if not manifest.get("jobs") or manifest.get("host") not in (None, os.uname().nodename):
        return []
    pid, _, started = str(manifest["jobs"][-1]["id"]).partition(":")
    script = [int(pid)] if started and start_of(int(pid)) == started else []
    return list(dict.fromkeys([*script, *_marked(run)]))


def _marked(run: RunFolder) -> Iterator[int]:
    """The processes that inherited the run's mark. Those of other users, and zombies, show no environment."""
    mark = f"{MARK}={run.path}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in file.read_bytes().split(b"\0"):
                yield int(file.parent.name)
