"""The rendered script, submitted by itself."""

from __future__ import annotations

from collections.abc import Sequence

from fp8launch.backends import slurm
from fp8launch.backends.base import JobState
from fp8launch.job.job import Job
from fp8launch.job.script import batch_script
from fp8launch.runs.folder import RunFolder


class SbatchBackend:
    name = "sbatch"

    def script(self, job: Job) -> tuple[str, str]:
        return "job.sbatch", batch_script(job)

    def submit(self, job: Job, run: RunFolder) -> str:
        return slurm.sbatch(run.script, slurm.key_of(job, run))

    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        return slurm.states(runs)

    def cancel(self, run: RunFolder) -> None:
        slurm.cancel_run(run)
