"""Job arrays: which runs may share one, and the files that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8launch.job.job import Job
from fp8launch.job.job_comment import job_comment, text_in
from fp8launch.rundir.run_dir import RunFolder, write_atomically
from fp8launch.schedulers.slurm import slurm_cli

# The options that each run has for itself; all others must be the same for the tasks of an array.
_OF_ONE_TASK = ("job-name", "output", "comment")
Group = Sequence[tuple[RunFolder, Job]]


def groups_alike(jobs: Sequence[Job]) -> list[list[int]]:
    """Divide jobs, by their positions, into arrays: alike in what they ask Slurm for, as large as the site allows."""
    alike: dict[tuple[tuple[str, str | None], ...], list[int]] = {}
    for position, job in enumerate(jobs):
        alike.setdefault(_common_options(job), []).append(position)
    if len(alike) == len(jobs):
        return list(alike.values())
    limit = slurm_cli.array_limit()
    groups = []
    for positions in alike.values():
        for start in range(0, len(positions), limit):
            groups.append(positions[start : start + limit])
    return groups


def array_options(group: Group, key: str, folder: Path) -> dict[str, str | None]:
    """Return sbatch's options for an array of these runs, without the range of its tasks."""
    first = group[0][1]
    return {
        "job-name": first.name,
        **dict(_common_options(first)),
        "output": str(folder / "logs" / "slurm-%A_%a.out"),
        "comment": job_comment(key, text_in(dict(first.slurm).get("comment"))),
    }


def write_tasks(group: Group, key: str, folder: Path) -> Path:
    """Write the run folders of an array's tasks, in order, below `folder`; return the file."""
    file = folder / "arrays" / f"{key}.txt"
    write_atomically(file, "".join(f"{run.path}\n" for run, _ in group))
    return file


def _common_options(job: Job) -> tuple[tuple[str, str | None], ...]:
    return tuple((name, value) for name, value in job.slurm if name not in _OF_ONE_TASK)
