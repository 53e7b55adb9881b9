"""Submitit as a thin wrapper on the batch host: its job runs the same script, which starts our own srun step.

Submitit's Python never enters the image, its `srun` is off, its USR2 (which would kill the training) is replaced by a
signal that does nothing, and the script's exit status is the job's.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fp8launch.backends import slurm
from fp8launch.backends.base import JobState
from fp8launch.job.job import Job
from fp8launch.job.script import batch_script
from fp8launch.problems import error
from fp8launch.runs.folder import RunFolder


class RunScript:
    """What submitit pickles: runs a script and ends with its exit status."""

    def __init__(self, script: str) -> None:
        self.script = script

    def __call__(self) -> None:
        status = subprocess.run(["bash", self.script], check=False).returncode
        if status:
            # SystemExit passes submitit's own handling of errors, which would make every failure a 1.
            raise SystemExit(status if status > 0 else 128 - status)


def finish_submission(folder: Path, job: str) -> None:
    """Give the job its pickle, where the launcher was killed after sbatch and before submitit named it by the job's id.

    Without it the job waits for a minute and fails.
    """
    wanted = folder / f"{job}_submitted.pkl"
    unnamed = [file for file in folder.glob("*.pkl") if re.fullmatch(r"[0-9a-f]{32}", file.stem)]
    if len(unnamed) == 1 and not wanted.exists():
        unnamed[0].rename(wanted)


class SubmititBackend:
    name = "submitit"

    def script(self, job: Job) -> tuple[str, str]:
        return "job.sbatch", batch_script(job)

    def submit(self, job: Job, run: RunFolder) -> str:
        from submitit.core.utils import FailedJobError

        executor = _executor(job, run.path / "submitit")
        try:
            with environment_of_a_shell():
                submitted = executor.submit(RunScript(str(run.script)))
        except FailedJobError as exc:
            raise slurm.refused(str(exc).rsplit("->", 1)[-1], run.script) from None
        return str(submitted.job_id)

    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        return slurm.states(runs)

    def cancel(self, run: RunFolder) -> None:
        slurm.cancel_run(run)


def _executor(job: Job, folder: Path) -> Any:
    """Submitit's executor for a job; making it raises UserError where there is no Slurm."""
    from submitit import SlurmExecutor

    try:
        executor = SlurmExecutor(folder=folder, python=shlex.quote(sys.executable))
    except RuntimeError:
        raise error("no-slurm", "submitit finds no srun on this machine", "--backend submitit", exit_code=3) from None
    # wckey=None: sites that enforce workload keys refuse submitit's own.
    executor.update_parameters(
        use_srun=False, stderr_to_stdout=True, wckey=None, additional_parameters=_parameters(job)
    )
    return executor


def _parameters(job: Job) -> dict[str, object]:
    """sbatch's options in submitit's form, which writes each into its own script."""
    options: dict[str, object] = {name: True if value is None else value for name, value in job.slurm}
    # Under the name with a dash it would stand beside submitit's own, and the last one counts.
    options["job_name"] = options.pop("job-name", job.name)
    # Submitit always asks for a signal before the end, and without B: it would reach every rank. CONT does nothing.
    return {**options, "signal": "B:CONT@1"}


@contextlib.contextmanager
def environment_of_a_shell() -> Iterator[None]:
    """Submitit calls sbatch with this process's environment: leave out what belongs to a surrounding job."""
    before = dict(os.environ)
    clean = slurm.clean_environment()
    for name in set(before) - set(clean):
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
