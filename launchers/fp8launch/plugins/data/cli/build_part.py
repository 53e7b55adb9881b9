"""`fp8launch data build-part`: the program of the jobs of `data build --cluster`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fp8launch.cli.output import echo, eprint
from fp8launch.diagnostics import ANSWER_IS_NO, error
from fp8launch.plugins.data.build import EngineChanged, build_here, complete, cores, engine_for, missing
from fp8launch.plugins.data.cli.progress import shown_progress
from fp8launch.plugins.data.cli.report import described, report_skipped
from fp8launch.plugins.data.files import only_one
from fp8launch.plugins.data.plan import load_plan, require_own

HELD_SECONDS = 120.0


@click.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--task", type=click.IntRange(min=0))
@click.option("--of", "tasks", type=click.IntRange(min=1), default=1)
@click.option("--merge", is_flag=True)
@click.option("--on-error", type=click.Choice(["fail", "skip"]), default="fail")
@click.option("--engine", type=click.Choice(["auto", "gigatoken", "tokenizers"]), default="auto")
def build_part(folder: Path, task: int | None, tasks: int, merge: bool, on_error: str, engine: str) -> None:
    """Build every TASKS-th shard of a planned build, or merge all shards."""
    plan = load_plan(folder)
    if plan is None:
        raise error("data-plan", f"{folder} has no plan", str(folder), "use `data build`", ANSWER_IS_NO)
    require_own(folder)
    chosen = engine_for(plan, engine, eprint)
    if merge:
        left = missing(plan)
        if left:
            message = f"{len(left)} of {len(plan.shards)} shards are not finished"
            raise error("data-shards", message, str(folder), "give the `data build` command again", ANSWER_IS_NO)
        # The command that submitted this job may still hold the lock of the folder.
        with only_one(folder, wait=HELD_SECONDS):
            outcome = complete(plan, chosen)
        report_skipped(outcome.manifest["skipped"], outcome.examples)
        echo(described(outcome.manifest))
        return
    numbers = range(task or 0, len(plan.shards), tasks)
    try:
        with shown_progress() as progress:
            build_here(plan, chosen, _processes(), on_error == "skip", progress, eprint, only=numbers)
    except EngineChanged as exc:
        fix = "give the `data build` command again with --engine tokenizers --restart"
        raise error("data-engine", str(exc), str(folder), fix, ANSWER_IS_NO) from None


def _processes() -> int:
    """Return the number of CPUs that Slurm allocated, even if it does not bind processes to them."""
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    if not given.isdecimal() or int(given) == 0:
        return cores()
    return min(cores(), int(given))
