"""`fp8launch submit`: submit a recipe as a run, or a grid of points as a study."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import click

from fp8launch.check.before_submission import prepare_points, ready_points
from fp8launch.check.extra_layers import extra_layers
from fp8launch.cli import complete
from fp8launch.cli.check import refuse_errors
from fp8launch.cli.destination import destination_options
from fp8launch.cli.output import (
    confirm,
    echo,
    eprint,
    json_option,
    print_problems,
    set_option,
    show_json,
    show_table,
    with_bar,
    with_gpu,
    with_options,
)
from fp8launch.cli.plugin_options import layer_options
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import ANSWER_IS_NO, error, exit_code
from fp8launch.hardware.gpus import GPUS
from fp8launch.job.prepared import Prepared, prepare, prepare_loaded
from fp8launch.recipe.load import LoadedRecipe, Override, load_recipe, read_recipe
from fp8launch.report.run_listeners import RunListener, run_listeners
from fp8launch.rundir.names import recipe_named
from fp8launch.rundir.registry import job_ids, run_root
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.rundir.study import need_study_name
from fp8launch.schedulers.base import Scheduler
from fp8launch.submit.destination import destination, time_override
from fp8launch.submit.grid import Point, grid_of, own_checkpoint_folder, parse_axis, parse_nodes, seed_axis
from fp8launch.submit.new_run import dry_script
from fp8launch.submit.recipe_kinds import Part, only_kind, recipe_kind
from fp8launch.submit.submission import record_reported, record_waiting
from fp8launch.submit.submit import GridPoint, Outcome, identify, require_wait, submit_run, submit_study
from fp8launch.untyped import as_mapping
from fp8launch.wording import counted

# Longer tables show only their first and last rows.
TABLE_ROWS = 40


@click.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE|RUN...", shell_complete=complete.recipes)
@with_options(set_option)
@click.option("--gpu", type=click.Choice(tuple(GPUS)), metavar="GPU", help="GPU model instead of the recipe's.")
@click.option("--nodes", default="", metavar="N[,N...]", help="Node counts; weak scaling grows the batch.")
@click.option(
    "--sweep",
    "axes",
    multiple=True,
    metavar="KEY=A,B",
    shell_complete=complete.keys,
    help="Submit one run per value; repeatable.",
)
@click.option("--over", "axes_over", multiple=True, hidden=True)
@click.option("--repeat", type=click.IntRange(1, 1000), metavar="N", default=1, help="Runs per point (default: 1).")
@click.option("--seeds", metavar="N[,N...]", help="One run per seed; `compare` averages them.")
@click.option("--vary-seed", is_flag=True, help="With --repeat N: one seed per repeat.")
@click.option("--study", "study", metavar="NAME", help="Name of the study (default: automatic).")
@click.option(
    "--attempts",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Resume after time limits and failures, N attempts in total.",
)
@click.option("--retry-failed", is_flag=True, help="Also resubmit points whose run failed.")
@click.option("--skip-bad", is_flag=True, help="Skip points that fail the check.")
@with_options(*layer_options("submit"))
@click.option("--max-running", type=click.IntRange(min=1), metavar="N", help="Array tasks at a time.")
@with_options(*destination_options)
@click.option("--dry-run", is_flag=True, help="Check and print only; submit nothing.")
@click.option("--wait", is_flag=True, help="Follow to the end; exit code 1 on failure.")
@click.option("--yes", is_flag=True, help="Submit without asking for confirmation.")
@json_option
def submit(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    gpu: str | None,
    nodes: str,
    axes: tuple[str, ...],
    axes_over: tuple[str, ...],
    repeat: int,
    seeds: str | None,
    vary_seed: bool,
    study: str | None,
    attempts: int | None,
    retry_failed: bool,
    skip_bad: bool,
    max_running: int | None,
    cluster: str | None,
    backend_name: str | None,
    root: str | None,
    dry_run: bool,
    wait: bool,
    yes: bool,
    as_json: bool,
    **more: Any,
) -> int:
    """Check recipes, then submit one run per point. Several points form a study.

    \b
    fp8launch submit llama8b_fp8 --dry-run
    fp8launch submit tiny_cpu --sweep train.lr=1e-3,1e-2 --repeat 2

    Run the command again to submit the runs that a study still lacks.
    """
    layers = {option: more.pop(option) for option in extra_layers()}
    slurm = more
    if attempts is not None:
        overrides = (*overrides, Override(f"survive.attempts={attempts}", f"--attempts {attempts}"))
    overrides = with_gpu((*overrides, *time_override(slurm)), gpu)
    if study is not None:
        need_study_name(study)
    counts = parse_nodes(nodes) if nodes else ()
    sources = {name: read_recipe(recipe_named(name, to_run=True, say=eprint)) for name in recipes}
    grid = {"--nodes": nodes, "--sweep": axes + axes_over, "--repeat": repeat > 1, "--seeds": seeds}
    grid |= {"--vary-seed": vary_seed, "--retry-failed": retry_failed, "--skip-bad": skip_bad}
    kind = only_kind(sources, grid)
    bases = {name: load_recipe(source, overrides) for name, source in sources.items() if kind is None}
    varied = dict(map(parse_axis, (*axes, *axes_over)))
    seed_axes = {name: seed_axis(base, varied, repeat, seeds, vary_seed) for name, base in bases.items()}
    points = grid_of(bases, counts, varied, seed_axes, repeat=1 if vary_seed else repeat)
    profile, scheduler = destination("submit", cluster, backend_name, slurm, print_problems)
    for base in bases.values():
        lacking = scheduler.lacks(base.recipe.resources.gpu)
        if lacking:
            print_problems([replace(lacking, where=base.where("resources", "gpu"))], err=True)
    place = run_root(profile, root)
    parts: Sequence[Part] = ()
    if kind is not None:
        source = sources[recipes[0]]
        sequence = recipe_kind(kind).prepare(source, overrides, profile, place, study)
        study, parts = sequence.study, sequence.parts
    is_study = len(points) > 1 or study is not None

    def prepare_point(point: Point) -> Prepared:
        if not point.values and point.nodes is None and len(points) == 1:
            return prepare_loaded(bases[point.recipe], profile)
        values = [Override(text, _place(text, varied, bases[point.recipe])) for text in point.overrides]
        own = own_checkpoint_folder(point, bases[point.recipe].recipe) if len(points) > 1 else []
        return prepare(sources[point.recipe], [*overrides, *values, *own], point.nodes, profile)

    checked_with = profile.model_copy(update={"run_root": str(place)})
    prepared, left_out = prepare_points(points, prepare_point, skip_bad, with_bar)
    prepared += [(Point(recipes[0], None, part.values), part.prepared) for part in parts]
    runs = [run for _, run in prepared]
    results = refuse_errors(runs, checked_with, scheduler, skip=skip_bad, asked=layers, parts=parts)
    ready, bad = ready_points(prepared, results)
    ready = [replace(one, name=part.run_id) for one, part in zip(ready, parts, strict=True)] if parts else ready
    left_out += bad
    for skipped in left_out:
        eprint(f"skipped: {skipped.point.label}")
        print_problems(skipped.problems)
    if not ready:
        raise error("no-points", "every point fails the check", exit_code=ANSWER_IS_NO)
    if dry_run:
        script = None
        if not is_study:
            script = dry_script(ready[0].prepared, profile, place, scheduler, ready[0].job)
        _show_dry(ready, script, as_json)
        return 0
    scheduler.require()
    listeners = run_listeners() if wait else []
    if is_study:
        require_wait(ready, scheduler, wait, kind)
        eprint(f"study {identify(ready, study)} in {place}")
    _confirm(ready, profile, is_study, yes)
    ended: dict[RunFolder, bool] = {}
    if is_study:
        outcome = submit_study(
            ready,
            profile,
            place,
            scheduler,
            name=study,
            retry=retry_failed,
            max_running=max_running,
            left_out=[(skipped.point, skipped.reason) for skipped in left_out],
            between=None if kind else _wait_between(scheduler, listeners, ended),
            kind=kind,
            progress=with_bar,
        )
        _report_study(outcome, kind)
        name, submitted, everything = outcome.study.study_id, outcome.submitted, outcome.submitted + outcome.present
        if kind is not None:
            everything = outcome.study.runs()
    else:
        run = submit_run(ready[0], profile, place, scheduler)
        eprint(_describe_run(ready[0].prepared, run, scheduler.name))
        if wait:
            record_waiting(run)
        name, submitted, everything = run.run_id, [run], [run]
    if note := as_mapping(everything[0].manifest().get("git")).get("note"):
        eprint(f"git: {note}")
    status = 0
    if wait:
        try:
            status = _followed(name, everything, ended, scheduler, listeners, is_study, kind is not None)
        except KeyboardInterrupt:
            if not is_study:
                record_reported(submitted[0])
            raise
    if as_json:
        _show_submitted(name, submitted, len(everything) - len(submitted), is_study)
    else:
        echo(name)
    if not is_study:
        # Record this only after the last line of output: a user who saw only part of it will repeat the command.
        record_reported(submitted[0])
    return status


def _place(text: str, varied: Collection[str], base: LoadedRecipe) -> str:
    """Return where a point's value was set, for messages: an option, or the line of the axis in the recipe."""
    key, _, value = text.partition("=")
    if key in varied:
        return f"--sweep {key}={json.loads(value)}"
    if key in base.recipe.axes:
        return base.where("axes", key)
    return f"--seeds {value}"


