"""The command `fp8launch tune`."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fp8launch.check.checker import check_all
from fp8launch.cli import complete
from fp8launch.cli.check import refuse_errors
from fp8launch.cli.destination import destination_options
from fp8launch.cli.output import FiniteRange, confirm, eprint, json_option, print_problems, set_option, with_options
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import ANSWER_IS_NO, INTERRUPTED, UserError, error, errors_in, problems_of
from fp8launch.injob.supervisor.run_records import now
from fp8launch.plugins.plots.figures import require_drawable
from fp8launch.plugins.tune.beginning import (
    TRIALS,
    choose_knobs,
    common_size,
    describe_cost,
    gpu_hours_at_most,
    limits,
    need_same_search,
    new_record,
    nothing_to_change,
    study_name,
)
from fp8launch.plugins.tune.candidates import Base, bases_of
from fp8launch.plugins.tune.output import Ended, finish, show_candidates, wrote
from fp8launch.plugins.tune.record import folder_of, read_record, write_record
from fp8launch.plugins.tune.session import Session, search
from fp8launch.plugins.tune.trials import Site
from fp8launch.recipe.load import read_recipe
from fp8launch.rundir.atomic_io import Busy, held
from fp8launch.rundir.names import recipe_named
from fp8launch.rundir.registry import remember_root, run_root
from fp8launch.rundir.study import StudyFolder, create_study
from fp8launch.schedulers.base import Scheduler
from fp8launch.submit.destination import destination, time_override


@click.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE|RUN...", shell_complete=complete.recipes)
@with_options(set_option)
@click.option("--knobs", "wanted", metavar="A,B", help="Knobs to try (--dry-run lists them).")
@click.option("--numerics", type=click.Choice(["keep", "allow"]), default="keep", show_default=True,
              help="allow: also change numerics, such as FP8 scaling.")  # fmt: skip
@click.option("--budget", type=FiniteRange(min=0, min_open=True), metavar="GPU-HOURS",
              help="GPU-hours for all trials.")  # fmt: skip
@click.option("--minutes", type=FiniteRange(min=0, min_open=True), metavar="M",
              help="Minutes for this command.")  # fmt: skip
@click.option("--trials", type=click.IntRange(min=1), metavar="K",
              help=f"Maximum number of trials (default: {TRIALS} without --budget and --minutes).")  # fmt: skip
@click.option("--iterations", type=click.IntRange(min=8), metavar="N", help="Iterations of a trial (10 or 12).")
@click.option("--global-batch", type=click.IntRange(min=1), metavar="N", help="Sequences per step of a trial.")
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE", help="Write the best settings as a recipe.")
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE", help="Plot the search (.png, .svg, .pdf).")
@click.option("--study", "study", metavar="NAME", help="Name of the study (default: automatic).")
@with_options(*destination_options)
@click.option("--dry-run", is_flag=True, help="Show the changes and their cost, and stop.")
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
    """Find a recipe's fastest settings with short runs: one change at a time, then pairs of changes.

    \b
    fp8launch tune llama8b_fp8 --dry-run
    fp8launch tune llama8b_fp8 --knobs micro-batch,recompute --trials 6

    Given several recipes, `tune` compares them first and then improves the fastest. To continue an interrupted search,
    repeat the command. The exit code is 1 if no recipe ran.
    """
    began = time.monotonic()
    chosen = choose_knobs(wanted, numerics)
    overrides = (*overrides, *time_override(slurm))
    profile, scheduler = destination("tune", cluster, backend_name, slurm, print_problems)
    place = run_root(profile, root)
    profile = profile.model_copy(update={"run_root": str(place)})
    named = [recipe_named(recipe, to_run=True, say=eprint) for recipe in recipes]
    bases = bases_of({recipe: read_recipe(recipe) for recipe in named}, overrides, iterations, global_batch, profile)
    gpus = common_size(bases)
    identity = study_name(bases, chosen, numerics)
    name = study or identity
    _need_new_files(write, picture, StudyFolder(place / name))
    _need_legal(bases, profile, scheduler, dry_run)
    record = read_record(StudyFolder(place / name))
    if record is None:
        record = new_record(bases, chosen, gpus, eprint)
    else:
        need_same_search(record, bases, name, identity)
    if not any(start.candidates for start in record.state.starts):
        raise nothing_to_change(bases, numerics, eprint)
    bounds = limits(budget, minutes, trials, gpus)
    record = replace(record, identity=identity, state=replace(record.state, limits=bounds))
    for sentence in record.remarks:
        eprint(sentence)
    if dry_run:
        eprint(describe_cost(record, bases, minutes))
        show_candidates(record, chosen, as_json)
        return 0
    scheduler.require()
    eprint(describe_cost(record, bases, minutes))
    if not yes and gpu_hours_at_most(record, bases, minutes) > profile.ask_gpu_hours:
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
        eprint(f"{write} is written at the end of the search: repeat the command to continue")
        write = None
    status = finish(Ended(record, halted.why, bases, overrides, folder), write, picture, as_json)
    if halted.interrupted:
        return INTERRUPTED
    return status


def _need_new_files(write: Path | None, picture: Path | None, study: StudyFolder) -> None:
    """Raise UserError if a file could not be written at the end of the search.

    A recipe that this search wrote earlier is replaced, unless somebody edited it.
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
            fix = "name a file in an existing folder that you can write to"
            raise error("cannot-write", f"{file} cannot be written: {exc.strerror}", option, fix) from None


def _need_legal(bases: Sequence[Base], profile: Cluster, scheduler: Scheduler, dry_run: bool) -> None:
    """Raise UserError if the check refuses a recipe. A dry run does not look for images and files."""
    prepared = [base.prepared for base in bases]
    if not dry_run:
        refuse_errors(prepared, profile, scheduler)
        return
    results = check_all(prepared, profile, say=eprint, layers=("rules", "megatron"))
    if errors := errors_in(problems_of(results)):
        raise UserError(errors, ANSWER_IS_NO)
