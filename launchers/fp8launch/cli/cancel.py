"""`fp8launch cancel`: end runs."""

from __future__ import annotations

import click

from fp8launch import backends
from fp8launch.cli.output import say
from fp8launch.runs.folder import RunFolder
from fp8launch.runs.store import find_run, find_study, job_ids, need_mine
from fp8launch.runs.submission import repair
from fp8launch.runs.submit_study import cancel_study


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY...")
def cancel(names: tuple[str, ...]) -> None:
    """End every job of these runs and studies. Their folders stay."""
    for name in names:
        study = find_study(name)
        if study is None:
            _cancel_run(find_run(name))
            continue
        need_mine(study)
        made = study.runs()
        backend = backends.backend(str(made[0].manifest().get("backend"))) if made else None
        if backend is not None:
            repair(made, backend)
        runs = [run for run in made if job_ids(run)]
        if not runs or backend is None:
            say(f"{study.study_id} has no jobs: nothing to cancel")
            continue
        cancel_study(study, backend)
        say(f"cancelled {study.study_id}: {len(runs)} runs")


def _cancel_run(run: RunFolder) -> None:
    need_mine(run)
    backend = backends.backend(str(run.manifest().get("backend")))
    repair([run], backend)
    if not job_ids(run):
        say(f"{run.run_id} was never submitted: nothing to cancel")
        return
    state = backend.states([run])[0]
    if state.final:
        say(f"{run.run_id} has ended already: {state.status}")
        return
    backend.cancel(run)
    say(f"cancelled {run.run_id} (job {', '.join(job_ids(run))})")