def _show_submitted(name: str, submitted: Sequence[RunFolder], present: int, is_study: bool) -> None:
    runs = [{"run": run.run_id, "folder": str(run.path), "jobs": job_ids(run)} for run in submitted]
    if is_study:
        show_json({"study": name, "submitted": runs, "present": present})
    else:
        show_json(runs)


def _followed(
    name: str,
    runs: Sequence[RunFolder],
    ended: dict[RunFolder, bool],
    scheduler: Scheduler,
    listeners: Sequence[RunListener],
    is_study: bool,
    in_sequence: bool,
) -> int:
    """Follow the runs that are not yet in `ended`, and return one exit code for all runs."""
    from fp8launch.cli.follow import wait_for

    for run in runs:
        if run not in ended:
            ended[run] = wait_for(run, scheduler, listeners, brief=is_study)
        if in_sequence and not ended[run]:
            break  # the others wait
    if is_study:
        failed = list(ended.values()).count(False)
        count = f"{failed} of {len(ended)} runs failed" if failed else f"{counted(len(ended), 'run')} completed"
        eprint(f"{count}; `fp8launch compare {name}` puts them side by side")
    return exit_code(all(ended.values()))


def _wait_between(
    scheduler: Scheduler, listeners: Sequence[RunListener], ended: dict[RunFolder, bool]
) -> Callable[[RunFolder], object] | None:
    """Return a function to call after each submission of a study, or None if runs may overlap.

    The function waits for the run and records in `ended` whether it completed, so that it is not followed again.
    """
    if not scheduler.capabilities.one_run_at_a_time:
        return None
    from fp8launch.cli.follow import wait_for

    def wait(run: RunFolder) -> None:
        ended[run] = wait_for(run, scheduler, listeners, brief=True)

    return wait


