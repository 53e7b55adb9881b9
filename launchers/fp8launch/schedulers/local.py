"""Runs on this machine: torchrun starts the processes in a new session, which outlives the shell.

torchrun also gives each rank its own session, and ranks outlive a torchrun that is killed. So a run's processes are
identified by a variable that all of them inherit, not by their process group.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fp8launch.diagnostics import Problem, error
from fp8launch.injob.local_job import LOCAL_KEY, LOCAL_RUN, START, end_all, processes_with, start_script
from fp8launch.injob.supervisor.run_records import start_of
from fp8launch.job.job import Job
from fp8launch.job.script import (
    AUTHOR,
    END_WATCH,
    WITH_ENVIRONMENT,
    argument_lines,
    attempt_places,
    begin_attempt,
    container_environment,
    environment_lines,
    health_lines,
    join_blocks,
    process_command,
    run_places,
    setup_lines,
    start_arguments,
    start_in_container,
    supervisor,
    training_step,
    watch_attempt,
)
from fp8launch.job.shell_quoting import Word
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Capabilities, JobState, Scheduler, Submission, ended_with
from fp8launch.schedulers.environment import clean_environment
from fp8launch.wording import counted

GRACE_SECONDS = 20.0


# Devices of NVIDIA's driver, on Linux and in WSL.
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")


class LocalScheduler(Scheduler):
    """A job id is `pid:start`, with the kernel's start time, so that a recycled pid is never mistaken for the run."""

    name = "local"
    capabilities = Capabilities(
        several_nodes=False,
        one_run_at_a_time=True,
        on_this_machine=True,
        continue_by=("rerun",),
        time_limits=False,
        poll_seconds=0.5,
    )

    def lacks(self, gpu: str) -> Problem | None:
        if gpu == "cpu" or shutil.which("nvidia-smi") or any(map(os.path.exists, _GPU_DEVICES)):
            return None
        message = f"the recipe needs {gpu} GPUs, and this machine has no GPU"
        fix = "submit to a cluster (`--cluster`, or log in to one), or try a recipe for CPUs: tiny_cpu"
        return Problem("warning", "no-gpu", message, "resources.gpu", fix)

    def script(self, job: Job) -> tuple[str, str]:
        return "job.sh", local_script(job)

    def plan_for_supervisor(self, job: Job) -> dict[str, str]:
        return {"scheduler": "fp8launch.injob.local_job:LocalJob"}

    def submit(self, job: Job, run: RunFolder, key: str) -> str:
        return _start(run, key)

    def resume(self, run: RunFolder, key: str, exclude: Sequence[str] = ()) -> str:
        return _start(run, key)

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        """Find processes by their key, as long as they run."""
        processes = {key: _oldest_first(processes_with(LOCAL_KEY, key)) for key in keys}
        return {key: _job_id(pids[0]) for key, pids in processes.items() if pids}

    def recover(self, submissions: Sequence[Submission]) -> dict[RunFolder, str]:
        jobs = {one.run: _started_here(one.run) for one in submissions}
        return {run: job for run, job in jobs.items() if job is not None}

    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        return [_state(run) for run in runs]

    def cancel(self, runs: Sequence[RunFolder]) -> None:
        for run in runs:
            host = run.manifest().get("host")
            if host not in (None, os.uname().nodename):
                message = f"{run.run_id} runs on {host}, and can be ended only from there"
                raise error("another-machine", message, str(run.path), f"run the same command on {host}", 3)
            _end(run)


_REPORT_KILL = (
    "# A killed launcher leaves no line in the log, and its ranks end within a second (rank/rank_watch.py).",
    'if [ "$status" = 137 ]; then',
    "    sleep 2",
    '    echo "fp8launch: killed: exit status 137 (SIGKILL)" >> "$attempt.log" || true',
    "fi",
)


def local_script(job: Job) -> str:
    """Return the script of a run on this machine, where torchrun starts the processes."""
    assert job.folder is not None, "a run on this machine has a run folder"
    start: list[Word] = [WITH_ENVIRONMENT]
    if "=" in job.python:
        # `env` would take the program for another variable.
        start += ["nice", "-n", "0"]
    command = [start, *start_in_container(job), *process_command(replace(job, mode="torchrun"))]
    redirect = '>> "$attempt.log" 2>&1'
    step = training_step(command, redirect, _REPORT_KILL)
    variables = []
    if job.survival is not None:
        step = _supervised(job, training_step(command, redirect, [*END_WATCH, *_REPORT_KILL]))
        variables.append("FP8LAUNCH_STOP_AT")
    # The script is not started by Slurm, but it may be started by hand within a job.
    job_id = "${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-local}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
    return join_blocks(
        [
            ["#!/bin/bash", f"# {job.name}: {counted(job.processes_per_node, 'process')}. {AUTHOR}"],
            [*run_places(job, job.folder), *attempt_places(job_id, START)],
            setup_lines(job),
            begin_attempt(job),
            environment_lines(job),
            container_environment(job, *variables),
            health_lines(replace(job, survival=None)),
            argument_lines(job),
            start_arguments(job),
            step,
        ]
    )


def _supervised(job: Job, step: list[str]) -> list[str]:
    """Return a step with its supervisor. For another attempt this script runs itself again, in the same process."""
    return [
        "# End the training if its log stops growing, and remove old checkpoints once newer ones are complete.",
        watch_attempt(job),
        *step[:-1],
        "# Decide what happens next: nothing, another attempt, or a stop.",
        f'again=$({supervisor(job)} end "$run_folder" "$attempt" "$status") || exit',
        '[ -n "$again" ] || exit "$status"',
        "export FP8LAUNCH_START=$((${FP8LAUNCH_START:-0} + 1))",
        'exec bash "$0"',
    ]


def _start(run: RunFolder, key: str) -> str:
    # Each start writes its own log; the script counts on when it runs itself again.
    start = 1 + max((attempt.restart for attempt in run.attempts()), default=-1)
    return _job_id(start_script(run.path, run.script, key, start, clean_environment()))


def _end(run: RunFolder) -> None:
    """End every process of a run: ask them to exit, and kill the remaining ones after the grace time."""
    # A manifest may list any process id. Processes of this run inherited its mark.
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
    manifest = run.manifest()
    if not manifest.get("jobs"):
        return JobState("unknown", "was never started", source="run folder")
    if manifest.get("host") not in (None, os.uname().nodename):
        return JobState("unknown", f"runs on {manifest['host']}; run the command there", source="run folder")
    # The run's script, or any process that it started.
    pid, _, started = str(manifest["jobs"][-1]["id"]).partition(":")
    if (started and start_of(int(pid)) == started) or any(processes_with(LOCAL_RUN, str(run.path))):
        return JobState("running", "on this machine", source="process table")
    if manifest.get("cancelled"):
        return JobState("cancelled", "by fp8launch cancel", source="run folder")
    attempts = run.attempts()
    if not attempts or attempts[-1].exit_status is None:
        how = "ended without an exit status (killed, or the machine went down)"
        return JobState("failed", how, source="run folder")
    return ended_with(attempts[-1].exit_status)
