"""`fp8launch resume`: another attempt at a run that has stopped."""

from __future__ import annotations

import click

from fp8launch import backends
from fp8launch.cli.output import say
from fp8launch.problems import ANSWER_IS_NO, error
from fp8launch.runs.disk import Busy, held
from fp8launch.runs.store import find_run, need_mine
from fp8launch.runs.submission import HELD_SECONDS, repair


@click.command()
@click.argument("name", metavar="RUN")
@click.option("--attempts", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many more at most.")
@click.option("--wait", is_flag=True, help="Follow the run to its end; a failure is exit code 1.")
def resume(name: str, attempts: int, wait: bool) -> int:
    """Go on with a run that has stopped, from its newest whole checkpoint, in the same run folder.

    Nodes that failed it stay excluded. A run that still goes on, or is done, is refused.
    """
    from fp8launch.runs.resume import resume as resume_run

    run = find_run(name)
    need_mine(run)
    backend = backends.backend(str(run.manifest().get("backend")))
    repair([run], backend)
    try:
        # Of two that resume at once, the second sees the job of the first.
        with held(run.path, HELD_SECONDS):
            job, start = resume_run(run, backend.states([run])[0], attempts)
    except Busy:
        raise error("run-busy", f"another launcher is at work on {run.run_id}", str(run.path), exit_code=3) from None
    say(f"{run.run_id} goes on from iteration {start} as job {job}")
    click.echo(run.run_id)
    if wait:
        from fp8launch.cli.follow import wait_for

        return 0 if wait_for(run, backend) else ANSWER_IS_NO
    return 0