def _report_study(outcome: Outcome, kind: str | None) -> None:
    if kind is not None:
        news = f"{len(outcome.study.runs())} {kind} submitted: each starts when the one before it is complete"
        eprint(news if outcome.submitted else f"these {kind} were submitted before: {outcome.study.path}")
        return
    submitted = f"{len(outcome.submitted)} submitted"
    if outcome.calls:
        submitted += f" in {counted(outcome.calls, 'call')}"
    eprint(f"{submitted}, {len(outcome.present)} already existed: {outcome.study.path}")


def _confirm(ready: Sequence[GridPoint], profile: Cluster, is_study: bool, yes: bool) -> None:
    """Ask for confirmation before an expensive run or a study."""
    if not is_study and _gpu_hours(ready) <= profile.ask_gpu_hours:
        return
    if is_study:
        _show_points(ready)
    eprint(_cost(ready))
    if not yes:
        confirm("Submit?", "submission")


def _gpu_hours(ready: Sequence[GridPoint]) -> float:
    return sum(one.prepared.gpu_hours_at_most for one in ready)


def _cost(ready: Sequence[GridPoint]) -> str:
    """Describe the maximum cost of the runs."""
    hours = _gpu_hours(ready)
    if not hours:
        return f"{counted(len(ready), 'run')} without a GPU"
    product = "time limits x GPUs"
    if any(one.prepared.jobs_at_most > 1 for one in ready):
        product += " x attempts and phases"
    # Short tests would round to 0.
    digits = 0 if hours >= 10 else 1
    return f"{counted(len(ready), 'run')}, at most {hours:,.{digits}f} GPU-hours ({product})"


def _show_dry(ready: Sequence[GridPoint], script: str | None, as_json: bool) -> None:
    """Print the batch script of a run, or the points of a study."""
    if as_json:
        points = [one.as_json() for one in ready]
        show_json({"script": script, "points": points, "gpu_hours_at_most": _gpu_hours(ready)})
    elif script is None:
        _show_points(ready)
        eprint(_cost(ready))
    else:
        echo(script, nl=False)


def _show_points(ready: Sequence[GridPoint]) -> None:
    rows: list[tuple[str, ...]] = []
    for one in ready:
        need, layout = one.prepared.loaded.recipe.resources, one.prepared.layout
        rows.append(
            (
                one.run_name,
                one.point.label,
                f"{need.nodes} x {need.gpus_per_node} {need.gpu}",
                str(layout.global_batch),
                need.time,
                f"{one.prepared.gpu_hours_at_most:,.1f}",
            )
        )
    if len(rows) > TABLE_ROWS:
        half = TABLE_ROWS // 2
        rows = [*rows[:half], (f"... {len(rows) - 2 * half} more", "", "", "", "", ""), *rows[-half:]]
    columns = ["run", "point", "size", "batch", "time limit", "GPU-hours"]
    if all(one.name is not None for one in ready):
        # The runs of a sequence have names, and are no points of a grid.
        columns.remove("point")
        rows = [(row[0], *row[2:]) for row in rows]
    if not _gpu_hours(ready):
        del columns[-1]
    show_table(
        columns, rows, err=True, unbroken=("run",), drop=("batch", "time limit", "size"), right=("batch", "GPU-hours")
    )


def _describe_run(one: Prepared, run: RunFolder, backend: str) -> str:
    size = one.layout
    need = one.loaded.recipe.resources
    text = (
        f"submitted {one.loaded.recipe.name} as job {', '.join(job_ids(run))} ({backend}): "
        f"{need.nodes} x {need.gpus_per_node} {need.gpu}, DP {size.dp} x TP {size.tp} x PP {size.pp}"
    )
    if size.cp > 1:
        text += f" x CP {size.cp}"
    if one.phases:
        phases = [f"{phase.name} {phase.span}" for phase in one.phases]
        text += f"\nphases {', '.join(phases)}"
    return f"{text}\n{run.path}"
