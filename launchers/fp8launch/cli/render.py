"""`fp8launch render`: print what would run, without running it."""

from __future__ import annotations

from typing import get_args

import click

from fp8launch.cli import complete
from fp8launch.cli.output import cluster_option, echo, eprint, json_option, recipe_options, show_json, with_options
from fp8launch.cluster.runtimes import Runtime
from fp8launch.job.prepared import Prepared, phase_of, prepare_loaded, resolved_yaml
from fp8launch.job.shell_quoting import flag_lines
from fp8launch.recipe.load import load_recipe
from fp8launch.recipe.stored_data import has_relative_data
from fp8launch.rundir.names import recipe_named


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
    """Show what a recipe turns into: arguments, batch script, resolved recipe. Name a run to use its recipe."""
    loaded = load_recipe(recipe_named(recipe, say=eprint), overrides, nodes)
    profile = None
    if has_relative_data(loaded) or form in ("sbatch", "json"):
        from fp8launch.cluster.profile import load_cluster

        profile = load_cluster(cluster)
    prepared = prepare_loaded(loaded, profile)
    if phase is not None:
        prepared = phase_of(prepared, phase)
    if form == "args":
        _show_arguments(prepared, as_json)
    elif form == "yaml":
        _show_text("yaml", resolved_yaml(prepared), as_json)
    elif profile is not None:
        from fp8launch import schedulers
        from fp8launch.submit.rendering import rendered_job, rendered_json

        job = rendered_job(prepared, profile, runtime, portable)
        if form == "json":
            show_json(rendered_json(prepared, job))
        else:
            _show_text("script", schedulers.cluster().script(job)[1], as_json)


def _show_text(field: str, text: str, as_json: bool) -> None:
    if as_json:
        show_json({field: text})
    else:
        echo(text, nl=False)


def _show_arguments(prepared: Prepared, as_json: bool) -> None:
    """Print Megatron's arguments, separately for each phase if the recipe has phases."""
    if as_json:
        lists = {one.name: list(one.args.argv) for one in prepared.phases}
        show_json(lists or list(prepared.args.argv))
        return
    for one in prepared.phases:
        echo(f"# phase {one.name}: iterations {one.span}")
        echo("\n".join(flag_lines(one.args.all)))
    if not prepared.phases:
        echo("\n".join(flag_lines(prepared.args.all)))
