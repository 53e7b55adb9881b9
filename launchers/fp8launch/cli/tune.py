"""`fp8launch tune`: the fastest settings of a recipe, found by short runs."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import click

from fp8launch.check.checker import check_all
from fp8launch.cli import complete
from fp8launch.cli.asking import confirm
from fp8launch.cli.check import refuse_errors
from fp8launch.cli.destination import destination, destination_options
from fp8launch.cli.names import recipe_named
from fp8launch.cli.output import eprint, json_option, set_option, with_options
from fp8launch.cli.slurm_options import time_override
from fp8launch.cli.tune_output import Ended, finish, show_candidates, wrote
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import ANSWER_IS_NO, INTERRUPTED, UserError, did_you_mean, error, errors_in, problems_of
from fp8launch.hardware.gpus import gpu
from fp8launch.recipe.load import read_recipe
from fp8launch.report.plots import require_drawable
from fp8launch.rundir.atomic_io import Busy, held
from fp8launch.rundir.registry import remember_root, run_root
from fp8launch.rundir.study import StudyFolder, create_study
from fp8launch.schedulers.base import Scheduler
from fp8launch.submit.submission import now
from fp8launch.tuning.candidates import Base, bases_of, begin, seconds_at_most, trial_seconds
from fp8launch.tuning.identity import study_name
from fp8launch.tuning.knobs import Knob
from fp8launch.tuning.knobs import knobs as all_knobs
from fp8launch.tuning.memory_fit import fits
from fp8launch.tuning.record import Record, folder_of, read_record, write_record
from fp8launch.tuning.session import Session, search
from fp8launch.tuning.state import Limits, State, Variant, seconds_spent, trials_run
from fp8launch.tuning.trials import Site
from fp8launch.wording import counted

TRIALS = 12


@click.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE|RUN...", shell_complete=complete.recipes)
@with_options(set_option)
@click.option("--knobs", "wanted", metavar="A,B", help="Knobs to turn (default: all; --dry-run lists them).")
@click.option("--numerics", type=click.Choice(["keep", "allow"]), default="keep", show_default=True,
              help="Also try changes to what is computed, such as another FP8 scaling.")  # fmt: skip
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), metavar="GPU-HOURS",
              help="GPU-hours of all trials of this search together.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), metavar="M",
              help="Minutes that this command may take.")  # fmt: skip
@click.option("--trials", type=click.IntRange(min=1), metavar="K",
              help=f"Runs of this search together (default: {TRIALS} without --budget and --minutes).")  # fmt: skip
@click.option("--iterations", type=click.IntRange(min=8), help="Iterations of a trial (default: 10 or 12).")
@click.option("--global-batch", type=click.IntRange(min=1), help="Sequences per step of a trial (default: by itself).")
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE", help="Write the best as a recipe.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the picture to this file: .png, .svg or .pdf.",
)
@click.option("--study", "study", metavar="NAME", help="Name of the study (default: from what is tuned).")
@with_options(*destination_options)
@click.option("--dry-run", is_flag=True, help="Show the changes that would be tried, and what they may cost.")
@click.option("--yes", is_flag=True, help="Begin without asking for confirmation.")
@json_option
def tune(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    wanted: str | None,
    numerics: str,
    budget: float | None,
    minutes: float | None,
    trials: int | None,
    iterations: int | None,
    global_batch: int | None,
    write: Path | None,
    picture: Path | None,
    study: str | None,
    cluster: str | None,
    backend_name: str | None,
    root: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **slurm: Any,
) -> int:
    """Find the fastest settings of RECIPE by short runs, one change at a time, then in pairs.

    Several recipes are tried first, and the fastest is improved. The same command goes on where it was interrupted.
    Exit code 1 if no recipe ran.
    """
    began = time.monotonic()
    chosen = _chosen(wanted, numerics)
    overrides = (*overrides, *time_override(slurm))
    profile, scheduler = destination("tune", cluster, backend_name, slurm)
    place = run_root(profile, root)
    profile = profile.model_copy(update={"run_root": str(place)})
    named = [recipe_named(recipe, to_run=True) for recipe in recipes]
    bases = bases_of({recipe: read_recipe(recipe) for recipe in named}, overrides, iterations, global_batch)
    gpus = _one_size(bases)
    identity = study_name(bases, chosen, numerics)
    name = study or identity
    _need_new_files(write, picture, StudyFolder(place / name))
    limits = _limits(budget, minutes, trials, gpus)
    _need_legal(bases, profile, scheduler, dry_run)
    found = read_record(StudyFolder(place / name))
    record = _fresh(bases, chosen, profile, gpus) if found is None else _same(found, bases, name, identity)
    if not any(start.candidates for start in record.state.starts):
        raise _nothing_to_change(bases, numerics, profile)
    record = replace(record, identity=identity, state=replace(record.state, limits=limits))
    if dry_run:
        eprint(_cost(record, bases, gpus, minutes))
        show_candidates(record, chosen, as_json)
        return 0
    scheduler.require()
    eprint(_cost(record, bases, gpus, minutes))
    if not yes and _bound(record, bases, gpus, minutes) > profile.ask_gpu_hours:
        confirm("Begin?", "search")
    folder = create_study(place, name, {"format": 1, "created": now(), "command": sys.argv[1:], "points": []})
    remember_root(place)
    write_record(folder, record)
    eprint(f"study {name} in {place}")
    ends = None
    if minutes is not None:
        ends = began + 60 * minutes
    try:
        with held(folder_of(folder)):
            record, halted = search(Session(Site(profile, place, scheduler, folder, eprint), bases, ends), record)
    except Busy:
        fix = "wait for it, or end it"
        raise error("tune-busy", f"another command is tuning {name}", str(folder.path), fix, 3) from None
    if halted.interrupted and write is not None:
        eprint(f"{write} is not written before the search has ended")
        write = None
    status = finish(Ended(record, halted.why, bases, overrides, folder), write, picture, as_json)
    if halted.interrupted:
        return INTERRUPTED
    return status


def _chosen(wanted: str | None, numerics: str) -> list[Knob]:
    """The knobs that may be turned. Raises UserError for unknown ones, and for those that --numerics excludes."""
    known = all_knobs()
    names = list(known)
    if wanted:
        names = [name.strip() for name in wanted.split(",")]
    chosen = []
    for name in names:
        if name not in known:
            fix = did_you_mean(name, known, f"knobs: {', '.join(known)}")
            raise error("unknown-knob", f"'{name}' is not a knob", "--knobs", fix)
        if numerics == "allow" or known[name].keeps_numerics:
            chosen.append(known[name])
        elif wanted:
            message = f"the knob '{name}' changes what is computed"
            raise error("changes-numerics", message, "--knobs", "add --numerics allow")
    return chosen


def _need_new_files(write: Path | None, picture: Path | None, study: StudyFolder) -> None:
    """Raise UserError for files that could not be written when the search has ended.

    The recipe that the same search wrote before it went on is replaced, unless somebody changed it.
    """
    if write is not None and write.exists() and not wrote(study, write):
        raise error("file-exists", f"{write} exists", "--write", "name a new file")
    if picture is not None:
        require_drawable(picture, "--picture")
    for option, file in (("--write", write), ("--picture", picture)):
        if file is None:
            continue
        try:
            tempfile.TemporaryFile(dir=file.absolute().parent).close()
        except OSError as exc:
            fix = "name a file in a folder that exists and is yours"
            raise error("cannot-write", f"{file} cannot be written: {exc.strerror}", option, fix) from None


def _need_legal(bases: Sequence[Base], profile: Cluster, scheduler: Scheduler, dry_run: bool) -> None:
    """Raise UserError for a recipe that the check refuses; a dry run needs neither its image nor its files here."""
    prepared = [base.prepared for base in bases]
    if not dry_run:
        refuse_errors(prepared, profile, scheduler)
        return
    results = check_all(prepared, profile, say=eprint, layers=("rules", "megatron"))
    if errors := errors_in(problems_of(results)):
        raise UserError(errors, ANSWER_IS_NO)


def _nothing_to_change(bases: Sequence[Base], numerics: str, profile: Cluster) -> UserError:
    """The error for knobs without an effect; it names those that have one."""
    known = _chosen(None, numerics)
    legal: set[str] = set()
    for base in bases:
        legal |= {candidate.knob for candidate in begin(base, known, profile, eprint).start.candidates}
    message = "none of these knobs changes this recipe in a way that the check accepts"
    fix = "no knob does; with --numerics allow there are more of them"
    if legal:
        names = [knob.name for knob in known if knob.name in legal]
        fix = f"knobs that do: {', '.join(names)}"
    return error("tune-nothing", message, "--knobs", fix)


def _one_size(bases: Sequence[Base]) -> int:
    layouts = [base.prepared.layout for base in bases]
    if len(set(map(attrgetter("world", "global_batch"), layouts))) > 1:
        message = "the recipes differ in GPUs or global batch, so their speeds cannot be compared"
        raise error("tune-sizes", message, "RECIPE", "tune them one by one, or set resources and --global-batch")
    return layouts[0].world


def _limits(budget: float | None, minutes: float | None, trials: int | None, gpus: int) -> Limits:
    seconds = None
    if budget is not None:
        seconds = budget * 3600 / gpus
    if trials is None and budget is None and minutes is None:
        trials = TRIALS
    return Limits(trials, seconds)


def _fresh(bases: Sequence[Base], chosen: Sequence[Knob], profile: Cluster, gpus: int) -> Record:
    """A search at its beginning: what may be changed, by the check's word."""
    starts, overrides, refused, memory = [], [], [], []
    for base in bases:
        found = begin(base, chosen, profile, eprint)
        starts.append(found.start)
        overrides.append(found.overrides)
        refused.append(found.refused)
        memory.append(gpu(base.prepared.loaded.recipe.resources.gpu).memory_gib)
    expected = max(map(trial_seconds, bases))
    state = State(tuple(starts), capacity_gib=min(memory) or None, expected_seconds=expected)
    return Record(state, tuple(overrides), tuple(refused), gpus)


