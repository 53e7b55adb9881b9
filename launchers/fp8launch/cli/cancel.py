"""`fp8launch cancel`: end runs."""

from __future__ import annotations

import click

from fp8launch import backends
from fp8launch.cli.output import say
from fp8launch.runs.store import find_run, job_ids


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
def cancel(names: tuple[str, ...]) -> None:
    """End every job of these runs. Their folders stay."""
    for run in [find_run(name) for name in names]:
        if not job_ids(run):
            say(f"{run.run_id} was never submitted: nothing to cancel")
            continue
        backend = backends.backend(str(run.manifest().get("backend")))
        state = backend.states([run])[0]
        if state.final:
            say(f"{run.run_id} has ended already: {state.status}")
            continue
        backend.cancel(run)
        say(f"cancelled {run.run_id} (job {', '.join(job_ids(run))})")
