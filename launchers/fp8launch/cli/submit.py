"""`fp8launch submit`: recipes become runs, grids become studies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fp8launch.cli import complete
from fp8launch.cli.asking import confirm
from fp8launch.cli.check import refuse_errors
from fp8launch.cli.destination import destination, destination_options
from fp8launch.cli.names import recipe_named
from fp8launch.cli.output import (
    echo,
    eprint,
    json_option,
    print_problems,
    set_option,
    show_json,
    show_table,
    with_bar,
    with_options,
)
from fp8launch.cli.slurm_options import time_override
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import ANSWER_IS_NO, Problem, UserError, error, errors_in, exit_code, problems_of
from fp8launch.engines import engine_of
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared, prepare, prepare_loaded
from fp8launch.recipe.load import LoadedRecipe, load_recipe, read_recipe
from fp8launch.rundir.registry import job_ids, run_root
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Scheduler
from fp8launch.submit.grid import (
    Point,
    expand,
    own_checkpoint_folder,
    parse_axis,
    parse_nodes,
    parse_seeds,
    seeds_from,
)
from fp8launch.submit.submission import record_reported
from fp8launch.submit.submit import new_run_id, plan_run
from fp8launch.submit.submit import submit as submit_run
from fp8launch.submit.submit_study import GridPoint, Outcome, identify, require_wait, submit_study
from fp8launch.wording import counted

# Of a longer table only the first and the last rows are shown.
TABLE_ROWS = 40


@click.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE|RUN...", shell_complete=complete.recipes)
@with_options(set_option)
@click.option("--nodes", default="", metavar="N[,N...]", help="Node counts; weak scaling grows the global batch.")
@click.option(
    "--sweep",
    "axes",
    multiple=True,
    metavar="KEY=A,B",
    shell_complete=complete.keys,
    help="Submit one run per value; repeatable.",
)
@click.option("--over", "axes_over", multiple=True, hidden=True)
@click.option("--repeat", type=click.IntRange(1, 1000), default=1, help="Number of runs per point (default: 1).")
@click.option("--seeds", metavar="N[,N...]", help="Run each point once per seed; `compare` aggregates over the seeds.")
@click.option(
    "--vary-seed",
    is_flag=True,
    help="With --repeat N: give each repeat its own seed.",
)
@click.option("--study", "study", metavar="NAME", help="Name of the study (default: from the recipe and the points).")
@click.option(
    "--attempts",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Resume automatically after time limits and node failures, up to N attempts in total.",
)
@click.option("--retry-failed", is_flag=True, help="Also submit points again whose run failed.")
@click.option("--skip-bad", is_flag=True, help="Skip points that fail the check.")
@click.option(
    "--rehearse/--no-rehearse",
    default=None,
    help="Also run two steps of Megatron's own code first, without a GPU (default: as the cluster profile says).",
)
@click.option("--max-running", type=click.IntRange(min=1), help="Number of array tasks that may run at the same time.")
@with_options(*destination_options)
@click.option("--dry-run", is_flag=True, help="Check, and print the script or the points; submit nothing.")
@click.option("--wait", is_flag=True, help="Follow the runs to their end; exit code 1 if one fails.")
@click.option("--yes", is_flag=True, help="Submit without asking for confirmation.")
@json_option
def submit(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
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
    rehearse: bool | None,
    max_running: int | None,
    cluster: str | None,
    backend_name: str | None,
    root: str | None,
    dry_run: bool,
    wait: bool,
    yes: bool,
    as_json: bool,
    **slurm: Any,
) -> int:
    """Check recipes, then submit one run for each point; several points make a study.

    The same command again submits only what is missing of a study.
    """
    if attempts is not None:
        overrides = (*overrides, f"survive.attempts={attempts}")
    overrides = (*overrides, *time_override(slurm))
    counts = parse_nodes(nodes) if nodes else ()
    sources = {name: read_recipe(recipe_named(name, to_run=True)) for name in recipes}
    bases = {name: load_recipe(source, overrides) for name, source in sources.items()}
    varied = dict(map(parse_axis, (*axes, *axes_over)))
    seed_axes = {name: _seed_axis(base, varied, repeat, seeds, vary_seed) for name, base in bases.items()}
    points = _points(bases, counts, varied, seed_axes, repeat=1 if vary_seed else repeat)
    profile, scheduler = destination("submit", cluster, backend_name, slurm)
    place = run_root(profile, root)
    is_study = len(points) > 1 or study is not None

    def prepare_point(point: Point) -> Prepared:
        if not point.values and point.nodes is None and len(points) == 1:
            return prepare_loaded(bases[point.recipe], profile)
        own = own_checkpoint_folder(point, bases[point.recipe].recipe) if len(points) > 1 else []
        return prepare(sources[point.recipe], [*overrides, *point.overrides, *own], point.nodes, profile)

    checked_with = profile.model_copy(update={"run_root": str(place)})
    ready, left_out = _ready(points, prepare_point, checked_with, scheduler, skip_bad, rehearse)
    if dry_run:
        script = None
        if not is_study:
            script = dry_script(ready[0].prepared, profile, place, scheduler, ready[0].job)
        _show_dry(ready, script, as_json)
        return 0
    scheduler.require()
    if wait:
        from fp8launch.cli.notify import load_config

        load_config()  # a bad one is refused before anything is submitted
    if is_study:
        require_wait(ready, scheduler, wait)
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
            left_out=left_out,
            between=_wait_between(scheduler, ended),
            progress=with_bar,
        )
        _report_study(outcome)
        name, submitted, everything = outcome.study.study_id, outcome.submitted, outcome.submitted + outcome.present
    else:
        run = submit_run(ready[0].prepared, profile, place, scheduler, ready[0].checked, ready[0].job)
        eprint(_describe_run(ready[0].prepared, run, scheduler.name))
        record_reported(run)
        name, submitted, everything = run.run_id, [run], [run]
    status = 0
    if wait:
        status = _followed(name, everything, ended, scheduler, is_study)
    if as_json:
        _show_submitted(name, submitted, len(everything) - len(submitted), is_study)
    else:
        echo(name)
    return status


def _show_submitted(name: str, submitted: Sequence[RunFolder], present: int, is_study: bool) -> None:
    runs = [{"run": run.run_id, "folder": str(run.path), "jobs": job_ids(run)} for run in submitted]
    if is_study:
        show_json({"study": name, "submitted": runs, "present": present})
    else:
        show_json(runs)


def _followed(
    name: str, runs: Sequence[RunFolder], ended: dict[RunFolder, bool], scheduler: Scheduler, is_study: bool
) -> int:
    """Follow the runs that are not in `ended` to their end; return the exit code for all."""
    from fp8launch.cli.follow import wait_for

    for run in runs:
        if run not in ended:
            ended[run] = wait_for(run, scheduler, brief=is_study)
    if is_study:
        failed = list(ended.values()).count(False)
        count = f"{failed} of {len(ended)} runs failed" if failed else f"{counted(len(ended), 'run')} completed"
        eprint(f"{count}; `fp8launch compare {name}` puts them side by side")
    return exit_code(all(ended.values()))


def _wait_between(scheduler: Scheduler, ended: dict[RunFolder, bool]) -> Callable[[RunFolder], object] | None:
    """What happens between two submissions of a grid: a wait for the end where runs go one at a time.

    Whether a run completed goes into `ended`, so that nothing waits for it again.
    """
    if not scheduler.capabilities.one_run_at_a_time:
        return None
    from fp8launch.cli.follow import wait_for

    def wait(run: RunFolder) -> None:
        ended[run] = wait_for(run, scheduler, brief=True)

    return wait


def _report_study(outcome: Outcome) -> None:
    submitted = f"{len(outcome.submitted)} submitted"
    if outcome.calls:
        submitted += f" by {outcome.calls} calls"
    eprint(f"{submitted}, {len(outcome.present)} already existed: {outcome.study.path}")


def _seed_axis(
    base: LoadedRecipe, axes: Mapping[str, list[Any]], repeat: int, seeds: str | None, vary_seed: bool
) -> dict[str, list[Any]]:
    """Return the axis that `--seeds` or `--vary-seed` requests for a recipe; empty without either."""
    if seeds is None and not vary_seed:
        return {}
    option = "--vary-seed" if vary_seed else "--seeds"
    if vary_seed and seeds is not None:
        raise error("two-options", "--seeds states what --vary-seed would choose", option, "pass one of them")
    if vary_seed and repeat < 2:
        raise error("no-repeats", "there is one run per point", option, "add --repeat with at least 2")
    engine = engine_of(base)
    if engine.seed_key in axes:
        message = f"--sweep {engine.seed_key} and {option} both state the seeds"
        raise error("two-options", message, option, "pass one of them")
    if seeds is not None:
        return {engine.seed_key: parse_seeds(seeds)}
    return {engine.seed_key: seeds_from(engine.stated_seed(base.recipe), repeat)}


def _points(
    bases: Mapping[str, LoadedRecipe],
    nodes: Sequence[int],
    axes: Mapping[str, list[Any]],
    seed_axes: Mapping[str, Mapping[str, list[Any]]],
    repeat: int,
) -> list[Point]:
    """Return the grid of each recipe: its own axes, with those of the command line added or in their place.

    Repeats and seeds vary slowest: a study that is cut short has one run of every point.
    """
    found: list[tuple[int, int, Point]] = []
    for name, base in bases.items():
        recipe = base.recipe
        every = {**recipe.axes, **axes, **seed_axes[name]}
        for point in expand([name], nodes or recipe.nodes or [], every, repeat):
            turn = sum(seeds.index(point.values[key]) for key, seeds in seed_axes[name].items())
            found.append((point.repeat, turn, point))
    return [point for _, _, point in sorted(found, key=lambda one: one[:2])]


def _ready(
    points: Sequence[Point],
    prepare_point: Callable[[Point], Prepared],
    profile: Cluster,
    scheduler: Scheduler,
    skip_bad: bool,
    rehearse: bool | None,
) -> tuple[list[GridPoint], list[tuple[Point, str]]]:
    """Prepare and check points. Bad ones are errors; with `skip_bad` they are printed and left out, with the reason."""
    prepared, refused = _prepared(points, prepare_point)
    if refused and not skip_bad:
        reasons = refused.values()
        raise UserError(problems_of(reasons), max(reason.exit_code for reason in reasons))
    checked = refuse_errors(list(prepared.values()), profile, scheduler, skip=skip_bad, rehearse=rehearse)
    left_out = []
    for position, reason in refused.items():
        left_out.append(_left_out(points[position], reason.problems))
    ready = []
    for (position, one), result in zip(prepared.items(), checked, strict=True):
        if result.ok:
            ready.append(GridPoint(points[position], one, result.as_json(), result.job))
        else:
            left_out.append(_left_out(points[position], result.problems))
    if not ready:
        raise error("no-points", "every point fails the check", exit_code=ANSWER_IS_NO)
    return ready, left_out


def _prepared(
    points: Sequence[Point], prepare_point: Callable[[Point], Prepared]
) -> tuple[dict[int, Prepared], dict[int, UserError]]:
    """Prepare points: the runs, and what is wrong with the others, by their positions. A single bad point is raised."""
    prepared: dict[int, Prepared] = {}
    refused: dict[int, UserError] = {}
    for position, point in enumerate(with_bar(points, "reading recipes")):
        try:
            prepared[position] = prepare_point(point)
        except UserError as exc:
            if len(points) == 1:
                raise
            refused[position] = exc
    return prepared, refused


def _left_out(point: Point, problems: Sequence[Problem]) -> tuple[Point, str]:
    eprint(f"skipped: {point.label}")
    print_problems(problems)
    codes = dict.fromkeys(problem.code for problem in errors_in(problems))
    return point, f"fails the check: {', '.join(codes)}"


def _confirm(ready: Sequence[GridPoint], profile: Cluster, is_study: bool, yes: bool) -> None:
    """Ask once before an expensive run, or before a grid."""
    hours = sum(one.prepared.gpu_hours_at_most for one in ready)
    if not is_study and hours <= profile.ask_gpu_hours:
        return
    if is_study:
        _show_points(ready)
    product = "time limits x GPUs"
    if any(one.prepared.jobs_at_most > 1 for one in ready):
        product += " x attempts and phases"
    eprint(f"{counted(len(ready), 'run')}, at most {hours:,.0f} GPU-hours ({product})")
    if not yes:
        confirm("Submit?", "submission")


def dry_script(one: Prepared, profile: Cluster, place: Path, scheduler: Scheduler, planned: Job | None) -> str:
    """Return the script that a submission of this run would give to the scheduler."""
    job = plan_run(one, profile, place / new_run_id(one.loaded.recipe.name), scheduler, planned)
    return scheduler.script(job)[1]


def _show_dry(ready: Sequence[GridPoint], script: str | None, as_json: bool) -> None:
    """Print the script of a run, or the points of a study."""
    if as_json:
        show_json({"script": script, "points": [_point_as_json(one) for one in ready]})
    elif script is None:
        _show_points(ready)
    else:
        echo(script, nl=False)


def _point_as_json(one: GridPoint) -> dict[str, Any]:
    need = one.prepared.loaded.recipe.resources
    return {
        "run": one.run_name,
        "point": one.point.label,
        "nodes": need.nodes,
        "gpus_per_node": need.gpus_per_node,
        "gpu": need.gpu,
        "global_batch": one.prepared.layout.global_batch,
        "time": need.time,
        "gpu_hours": one.prepared.gpu_hours_at_most,
    }


def _show_points(ready: Sequence[GridPoint]) -> None:
    rows = []
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