def _same(found: Record, bases: Sequence[Base], name: str, identity: str) -> Record:
    """The record of a search that was begun. Raises UserError if it is one of other recipes, settings or knobs."""
    starts = [start.name for start in found.state.starts]
    same = found.identity == identity
    if not found.identity:
        same = starts == [base.name for base in bases]
    if not same:
        message = f"the study {name} is a search from {', '.join(starts)}, with other settings or knobs"
        raise error("other-tune", message, "--study", "choose another name, or repeat the command that began it")
    return found


# --- what it will cost ------------------------------------------------------------------------------------------------


def _bound(record: Record, bases: Sequence[Base], gpus: int, minutes: float | None) -> float:
    """GPU-hours that the rest of the search may use at most."""
    limits = record.state.limits
    bounds = []
    if limits.seconds is not None:
        bounds.append(limits.seconds - seconds_spent(record.state))
    if minutes is not None:
        bounds.append(60 * minutes)
    if limits.trials is not None:
        left = max(limits.trials - trials_run(record.state), 0)
        bounds.append(left * max(map(seconds_at_most, bases)))
    return max(min(bounds), 0.0) * gpus / 3600


def _cost(record: Record, bases: Sequence[Base], gpus: int, minutes: float | None) -> str:
    changes = 0
    for number, start in enumerate(record.state.starts):
        changes += sum(fits(record.state, Variant(number, (change.name,))) for change in start.candidates)
    shape = bases[0].prepared
    need = shape.loaded.recipe.resources
    devices = f"{gpus} {need.gpu}"
    if need.gpu == "cpu":
        devices = f"{counted(gpus, 'process')} on CPUs"
    done = ""
    if record.state.results:
        done = f"; {len(record.state.results)} trials are done"
    bound = _bound(record, bases, gpus, minutes)
    return (
        f"{counted(changes, 'change')} to try on {devices}: runs of {bases[0].iterations} iterations with global "
        f"batch {shape.layout.global_batch}, about {record.state.expected_seconds:,.0f} s each{done}; "
        f"at most {bound:,.2f} GPU-hours"
    )
