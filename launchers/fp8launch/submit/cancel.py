"""Ending runs: no attempt may follow, then every job of theirs is ended, and the run folder says who ended it."""

from __future__ import annotations

from collections.abc import Sequence

from fp8launch.rundir.attempts import forbid_more
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Scheduler
from fp8launch.submit.submission import now


def cancel_runs(runs: Sequence[RunFolder], scheduler: Scheduler) -> None:
    """End every job of these runs, and keep further attempts from beginning.

    Slurm forgets a job that ended before it began, so the manifest records that it was cancelled.
    """
    before = scheduler.states(runs)
    for run in runs:
        forbid_more(run)
    scheduler.cancel(runs)
    for run, state in zip(runs, before, strict=True):
        if not state.final:
            run.update(cancelled=now())
