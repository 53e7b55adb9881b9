"""`fp8launch tag`, `rename`, `annotate` and `delete`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from fp8launch.cli import complete
from fp8launch.cli.moment import MOMENT
from fp8launch.cli.output import confirm, echo, eprint, json_option, show_json, show_table
from fp8launch.diagnostics import MACHINE_LACKS, error, exit_code
from fp8launch.plugins.housekeeping.deletion import (
    Candidate,
    Tags,
    candidates,
    delete_run,
    remove_empty_study,
    remove_remains,
)
from fp8launch.recipe.load import pack_names
from fp8launch.report.run_selection import Selection, tags_of
from fp8launch.rundir.atomic_io import Busy, held
from fp8launch.rundir.names import has_runs
from fp8launch.rundir.registry import all_runs, find_run, find_runs, need_mine
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.wording import counted

_LOCK_SECONDS = 5.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_runs_argument = click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY...", shell_complete=complete.runs)


@click.command()
@_runs_argument
@click.option("--add", multiple=True, metavar="TAG", help="Add a tag; repeatable.")
@click.option("--remove", multiple=True, metavar="TAG", help="Remove a tag; repeatable.")
@json_option
def tag(names: tuple[str, ...], add: tuple[str, ...], remove: tuple[str, ...], as_json: bool) -> None:
    """Add or remove tags of runs, and print them. `runs --tag TAG` lists tagged runs; `delete` keeps them.

    \b
    fp8launch tag my_model-20261126-115744-9804 --add paper
    fp8launch runs --tag paper
    """
    for text in add:
        _need_name(text, "--add")
    shown = []
    for run in _own(names):
        tags = [old for old in tags_of(run.manifest()) if old not in remove]
        tags += [new for new in add if new not in tags]
        if add or remove:
            _update(run, tags=tags)
        shown.append({"run": run.run_id, "tags": tags})
    _show(shown, "tags", as_json)


@click.command()
@click.argument("name", metavar="RUN", shell_complete=complete.runs)
@click.argument("title")
@json_option
def rename(name: str, title: str, as_json: bool) -> None:
    """Give a run a title that commands accept as its name. Id and folder stay the same. An empty TITLE removes it."""
    run = find_run(name)
    need_mine(run)
    if title:
        _need_name(title, "TITLE")
    others = [other.run_id for other in all_runs() if other.manifest().get("title") == title and other != run]
    if title and (others or has_runs(title) or title in pack_names()):
        message = f"'{title}' is already the name of {others[0] if others else 'a run, a study or a recipe'}"
        raise error("name-taken", message, "TITLE", "choose another title")
    _update(run, title=title or None)
    _show([{"run": run.run_id, "title": title or None}], "title", as_json)


@click.command()
@_runs_argument
@click.option("--note", required=True, metavar="TEXT", help="The note; an empty one removes it.")
@json_option
def annotate(names: tuple[str, ...], note: str, as_json: bool) -> None:
    """Attach a note to runs. `runs` shows it."""
    shown = []
    for run in _own(names):
        _update(run, note=note or None)
        shown.append({"run": run.run_id, "note": note or None})
    _show(shown, "note", as_json)


@click.command()
@click.argument("names", nargs=-1, metavar="[RUN|STUDY...]", shell_complete=complete.runs)
@click.option("--older-than", type=MOMENT, help="Only runs created before then: 30d, 2w, 2026-11-01.")
@click.option("--recipe", "recipes", multiple=True, metavar="NAME", help="Only runs of this recipe; repeatable.")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Only runs with this tag; repeatable.")
@click.option("--include-tagged", is_flag=True, help="Also delete tagged runs.")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, with sizes; delete nothing.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@json_option
def delete(
    names: tuple[str, ...],
    older_than: float | None,
    recipes: tuple[str, ...],
    tags: tuple[str, ...],
    include_tagged: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete run folders and their checkpoints. Without names, delete all of your runs that the options select.

    \b
    fp8launch delete --older-than 30d --dry-run
    fp8launch delete my_model-20261126-115744-9804

    A run is kept if it has not ended, is tagged, belongs to another user, or has checkpoints that another run loads.
    The exit code is 1 if a run that you named is kept.
    """
    selection = Selection(tags, recipes, before=older_than)
    if not names and selection == Selection():
        raise click.UsageError("name runs, or select some with --older-than, --recipe or --tag")
    named = [run for name in names for run in find_runs(name)]
    runs = selection.of(dict.fromkeys(named) if names else (run for run in all_runs() if run.is_mine))
    may_have = None if include_tagged else tags
    if not dry_run:
        remove_remains()
    found = candidates(runs, may_have)
    kept = [one for one in found if one.why]
    doomed = [one for one in found if not one.why]
    if not as_json:
        _show_candidates(doomed, kept)
    if doomed and not dry_run:
        if not yes:
            confirm(f"Delete {counted(len(doomed), 'run')} for good?", "deletion", "nothing was deleted")
        doomed, late = _delete(doomed, may_have)
        kept += late
    if as_json:
        entries: dict[str, Any] = {"dry_run": dry_run, "bytes": sum(one.size for one in doomed)}
        deleted, left = [one.as_json() for one in doomed], [one.as_json() for one in kept]
        show_json({**entries, "deleted": deleted, "kept": left})
    elif dry_run:
        eprint("nothing was deleted: this was a dry run")
    elif doomed:
        eprint(f"deleted {counted(len(doomed), 'run')}, {_size_text(sum(one.size for one in doomed))}")
    return exit_code(not (names and kept))


