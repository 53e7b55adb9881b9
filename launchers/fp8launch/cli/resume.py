"""`fp8launch resume`: start another attempt of a stopped run."""

from __future__ import annotations

from collections.abc import Sequence

import click

from fp8launch import schedulers
from fp8launch.cli import complete
from fp8launch.cli.output import echo, eprint
from fp8launch.diagnostics import MACHINE_LACKS, error, exit_code
from fp8launch.report.run_listeners import RunListener, run_listeners
from fp8launch.rundir.atomic_io import Busy, held
from fp8launch.rundir.registry import find_run, find_study, need_mine
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.rundir.study import StudyFolder, locked
from fp8launch.schedulers.base import Scheduler
from fp8launch.submit.recipe_kinds import kind_of_study
from fp8launch.submit.submission import HELD_SECONDS, recover_cut_off


@click.command()
@click.argument("name", metavar="RUN|STAGES", shell_complete=complete.runs)
@click.option(
    "--attempts",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    metavar="N",
    help="Allow up to N further attempts.",
)
@click.option("--wait", is_flag=True, help="Follow the run to its end; exit code 1 if it fails.")
def resume(name: str, attempts: int, wait: bool) -> int:
    """Continue a stopped run in the same run folder, from its newest complete checkpoint.

    For a recipe with `stages`, the stopped stage continues, and later stages follow. Nodes that failed during the run
    stay excluded. A run that is still running or already complete is refused.
    """
    from fp8launch.submit.resume import resume as resume_run

    listeners = run_listeners() if wait else []
    study = find_study(name)
    if study is None or kind_of_study(study) is None:
        run = find_run(name)
        study = StudyFolder(run.path.parent)
    if kind := kind_of_study(study):
        need_mine(study)
        with locked(study, HELD_SECONDS):
            run = kind.resume(study, attempts, eprint)
        return _finish(run, schedulers.of_run(run), listeners, wait)
    need_mine(run)
    scheduler = schedulers.of_run(run)
    recover_cut_off([run], scheduler)
    try:
        # If two users resume at once, the lock lets the second see the first one's job.
        with held(run.path, HELD_SECONDS):
            job, start = resume_run(run, scheduler, attempts, report=eprint)
    except Busy:
        message = f"another launcher is submitting {run.run_id}"
        raise error("run-busy", message, str(run.path), "try again in a minute", exit_code=MACHINE_LACKS) from None
    eprint(f"{run.run_id} continues from iteration {start} as job {job}")
    return _finish(run, scheduler, listeners, wait)


def _finish(run: RunFolder, scheduler: Scheduler, listeners: Sequence[RunListener], wait: bool) -> int:
    """Print the run that continues, and follow it if requested. Return the exit code."""
    echo(run.run_id)
    if wait:
        from fp8launch.cli.follow import wait_for

        return exit_code(wait_for(run, scheduler, listeners))
    return 0
