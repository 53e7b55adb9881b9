"""The rendered script, submitted by sbatch: a single run, or a group of runs as one job array."""

from __future__ import annotations

from pathlib import Path

from fp8launch.job.batch_script import array_script
from fp8launch.job.job import Job
from fp8launch.rundir.run_dir import RunFolder, write_atomically
from fp8launch.schedulers.base import Capabilities
from fp8launch.schedulers.slurm import sbatch_calls
from fp8launch.schedulers.slurm.arrays import Group, array_options, write_tasks
from fp8launch.schedulers.slurm.slurm_scheduler import SlurmScheduler


class SbatchScheduler(SlurmScheduler):
    name = "sbatch"
    capabilities = Capabilities(arrays=True, pyxis=True, continue_by=("requeue", "dependency"))

    def submit(self, job: Job, run: RunFolder, key: str) -> str:
        return sbatch_calls.sbatch(run.script, key, comment=dict(job.slurm).get("comment"))

    def submit_array(self, group: Group, key: str, folder: Path, max_running: int | None = None) -> list[str]:
        tasks_of_array = f"0-{len(group) - 1}"
        if max_running:
            tasks_of_array += f"%{max_running}"
        options = {**array_options(group, key, folder), "array": tasks_of_array}
        tasks = write_tasks(group, key, folder)
        script = folder / "arrays" / f"{key}.sbatch"
        write_atomically(script, array_script(tuple(options.items()), str(tasks)))
        job = sbatch_calls.sbatch(script, key, comment=options["comment"])
        return [f"{job}_{index}" for index in range(len(group))]
