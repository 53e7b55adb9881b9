"""The half that submits jobs: `qsub`, `qstat` and `qdel` of one machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fp8launch.diagnostics import error
from fp8launch.job.job import Job
from fp8launch.job.script import (
    END_WATCH,
    argument_lines,
    attempt_places,
    begin_attempt,
    end_attempt,
    environment_lines,
    join_blocks,
    process_command,
    run_places,
    setup_lines,
    start_arguments,
    training_step,
    watch_attempt,
)
from fp8launch.job.shell_quoting import RawShell
from fp8launch.rundir.attempts import attempts_of
from fp8launch.rundir.registry import job_ids, newest_job
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Capabilities, JobState, Scheduler
from fp8launch.schedulers.environment import clean_environment


class PbsScheduler(Scheduler):
    """A submission's key is the job's name."""

    name = "pbs"
    capabilities = Capabilities(several_nodes=False, continue_by=("dependency",), poll_seconds=0.2)

    def script(self, job: Job) -> tuple[str, str]:
        return "job.pbs", pbs_script(job)

    def plan_for_supervisor(self, job: Job) -> dict[str, str]:
        return {"scheduler": "toy_pbs.injob.job:PbsJob"}

    def submit(self, job: Job, run: RunFolder, key: str) -> str:
        return pbs("qsub", "-N", key, str(run.script)).strip()

    def resume(self, run: RunFolder, key: str, exclude: Sequence[str] = ()) -> str:
        return pbs("qsub", "-N", key, str(run.script)).strip()

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        return {job["name"]: job["id"] for job in jobs().values() if job["name"] in keys}

    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        known = jobs()
        found = []
        for run in runs:
            state = _state(known.get(newest_job(run) or ""))
            waiting = known.get(attempts_of(run).waiting or "")
            if state.final and waiting is not None and waiting["state"] != "F":
                state = _state(waiting)
            found.append(state)
        return found

    def cancel(self, runs: Sequence[RunFolder]) -> None:
        known = jobs()
        for run in runs:
            for job in (attempts_of(run).waiting, *job_ids(run)):
                if job in known and known[job]["state"] != "F":
                    pbs("qdel", job)


def pbs_script(job: Job) -> str:
    """The script of a run on one node, where torchrun starts the ranks."""
    assert job.folder is not None
    need = job.resources
    options = [f"walltime={need.time_limit}", f"ncpus={need.cpus_per_task or 1}", f"mem={need.memory or '1gb'}"]
    head = ["#!/bin/bash", f"#PBS -N {job.name}", *(f"#PBS -l {option}" for option in options)]
    if need.queue:
        head.append(f"#PBS -q {need.queue}")
    # The in-job half finds the training by this variable.
    start = [RawShell('env "${environment[@]}" TOY_TRAINING="$job"')]
    step = training_step(
        [start, *process_command(replace(job, mode="torchrun"))],
        '>> "$attempt.log" 2>&1',
        END_WATCH if job.survival else [],
    )
    if job.survival:
        step = [watch_attempt(job), *step[:-1], end_attempt(job)]
    places = [*run_places(job, job.folder), *attempt_places("$PBS_JOBID", "PBS_RESTARTS")]
    blocks = [
        head, places, setup_lines(job), begin_attempt(job), environment_lines(job), argument_lines(job),
        start_arguments(job), step,
    ]  # fmt: skip
    return join_blocks(blocks)


def jobs() -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {job["id"]: job for job in json.loads(pbs("qstat"))}
    return known


def pbs(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)
    if done.returncode:
        raise error("pbs-refused", f"PBS did not accept the command: {done.stderr.strip()}", exit_code=3)
    return done.stdout


def _state(job: dict[str, Any] | None) -> JobState:
    if job is None:
        return JobState("unknown", "PBS does not know the job", source="qstat")
    if job["deleted"]:
        return JobState("cancelled", "deleted", job["exit"], "qstat")
    if job["state"] != "F":
        return JobState("running" if job["state"] == "R" else "pending", job["state"], source="qstat")
    return JobState("failed" if job["exit"] else "completed", f"exit status {job['exit']}", job["exit"], "qstat")
