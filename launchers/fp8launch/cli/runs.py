"""`fp8launch runs`: list runs and their states."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, get_args

import click

from fp8launch.cli import complete
from fp8launch.cli.moment import MOMENT
from fp8launch.cli.output import eprint, json_option, number_text, print_problems, show_json, show_table, with_options
from fp8launch.report.progress import duration
from fp8launch.report.run_selection import Selection, tags_of
from fp8launch.report.run_status import RunStatus, run_states, run_statuses
from fp8launch.rundir.names import runs_named, study_named
from fp8launch.rundir.registry import all_runs, damaged, job_ids, known_roots, without_removed
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.rundir.study import StudyFolder
from fp8launch.schedulers.base import Status
from fp8launch.submit.recipe_kinds import kind_of_study
from fp8launch.untyped import as_mapping

# Empty columns are left out. On a narrow terminal, the columns in `_DROPPED` are left out as well, in this order.
_DROPPED = ("backend", "created", "size", "note", "job", "tokens/s/GPU", "loss", "ETA", "iteration", "tags", "title")
_ALWAYS = ("run", "state", "detail")
_COLUMNS = (
    "run", "state", "iteration", "ETA", "loss", "tokens/s/GPU", "job", "backend", "size", "created", "tags", "title",
    "note", "detail",
)  # fmt: skip
# Columns that sort by number instead of by text.
_NUMBERS: dict[str, Callable[[RunStatus], float | int | None]] = {
    "iteration": lambda status: status.progress.iteration,
    "ETA": lambda status: status.progress.eta_s,
    "loss": lambda status: status.progress.loss,
    "tokens/s/GPU": lambda status: status.progress.tokens_per_s_per_gpu,
}
_filters = (
    click.option(
        "--state", "states", multiple=True, type=click.Choice(get_args(Status)), metavar="STATE",
        help="Only runs in this state; repeatable.",
    ),
    click.option("--tag", "tags", multiple=True, metavar="TAG", help="Only runs with this tag; repeatable."),
    click.option("--recipe", "recipes", multiple=True, metavar="NAME", help="Only runs of this recipe; repeatable."),
    click.option("--since", type=MOMENT, help="Only runs created since then: 12h, 30d, 2026-11-01."),
)  # fmt: skip


@click.command()
@click.argument("names", nargs=-1, metavar="[RUN|STUDY|RECIPE...]", shell_complete=complete.runs)
@click.option(
    "-n", "--last", type=click.IntRange(min=1), default=20, show_default=True, help="Number of newest runs to show."
)
@with_options(*_filters)
@click.option("--sort", metavar="COLUMN", help="Sort by a column, or with -COLUMN in reverse.")
@click.option("--columns", metavar="C,C...", help="Show these columns, or recipe keys such as train.lr.")
@json_option
def runs(
    names: tuple[str, ...],
    last: int,
    states: tuple[str, ...],
    tags: tuple[str, ...],
    recipes: tuple[str, ...],
    since: float | None,
    sort: str | None,
    columns: str | None,
    as_json: bool,
) -> None:
    """List runs with state, iteration, time left, loss and speed, newest last. For a study, list every point.

    A recipe with `stages` is one row, unless you name its study. Until the first iteration, the list shows the
    start-up stage: queued, image, imports, model, data.
    """
    chosen = columns.split(",") if columns else []
    for name in [*chosen, *filter(None, [sort and sort.removeprefix("-")])]:
        _need_column(name)
    named = [run for name in names for run in runs_named(name, say=eprint)]

    def listed(runs: Sequence[RunFolder]) -> tuple[list[RunStatus], list[dict[str, Any]]]:
        selected = Selection(tags, recipes, since).of(runs)
        if not names and not states:
            selected = selected[-last:]
        found = [status for status in run_statuses(selected) if not states or status.state.status in states]
        if not names:
            found = found[-last:]
        if sort:
            found = _sorted(found, sort)
        if as_json:
            return found, [status.as_json() for status in found]
        if names or states:
            return found, list(map(_cells, found))
        return _with_sequences(found)

    found, rows = listed(named) if names else without_removed(listed, all_runs())
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
        show_json(rows)
        return
    if not found:
        such = "such " if states or tags or recipes or since is not None else ""
        roots = ", ".join(map(str, known_roots()))
        eprint(f"no {such}runs in {roots}" if roots else "no runs yet; submit one: `fp8launch submit RECIPE`")
        return
    _show(found, rows, chosen)
    if len(found) > 1:
        counts = Counter(status.state.status for status in found)
        eprint(", ".join(f"{count} {status}" for status, count in counts.most_common()))


def _with_sequences(found: Sequence[RunStatus]) -> tuple[list[RunStatus], list[dict[str, Any]]]:
    """Return the runs to list and their cells, with one row for all runs of a recipe with stages."""
    shown: list[RunStatus] = []
    rows: list[dict[str, Any]] = []
    seen: set[StudyFolder] = set()
    for status in found:
        study = StudyFolder(status.run.path.parent)
        kind = kind_of_study(study)
        if kind is None or status.run not in study.runs():
            shown.append(status)
            rows.append(_cells(status))
        elif study not in seen:
            seen.add(study)
            runs = study.runs()
            run, place = kind.position(runs, run_states(runs))
            shown += run_statuses([run])
            cells = _cells(shown[-1])
            detail = "; ".join(filter(None, (place, cells["detail"])))
            rows.append({**cells, "run": study.study_id, "detail": detail})
    return shown, rows


def _need_column(name: str) -> None:
    """Raise UsageError if the name is neither a column nor a recipe key."""
    if name not in _COLUMNS and not re.fullmatch(r"\w+(\.\w+)+", name):
        known = ", ".join(_COLUMNS)
        raise click.UsageError(f"{name!r} is neither a column ({known}) nor a recipe key such as train.lr")


def _sorted(found: Sequence[RunStatus], column: str) -> list[RunStatus]:
    """Sort the runs by a column. Runs without a value come last in both directions."""
    name = column.removeprefix("-")
    filled, empty = [], []
    for status in found:
        value = _NUMBERS[name](status) if name in _NUMBERS else _cell(status, name)
        if value in (None, ""):
            empty.append(status)
        else:
            filled.append((value, status))
    # A recipe key may have values of several types.
    numeric = all(isinstance(value, (int, float)) for value, _ in filled)
    filled.sort(key=lambda one: one[0] if numeric else str(one[0]), reverse=column.startswith("-"))
    return [*(status for _, status in filled), *empty]


def _cell(status: RunStatus, name: str) -> Any:
    """Return the text of a column, or the value of a dotted recipe key; None if the recipe does not set it."""
    if name in _COLUMNS:
        return _cells(status)[name]
    value: Any = as_mapping(status.manifest.get("recipe"))
    for part in name.split("."):
        value = as_mapping(value).get(part)
    return value


def _show(found: Sequence[RunStatus], table: Sequence[Mapping[str, str]], chosen: Sequence[str]) -> None:
    columns = list(dict.fromkeys(chosen))
    if not columns:
        columns = [name for name in _COLUMNS if name in _ALWAYS or any(map(itemgetter(name), table))]
    rows = []
    for status, cells in zip(found, table, strict=True):
        values = [cells[name] if name in _COLUMNS else _cell(status, name) for name in columns]
        rows.append(["" if value is None else str(value) for value in values])
    unbroken = set(columns) - {"detail", "note"}
    numbers = ("ETA", "loss", "tokens/s/GPU")
    show_table(columns, rows, unbroken=unbroken, drop=() if chosen else _DROPPED, right=numbers)


def _cells(status: RunStatus) -> dict[str, str]:
    manifest, progress = status.manifest, status.progress
    need = as_mapping(as_mapping(manifest.get("recipe")).get("resources"))
    return {
        "run": status.run.run_id,
        "state": status.state.status,
        "iteration": progress.position,
        "ETA": duration(progress.eta_s),
        "loss": number_text(progress.loss, ".4f"),
        "tokens/s/GPU": number_text(progress.tokens_per_s_per_gpu, ",.0f"),
        "job": ",".join(job_ids(status.run)),
        "backend": str(manifest.get("backend", "")),
        "size": f"{need.get('nodes', 1)} x {need.get('gpus_per_node', '?')} {manifest.get('gpu', '')}",
        "created": str(manifest.get("created", ""))[:16].replace("T", " "),
        "tags": ", ".join(tags_of(manifest)),
        "title": str(manifest.get("title") or ""),
        "note": str(manifest.get("note") or ""),
        "detail": status.detail,
    }
