"""`fp8launch runs`: what was submitted and how it is."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import click

from fp8launch import schedulers
from fp8launch.cli import complete
from fp8launch.cli.names import runs_named, study_named
from fp8launch.cli.output import eprint, json_option, number_text, print_problems, show_json, show_table
from fp8launch.diagnostics import UserError
from fp8launch.injob.supervisor.failures import Failure
from fp8launch.report.progress import Progress, duration, progress_of
from fp8launch.rundir.attempts import attempts_of
from fp8launch.rundir.last_failure import last_failure
from fp8launch.rundir.registry import all_runs, damaged, job_ids, known_roots
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import JobState
from fp8launch.submit.resume import resumable_from
from fp8launch.submit.submission import describe_without_job, recover_cut_off


@click.command()
@click.argument("names", nargs=-1, metavar="[RUN|STUDY|RECIPE...]", shell_complete=complete.runs)
@click.option(
    "-n", "--last", type=click.IntRange(min=1), default=20, show_default=True, help="Number of newest runs to show."
)
@json_option
def runs(names: tuple[str, ...], last: int, as_json: bool) -> None:
    """List runs with state, iteration, time left, loss and speed, newest last; of a study every point.

    Before the first iteration the start-up stage is shown: queued, image, imports, model, data.
    """
    found = runs_or_newest(names, last)
    rows = []
    for run, state in zip(found, run_states(found), strict=True):
        manifest = run.manifest()
        rows.append(_Row(run, manifest, state, progress_of(run, manifest, state)))
    if not names:
        print_problems(damaged())
    for study in filter(None, map(study_named, names)):
        if missing := study.missing():
            count = len(study.record()["points"])
            eprint(
                f"{study.study_id}: {len(missing)} of {count} points have no run yet; repeat the same submit to "
                "submit them"
            )
    if as_json:
        show_json(list(map(_json, rows)))
        return
    if not rows:
        eprint(f"no runs in {', '.join(map(str, known_roots())) or 'any run root'}")
        return
    _show(rows)
    if len(rows) > 1:
        counts = Counter(row.state.status for row in rows)
        eprint(", ".join(f"{count} {status}" for status, count in counts.most_common()))


def runs_or_newest(names: Sequence[str], last: int) -> list[RunFolder]:
    """Return the runs that the names mean; without names the `last` newest ones."""
    if not names:
        return all_runs()[-last:]
    return list(chain.from_iterable(map(runs_named, names)))


@dataclass(frozen=True)
class _Row:
    run: RunFolder
    manifest: dict[str, Any]
    state: JobState
    progress: Progress


# Columns of the table. Those that no run fills are left out, and in a narrow terminal the first of `_DROPPED`.
_DROPPED = ("backend", "created", "size", "job", "tokens/s/GPU", "loss", "ETA", "iteration")
# Characters of a failure's message; `parse` prints all of it.
MESSAGE = 90
_ALWAYS = ("run", "state", "detail")


def _show(rows: Sequence[_Row]) -> None:
    table = list(map(_cells, rows))
    columns = []
    for name in table[0]:
        if name in _ALWAYS or any(map(itemgetter(name), table)):
            columns.append(name)
    lines = map(itemgetter(*columns), table)
    unbroken = set(columns) - {"detail"}
    show_table(columns, lines, unbroken=unbroken, drop=_DROPPED, right=("ETA", "loss", "tokens/s/GPU"))


def _cells(row: _Row) -> dict[str, str]:
    progress = row.progress
    return {
        "run": row.run.run_id,
        "state": row.state.status,
        "iteration": progress.position,
        "ETA": duration(progress.eta_s),
        "loss": number_text(progress.loss, ".4f"),
        "tokens/s/GPU": number_text(progress.tokens_per_s_per_gpu, ",.0f"),
        "job": ",".join(job_ids(row.run)),
        "backend": str(row.manifest.get("backend", "")),
        "size": _size(row.manifest),
        "created": str(row.manifest.get("created", ""))[:16].replace("T", " "),
        "detail": detail_of(row.run, row.state, progress),
    }


def _why(run: RunFolder, state: JobState) -> list[str]:
    """What the supervisor wrote down of the run; where there is none, why the run failed."""
    known = attempts_of(run)
    words = [known.words]
    failure = _failure(run, state)
    if failure is not None and not known.stopped:
        words.append(f"{failure.code}: {textwrap.shorten(failure.message, MESSAGE, placeholder='...')}")
    return words


def _failure(run: RunFolder, state: JobState) -> Failure | None:
    if not state.final or state.status in ("completed", "cancelled"):
        return None
    return last_failure(run)


def _resumable_from(run: RunFolder, state: JobState) -> int | None:
    """The iteration from which `resume` could continue; None for a run that goes on or is complete."""
    if not state.final or state.status == "completed":
        return None
    return resumable_from(run)


def run_states(found: list[RunFolder]) -> list[JobState]:
    """Return the states of runs of any schedulers, each scheduler asked once."""
    states: dict[RunFolder, JobState] = {}
    for name, members in by_scheduler(found).items():
        try:
            scheduler = schedulers.by_name(name)
            recover_cut_off(members, scheduler)
            states.update(zip(members, scheduler.states(members), strict=True))
        except UserError as exc:
            states |= dict.fromkeys(members, JobState("unknown", str(exc)))
    for run in found:
        if not job_ids(run):
            states[run] = JobState("unknown", describe_without_job(run), source="run folder")
    return [states[run] for run in found]


def by_scheduler(runs: Sequence[RunFolder]) -> dict[str, list[RunFolder]]:
    """Group runs by the name of their scheduler."""
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        groups.setdefault(str(run.manifest().get("backend")), []).append(run)
    return groups


def detail_of(run: RunFolder, state: JobState, progress: Progress) -> str:
    """Return why a run waits, how it trains or how it ended, and from where it could continue; may be empty."""
    words = [state.reason, *_why(run, state), progress.unhealthy]
    iteration = _resumable_from(run, state)
    if iteration:
        words.append(f"`fp8launch resume` continues from iteration {iteration}")
    return "; ".join(filter(None, words))


def _size(manifest: dict[str, Any]) -> str:
    resources = manifest.get("recipe", {}).get("resources")
    if not isinstance(resources, dict):
        resources = {}
    return f"{resources.get('nodes', 1)} x {resources.get('gpus_per_node', '?')} {manifest.get('gpu', '')}"


def _json(row: _Row) -> dict[str, Any]:
    run, manifest, state = row.run, row.manifest, row.state
    failure = _failure(run, state)
    return {
        "run": run.run_id,
        "folder": str(run.path),
        "name": manifest.get("name"),
        "study": manifest.get("study"),
        "created": manifest.get("created"),
        "backend": manifest.get("backend"),
        "jobs": job_ids(run),
        "state": state.status,
        "detail": state.detail,
        "exit_code": state.exit_code,
        "source": state.source,
        "resumes_from": _resumable_from(run, state),
        "attempts": len(run.attempts()),
        "survival": asdict(attempts_of(run)),
        "progress": row.progress.as_json(),
        "failure": failure and failure.as_json(),
    }
