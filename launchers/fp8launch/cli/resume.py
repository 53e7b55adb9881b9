"""`fp8launch resume`: start another attempt of a stopped run."""

from __future__ import annotations

import click

from fp8launch import schedulers
from fp8launch.cli import complete
from fp8launch.cli.output import echo, eprint
from fp8launch.diagnostics import MACHINE_LACKS, error, exit_code
from fp8launch.report.run_listeners import run_listeners
from fp8launch.rundir.atomic_io import Busy, held
from fp8launch.rundir.registry import find_run, need_mine
from fp8launch.submit.submission import HELD_SECONDS, recover_cut_off


@click.command()
@click.argument("name", metavar="RUN", shell_complete=complete.runs)
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

    Nodes that failed during the run stay excluded. A run that is still running or already complete is refused.
    """
    from fp8launch.submit.resume import resume as resume_run

    listeners = run_listeners() if wait else []
    run = find_run(name)
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
    echo(run.run_id)
    if wait:
        from fp8launch.cli.follow import wait_for

        return exit_code(wait_for(run, scheduler, listeners))
    return 0
