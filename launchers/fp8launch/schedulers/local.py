"""This machine: the same processes under torchrun, in a session of their own so that they outlive the shell.

torchrun gives each rank a session of its own too, and a rank outlives a torchrun that is killed. So a run's processes
are known by a variable that all of them inherit, not by their group.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Sequence

from fp8launch.diagnostics import error
from fp8launch.injob.supervisor.slurm_cli import LOCAL_RUN
from fp8launch.injob.supervisor.training_step import end_all, processes_with
from fp8launch.job.batch_script import local_script
from fp8launch.job.job import Job
from fp8launch.rundir.atomic_io import start_of
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Capabilities, JobState, Scheduler, Submission, ended_with
from fp8launch.schedulers.environment import LOCAL_KEY, clean_environment

GRACE_SECONDS = 20.0


class LocalScheduler(Scheduler):
    """A job id is `pid:start`, the start time being the kernel's, so that a recycled pid is never taken for the run."""

    name = "local"
    capabilities = Capabilities(
        several_nodes=False,
        one_run_at_a_time=True,
        on_this_machine=True,
        continue_by=("rerun",),
        time_limits=False,
        poll_seconds=0.5,
    )

    def script(self, job: Job) -> tuple[str, str]:
        return "job.sh", local_script(job)

    def submit(self, job: Job, run: RunFolder, key: str) -> str:
        return _start(run, key)

    def resume(self, run: RunFolder, key: str, exclude: Sequence[str] = ()) -> str:
        return _start(run, key)

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        """Only the processes that still run can be found by their key."""
        found = {}
        for key in keys:
            processes = _oldest_first(processes_with(LOCAL_KEY, key))
            if processes:
                found[key] = _job_id(processes[0])
        return found

    def recover(self, submissions: Sequence[Submission]) -> dict[RunFolder, str]:
        found = {}
        for one in submissions:
            job = _started_here(one.run)
            if job is not None:
                found[one.run] = job
        return found

    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        return list(map(_state, runs))

    def cancel(self, runs: Sequence[RunFolder]) -> None:
        for run in runs:
            host = run.manifest().get("host")
            if host not in (None, os.uname().nodename):
                message = f"{run.run_id} runs on {host}, and can be ended only from there"
                raise error("another-machine", message, str(run.path), f"run the same command on {host}", 3)
            _end(run)


def _start(run: RunFolder, key: str) -> str:
    # Each start has a log of its own; the script counts on when it runs itself again.
    start = 1 + max((attempt.restart for attempt in run.attempts()), default=-1)
    marks = {LOCAL_RUN: str(run.path), LOCAL_KEY: key, "FP8LAUNCH_START": str(start)}
    with (run.path / "logs" / "local.out").open("ab") as out:
        process = subprocess.Popen(
            ["bash", str(run.script)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**clean_environment(), **marks},
        )
    return _job_id(process.pid)


def _end(run: RunFolder) -> None:
    """End every process of a run: ask them to leave, and kill those that still live after the grace time."""
    # A manifest may list any process; those of this run inherited its mark.
    if not any(processes_with(LOCAL_RUN, str(run.path))):
        return
    run.update(cancelled=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    end_all(lambda: set(processes_with(LOCAL_RUN, str(run.path))), GRACE_SECONDS)


def _started_here(run: RunFolder) -> str | None:
    """Return the job id of a run whose launcher was killed before it recorded it; None for one that was not started."""
    alive = _oldest_first(processes_with(LOCAL_RUN, str(run.path)))
    if alive:
        return _job_id(alive[0])
    if run.attempts():
        return "0:"  # it has ended, and its log shows how
    return None


def _job_id(pid: int) -> str:
    return f"{pid}:{start_of(pid)}"


def _oldest_first(pids: Iterable[int]) -> list[int]:
    return sorted(pids, key=lambda pid: (int(start_of(pid) or 0), pid))


def _state(run: RunFolder) -> JobState:
    if _alive(run):
        return JobState("running", "on this machine", source="process table")
    manifest = run.manifest()
    if not manifest.get("jobs"):
        return JobState("unknown", "was never started", source="run folder")
    if manifest.get("host") not in (None, os.uname().nodename):
        return JobState("unknown", f"runs on {manifest['host']}; run the command there", source="run folder")
    if manifest.get("cancelled"):
        return JobState("cancelled", "by fp8launch cancel", source="run folder")
    attempts = run.attempts()
    if not attempts or attempts[-1].exit_status is None:
        how = "ended without an exit status (killed, or the machine went down)"
        return JobState("failed", how, source="run folder")
    return ended_with(attempts[-1].exit_status)


def _alive(run: RunFolder) -> list[int]:
    """Return the processes of the run on this machine: its script, and whatever that started and has not ended."""
    manifest = run.manifest()
    if not manifest.get("jobs") or manifest.get("host") not in (None, os.uname().nodename):
        return []
    found = list(processes_with(LOCAL_RUN, str(run.path)))
    pid, _, started = str(manifest["jobs"][-1]["id"]).partition(":")
    if started and start_of(int(pid)) == started:
        found = [int(pid), *found]
    return list(dict.fromkeys(found))
