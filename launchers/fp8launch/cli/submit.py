"""`fp8launch submit`: a recipe becomes a run."""

from __future__ import annotations

import click

from fp8launch import backends
from fp8launch.cli.check import refuse_errors
from fp8launch.cli.output import json_option, recipe_options, say, show_json, with_options
from fp8launch.job.cluster import load_cluster
from fp8launch.job.script import batch_script
from fp8launch.problems import ANSWER_IS_NO
from fp8launch.runs.folder import RunFolder
from fp8launch.runs.store import job_ids
from fp8launch.runs.submit import Prepared, new_run_id, plan_run, prepare, run_root
from fp8launch.runs.submit import submit as submit_run


@click.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE...")
@with_options(*recipe_options)
@click.option("--cluster", help="Cluster profile: a name or a file.")
@click.option("--backend", "backend_name", type=click.Choice(backends.NAMES), help="Default: Slurm if it answers.")
@click.option("--run-root", "root", help="Folder for run folders, on a file system that all nodes share.")
@click.option("--dry-run", is_flag=True, help="Check everything and show the script; submit nothing.")
@click.option("--wait", is_flag=True, help="Follow the run to its end; its failure is exit code 1.")
@json_option
def submit(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    nodes: int | None,
    cluster: str | None,
    backend_name: str | None,
    root: str | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
) -> int:
    """Check recipes, then submit one run for each."""
    prepared = [prepare(recipe, overrides, nodes) for recipe in recipes]
    profile = load_cluster(cluster)
    backend = backends.backend(backend_name)
    place = run_root(profile, root)
    checked = refuse_errors(prepared, profile)
    if dry_run:
        for one in prepared:
            job = plan_run(one, profile, place / new_run_id(one.loaded.recipe.name), backend)
            click.echo(backend.script(job)[1] if backend.name == "local" else batch_script(job), nl=False)
        return 0
    submitted: list[RunFolder] = []
    for one, result in zip(prepared, checked, strict=True):
        run = submit_run(one, profile, place, backend, result.as_json())
        submitted.append(run)
        say(_told(one, run, backend.name))
    status = 0
    if wait:
        from fp8launch.cli.follow import wait_for

        results = [wait_for(run, backend) for run in submitted]
        status = 0 if all(results) else ANSWER_IS_NO
    if as_json:
        show_json([{"run": run.run_id, "folder": str(run.path), "jobs": job_ids(run)} for run in submitted])
    else:
        for run in submitted:
            click.echo(run.run_id)
    return status


def _told(one: Prepared, run: RunFolder, backend: str) -> str:
    size = one.layout
    split = f"DP {size.dp} x TP {size.tp} x PP {size.pp}" + (f" x CP {size.cp}" if size.cp > 1 else "")
    need = one.loaded.recipe.resources
    return (
        f"submitted {one.loaded.recipe.name} as job {', '.join(job_ids(run))} ({backend}): "
        f"{need.nodes} x {need.gpus_per_node} {need.gpu}, {split}\n{run.path}"
    )
