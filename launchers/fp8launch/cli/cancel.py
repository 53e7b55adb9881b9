"""`fp8launch cancel`: cancel the jobs of runs and studies."""

from __future__ import annotations

import click

from fp8launch import schedulers
from fp8launch.cli import complete
from fp8launch.cli.output import eprint
from fp8launch.rundir.registry import find_run, find_study, job_ids, need_mine
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.submit.submission import cancel_runs, cancel_study, recover_cut_off
from fp8launch.wording import counted


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY...", shell_complete=complete.runs)
def cancel(names: tuple[str, ...]) -> None:
    """Cancel all jobs of runs and studies. Run folders are kept."""
    for name in names:
        study = find_study(name)
        if study is None:
            _cancel_run(find_run(name))
        elif runs := cancel_study(study):
            eprint(f"cancelled {study.study_id}: {counted(len(runs), 'run')}")
        elif any(map(job_ids, study.runs())):
            eprint(f"{study.study_id} has already ended")
        else:
            eprint(f"{study.study_id} has no jobs: nothing to cancel")


def _cancel_run(run: RunFolder) -> None:
    need_mine(run)
    scheduler = schedulers.of_run(run)
    recover_cut_off([run], scheduler)
    if not job_ids(run):
        eprint(f"{run.run_id} was never submitted: nothing to cancel")
        return
    state = scheduler.state(run)
    if state.final:
        eprint(f"{run.run_id} has already ended: {state.status}")
        return
    cancel_runs([run], scheduler)
    eprint(f"cancelled {run.run_id} (job {', '.join(job_ids(run))})")
