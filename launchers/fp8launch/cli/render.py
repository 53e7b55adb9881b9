"""`fp8launch render`: what would run, without running it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from fp8launch.cli import complete
from fp8launch.cli.names import recipe_named
from fp8launch.cli.output import cluster_option, echo, json_option, recipe_options, show_json, with_options
from fp8launch.cluster.runtimes import Runtime
from fp8launch.diagnostics import error
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared, prepare_loaded
from fp8launch.job.resolved import engine_record, phase_entry, resolved_yaml
from fp8launch.job.shell_quoting import flag_lines
from fp8launch.recipe.load import load_recipe
from fp8launch.recipe.stored_data import has_relative_data

if TYPE_CHECKING:
    from fp8launch.cluster.profile import Cluster


@click.command()
@click.argument("recipe", metavar="RECIPE|RUN", shell_complete=complete.recipes)
@click.option(
    "--as",
    "form",
    type=click.Choice(["args", "sbatch", "yaml", "json"]),
    default="args",
    show_default=True,
    help="Output: Megatron's arguments, the batch script, the resolved recipe, or all (json).",
)
@with_options(*recipe_options)
@cluster_option
@click.option("--runtime", type=click.Choice(get_args(Runtime)), help="Container runtime of the batch script.")
@click.option("--phase", help="Render only this phase of a recipe with phases.")
@click.option("--portable", is_flag=True, help="Render a batch script for plain sbatch that needs no run folder.")
@json_option
def render(
    recipe: str,
    form: str,
    overrides: tuple[str, ...],
    nodes: int | None,
    cluster: str | None,
    runtime: Runtime | None,
    phase: str | None,
    portable: bool,
    as_json: bool,
) -> None:
    """Show what a recipe turns into, or the one that a run was submitted with."""
    loaded = load_recipe(recipe_named(recipe), overrides, nodes)
    profile = None
    if has_relative_data(loaded) or form in ("sbatch", "json"):
        from fp8launch.cluster.profile import load_cluster

        profile = load_cluster(cluster)
    prepared = prepare_loaded(loaded, profile)
    if phase is not None:
        prepared = _one(prepared, phase)
    if form == "args":
        _show_arguments(prepared, as_json)
    elif form == "yaml":
        if as_json:
            show_json({"yaml": resolved_yaml(prepared)})
        else:
            echo(resolved_yaml(prepared), nl=False)
    elif profile is not None:
        job = _job(prepared, profile, runtime, portable)
        if form == "sbatch":
            from fp8launch.job.batch_script import batch_script

            if as_json:
                show_json({"script": batch_script(job)})
            else:
                echo(batch_script(job), nl=False)
        else:
            _show_json(prepared, job)


def _job(prepared: Prepared, profile: Cluster, runtime: Runtime | None, portable: bool) -> Job:
    """The job as it would be on the cluster. Neither the runtime nor the cluster's files need to be on this machine."""
    from fp8launch.job.build_job import plan
    from fp8launch.rundir.registry import run_root

    folder = None if portable else run_root(profile, None) / f"{prepared.loaded.recipe.name}-RUN"
    return plan(prepared, profile, folder, runtime=runtime or profile.runtime or "pyxis", check_paths=False)


def _show_json(prepared: Prepared, job: Job) -> None:
    show_json(
        {
            "recipe": prepared.loaded.tree.plain(),
            "files": [str(Path(file)) for file in prepared.loaded.files],
            "engine": engine_record(prepared, job),
            "megatron": {"version": prepared.args.version, "argv": list(prepared.args.argv)},
            "arguments": dict(prepared.args.attributes),
            "phases": list(map(phase_entry, prepared.phases)),
            "layout": asdict(prepared.layout),
            "job": job.as_json(),
        }
    )


def _one(prepared: Prepared, name: str) -> Prepared:
    """A phase by itself."""
    names = [one.name for one in prepared.phases]
    if name not in names:
        there = f"phases: {', '.join(names)}" if names else "the recipe has no phases"
        raise error("no-phase", f"'{name}' is not a phase of this recipe", "--phase", there)
    return prepared.parts[names.index(name)]


def _show_arguments(prepared: Prepared, as_json: bool) -> None:
    """Megatron's exact arguments; of a recipe with phases those of each, by name."""
    if as_json:
        lists = {one.name: list(one.args.argv) for one in prepared.phases}
        show_json(lists or list(prepared.args.argv))
        return
    for one in prepared.phases:
        echo(f"# phase {one.name}: iterations {one.span}")
        echo("\n".join(flag_lines(one.args.all)))
    if not prepared.phases:
        echo("\n".join(flag_lines(prepared.args.all)))
