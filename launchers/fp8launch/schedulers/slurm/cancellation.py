"""Ending Slurm jobs: those of our runs, and never a job that only has the number of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fp8launch.diagnostics import error
from fp8launch.rundir.attempts import attempts_of
from fp8launch.rundir.registry import job_ids
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import FINAL
from fp8launch.schedulers.slurm import slurm_cli
from fp8launch.schedulers.slurm.job_rows import OwnJob, is_job_of, number_of, queue_rows
from fp8launch.schedulers.slurm.job_states import status_of
from fp8launch.wording import and_more


def cancel_runs(runs: Sequence[RunFolder]) -> None:
    """End every job of these runs, and the jobs that wait to follow them."""
    jobs: list[OwnJob] = []
    for run in runs:
        known = [*job_ids(run), attempts_of(run).waiting]
        jobs += [(job, run) for job in known if job]
    if not jobs:
        return
    rows, trouble = queue_rows(runs)
    if trouble:
        names = and_more(list(dict(jobs)), 5)
        message = f"cannot determine which run the jobs {names} belong to: {trouble}"
        raise error("slurm-silent", message, None, "retry when Slurm answers", 3)
    alive = {row.job: row for row in rows if status_of(row.word) not in FINAL}
    ours: set[str] = set()
    for job, run in jobs:
        if job in alive and is_job_of(alive[job], run):
            ours.add(job)
    scancel(_shortened(ours, alive))


def _shortened(ours: set[str], alive: Iterable[str]) -> list[str]:
    """Name an array by its own id where no other task of it is alive: one word for a thousand tasks."""
    others = {number_of(job) for job in alive if job not in ours}
    words: set[str] = set()
    for job in ours:
        number = number_of(job)
        if "_" in job and number not in others:
            words.add(number)
        else:
            words.add(job)
    return sorted(words, key=_order)


def _order(job: str) -> tuple[int, ...]:
    return tuple(map(int, job.split("_")))


def scancel(ids: Sequence[str]) -> None:
    """Cancel jobs; one that has already ended is not an error."""
    if not ids:
        return
    done = slurm_cli.call("scancel", *ids)
    if done.returncode and "invalid job id" not in done.stderr.lower():
        message = f"Slurm did not cancel {', '.join(ids)}: {done.stderr.strip()}"
        raise error("scancel-failed", message, fix="`fp8launch runs` lists the jobs that still run", exit_code=3)