def _delete(doomed: Sequence[Candidate], may_have: Tags) -> tuple[list[Candidate], list[Candidate]]:
    """Delete runs; return the deleted runs and the runs that are kept after all."""
    deleted, kept = [], []
    for one in doomed:
        try:
            why = delete_run(one, may_have)
        except OSError as exc:
            message = f"cannot be deleted: {exc.strerror or exc}"
            raise error("not-deleted", message, str(exc.filename or one.run.path), None, MACHINE_LACKS) from None
        if why is None:
            deleted.append(one)
        else:
            eprint(f"{one.run.run_id} is kept: {why}")
            kept.append(Candidate(one.run, one.state, one.size, why))
    for folder in dict.fromkeys(one.run.path.parent for one in deleted):
        remove_empty_study(folder)
    return deleted, kept


def _show_candidates(doomed: Sequence[Candidate], kept: Sequence[Candidate]) -> None:
    if not doomed and not kept:
        eprint("no such runs")
        return
    if doomed:
        rows = [
            (one.run.run_id, one.state.status, str(one.run.manifest().get("created", ""))[:10], _size_text(one.size))
            for one in doomed
        ]
        show_table(("run", "state", "created", "size"), rows, unbroken=("run",), right=("size",))
        eprint(f"{counted(len(doomed), 'run')}, {_size_text(sum(one.size for one in doomed))}")
    for one in kept:
        eprint(f"kept: {one.run.run_id}: {one.why}")


def _size_text(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit != "GiB" else f"{size:,.1f} GiB"
        size /= 1024
    return f"{size:,.1f} TiB"


def _own(names: Sequence[str]) -> list[RunFolder]:
    """Return the named runs, and the runs of named studies. Raises UserError for runs of other users."""
    runs = list(dict.fromkeys(run for name in names for run in find_runs(name)))
    need_mine(*runs)
    return runs


def _update(run: RunFolder, **entries: Any) -> None:
    """Set entries of a run's manifest, while no other command changes it."""
    try:
        with held(run.path, _LOCK_SECONDS):
            run.update(**entries)
    except Busy:
        message = f"another command is changing {run.run_id}"
        raise error("run-busy", message, str(run.path), "try again in a minute", MACHINE_LACKS) from None


def _need_name(text: str, where: str) -> None:
    if not _NAME.fullmatch(text):
        fix = "use at most 64 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        raise error("bad-name", f"'{text}' cannot be a name", where, fix)


def _show(rows: Sequence[dict[str, Any]], field: str, as_json: bool) -> None:
    if as_json:
        show_json(rows)
        return
    for row in rows:
        value = row[field]
        text = ", ".join(value) if isinstance(value, list) else value
        echo(f"{row['run']}  {text or '-'}")
