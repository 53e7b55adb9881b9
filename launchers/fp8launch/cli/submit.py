"""`fp8launch submit`: recipes become runs, grids become studies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fp8launch import backends
from fp8launch.backends.base import Backend
from fp8launch.cli.check import refuse_errors
from fp8launch.cli.output import (
    complain,
    json_option,
    say,
    set_option,
    show_json,
    show_table,
    with_bar,
    with_options,
)
from fp8launch.job.cluster import Cluster, load_cluster
from fp8launch.job.script import batch_script
from fp8launch.problems import ANSWER_IS_NO, Problem, UserError, error
from fp8launch.recipe.load import load_recipe
from fp8launch.runs.folder import RunFolder
from fp8launch.runs.grid import Point, expand, parse_axis, parse_nodes
from fp8launch.runs.store import job_ids
from fp8launch.runs.submit import Prepared, new_run_id, plan_run, prepare, run_root
from fp8launch.runs.submit import submit as submit_run
from fp8launch.runs.submit_study import GridPoint, identify, need_local_wait, submit_study

# A table of more points than this says less than its first and last ones.
TABLE_ROWS = 40


@click.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE...")
@with_options(set_option)
@click.option("--nodes", default="", metavar="N[,N...]", help="Node counts; weak scaling grows the batch with them.")
@click.option("--over", "axes", multiple=True, metavar="KEY=A,B", help="One run for each value; repeatable.")
@click.option("--repeat", type=click.IntRange(1, 1000), default=1, help="Run every point this often.")
@click.option("--study", "study", metavar="NAME", help="Name of the study; default: from the recipe and the points.")
@click.option("--attempts", type=click.IntRange(1, 1000), help="Go on by itself over time limits and lost nodes.")
@click.option("--retry-failed", is_flag=True, help="Submit those points again whose run failed.")
@click.option("--skip-bad", is_flag=True, help="Leave out points that fail the check.")
@click.option("--max-running", type=click.IntRange(min=1), help="Array tasks that may run at the same time.")
@click.option("--cluster", help="Cluster profile: a name or a file.")
@click.option("--backend", "backend_name", type=click.Choice(backends.NAMES), help="Default: Slurm if it answers.")
@click.option("--run-root", "root", help="Folder for run folders, on a file system that all nodes share.")
@click.option("--dry-run", is_flag=True, help="Check everything, show the script or the points; submit nothing.")
@click.option("--wait", is_flag=True, help="Follow the runs to their end; a failure is exit code 1.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def submit(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    nodes: str,
    axes: tuple[str, ...],
    repeat: int,
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
) -> int:
    """Check recipes, then submit one run for each point; several points make a study.

    The same command again submits only what is missing of a study.
    """
    if attempts is not None:
        overrides = (*overrides, f"survive.attempts={attempts}")
    points = _points(recipes, overrides, parse_nodes(nodes) if nodes else [], dict(map(parse_axis, axes)), repeat)
    profile = load_cluster(cluster)
    if profile.ssh is not None:
        fix = f"fp8launch --at {cluster or profile.name} submit ..."
        raise error("needs-at", f"the cluster '{profile.name}' is submitted to on its login node", "--cluster", fix)
    backend = backends.backend(backend_name)
    place = run_root(profile, root)
    is_study = len(points) > 1 or study is not None
    ready, left_out = _ready(points, overrides, profile, skip_bad)
    if dry_run:
        _show_dry(ready, profile, backend, place, is_study)
        return 0
    if is_study:
        need_local_wait(ready, backend, wait)
        say(f"study {identify(ready, study)} in {place}")
    _agree(ready, profile, is_study, yes)
    if is_study:
        from fp8launch.cli.follow import wait_for

        local = backend.name == "local"
        outcome = submit_study(
            ready,
            profile,
            place,
            backend,
            name=study,
            retry=retry_failed,
            max_running=max_running,
            left_out=left_out,
            between=(lambda run: wait_for(run, backend)) if local else None,
            progress=with_bar,
        )
        submitted, everything = outcome.submitted, outcome.submitted + outcome.present
        calls = f" by {outcome.sbatch_calls} calls" if outcome.sbatch_calls else ""
        say(f"{len(submitted)} submitted{calls}, {len(outcome.present)} were there: {outcome.study.path}")
        name = outcome.study.study_id
    else:
        run = submit_run(ready[0].prepared, profile, place, backend, ready[0].checked)
        submitted = everything = [run]
        say(_told(ready[0].prepared, run, backend.name))
        name = run.run_id
    status = 0
    if wait:
        from fp8launch.cli.follow import wait_for

        ended = [wait_for(run, backend) for run in everything]
        status = 0 if all(ended) else ANSWER_IS_NO
    if as_json:
        runs = [{"run": run.run_id, "folder": str(run.path), "jobs": job_ids(run)} for run in submitted]
        show_json(runs if not is_study else {"study": name, "submitted": runs, "present": len(everything) - len(runs)})
    else:
        click.echo(name)
    return status


def _points(
    recipes: Sequence[str], overrides: Sequence[str], nodes: Sequence[int], axes: dict[str, list[Any]], repeat: int
) -> list[Point]:
    """The grid of each recipe: its own axes, with those of the command line added or in their place."""
    found: list[Point] = []
    for name in recipes:
        recipe = load_recipe(name, overrides).recipe
        found += expand([name], nodes or recipe.nodes or [], {**recipe.axes, **axes}, repeat)
    return sorted(found, key=lambda point: point.repeat)


def _ready(
    points: Sequence[Point], overrides: Sequence[str], profile: Cluster, skip_bad: bool
) -> tuple[list[GridPoint], list[tuple[Point, str]]]:
    """Points prepared and checked. Bad ones are errors, or told and left out, with why, when that is asked for."""
    prepared: list[tuple[Point, Prepared]] = []
    refused: list[tuple[Point, UserError]] = []
    for point in with_bar(points, "reading recipes"):
        try:
            prepared.append((point, prepare(point.recipe, [*overrides, *point.overrides], point.nodes)))
        except UserError as exc:
            if len(points) == 1:
                raise
            refused.append((point, exc))
    if refused and not skip_bad:
        problems = dict.fromkeys(p for _, reason in refused for p in reason.problems)
        raise UserError(problems, max(reason.exit_code for _, reason in refused))
    checked = refuse_errors([one for _, one in prepared], profile, skip=skip_bad)
    left_out = []
    for point, reason in refused:
        left_out.append(_left_out(point, reason.problems))
    ready = []
    for (point, one), result in zip(prepared, checked, strict=True):
        if result.ok:
            ready.append(GridPoint(point, one, result.as_json()))
        else:
            left_out.append(_left_out(point, result.problems))
    if not ready:
        raise error("no-points", "every point fails the check", exit_code=ANSWER_IS_NO)
    return ready, left_out


def _left_out(point: Point, problems: Sequence[Problem]) -> tuple[Point, str]:
    say(f"left out: {point.label}")
    complain(problems)
    codes = dict.fromkeys(problem.code for problem in problems if problem.severity == "error")
    return point, f"fails the check: {', '.join(codes)}"


def _agree(ready: Sequence[GridPoint], profile: Cluster, is_study: bool, yes: bool) -> None:
    """Ask once before what costs a lot, or before a grid."""
    hours = sum(one.prepared.gpu_hours_at_most for one in ready)
    if not is_study and hours <= profile.ask_gpu_hours:
        return
    if is_study:
        _show_points(ready)
    several = " x attempts and phases" if any(one.prepared.jobs_at_most > 1 for one in ready) else ""
    say(f"{len(ready)} run{'s' * (len(ready) > 1)}, at most {hours:,.0f} GPU-hours (time limits x GPUs{several})")
    if yes:
        return
    if not sys.stdin.isatty():
        raise error("not-asked", "nobody is here to agree to this submission", fix="add --yes")
    if not click.confirm("Submit?", err=True):
        raise error("declined", "nothing was submitted", exit_code=ANSWER_IS_NO)


def _show_dry(ready: Sequence[GridPoint], profile: Cluster, backend: Backend, place: Path, is_study: bool) -> None:
    if is_study:
        _show_points(ready)
        return
    one = ready[0].prepared
    job = plan_run(one, profile, place / new_run_id(one.loaded.recipe.name), backend)
    click.echo(backend.script(job)[1] if backend.name == "local" else batch_script(job), nl=False)


def _show_points(ready: Sequence[GridPoint]) -> None:
    rows = []
    for one in ready:
        need, layout = one.prepared.loaded.recipe.resources, one.prepared.layout
        rows.append(
            (
                one.run_name,
                f"{need.nodes} x {need.gpus_per_node} {need.gpu}",
                one.point.label,
                str(layout.global_batch),
                need.time,
                f"{one.prepared.gpu_hours_at_most:,.1f}",
            )
        )
    if len(rows) > TABLE_ROWS:
        half = TABLE_ROWS // 2
        rows = [*rows[:half], (f"... {len(rows) - 2 * half} more", "", "", "", "", ""), *rows[-half:]]
    show_table(["run", "size", "point", "global batch (seq)", "time limit", "GPU-hours (at most)"], rows, err=True)


def _told(one: Prepared, run: RunFolder, backend: str) -> str:
    size = one.layout
    split = f"DP {size.dp} x TP {size.tp} x PP {size.pp}" + (f" x CP {size.cp}" if size.cp > 1 else "")
    need = one.loaded.recipe.resources
    phases = f"\nphases {', '.join(f'{phase.name} {phase.span}' for phase in one.phases)}" if one.phases else ""
    return (
        f"submitted {one.loaded.recipe.name} as job {', '.join(job_ids(run))} ({backend}): "
        f"{need.nodes} x {need.gpus_per_node} {need.gpu}, {split}{phases}\n{run.path}"
    )
