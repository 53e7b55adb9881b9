"""`fp8launch render`: what would run, without running it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click

from fp8launch.cli.output import json_option, recipe_options, show_json, with_options
from fp8launch.job.cluster import Runtime, load_cluster
from fp8launch.job.plan import plan
from fp8launch.job.script import batch_script
from fp8launch.job.words import flag_lines
from fp8launch.problems import error
from fp8launch.runs.submit import Prepared, phase_entry, prepare, resolved_yaml, run_root


@click.command()
@click.argument("recipe")
@click.option(
    "--as",
    "form",
    type=click.Choice(["args", "sbatch", "yaml", "json"]),
    default="args",
    show_default=True,
    help="Megatron's arguments, the batch script, the resolved recipe, or all of it.",
)
@with_options(*recipe_options)
@click.option("--cluster", help="Cluster profile: a name or a file.")
@click.option("--runtime", type=click.Choice(get_args(Runtime)), help="Container runtime of the batch script.")
@click.option("--phase", help="This phase alone, of a recipe with phases.")
@click.option("--portable", is_flag=True, help="A batch script for plain sbatch, which finds its places when it runs.")
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
    """Show what a recipe turns into."""
    prepared = prepare(recipe, overrides, nodes)
    if phase is not None:
        prepared = _one(prepared, phase)
    if form == "args":
        _show_arguments(prepared, as_json)
    elif form == "yaml":
        click.echo(resolved_yaml(prepared), nl=False)
    else:
        profile = load_cluster(cluster)
        folder = None if portable else run_root(profile, None) / f"{prepared.loaded.recipe.name}-RUN"
        # Shown on a laptop as well: neither the runtime nor the files of the cluster need to be here.
        job = plan(
            prepared.loaded,
            prepared.args,
            profile,
            folder,
            phases=prepared.phases,
            runtime=runtime or profile.runtime or "pyxis",
            check_paths=False,
        )
        if form == "sbatch":
            click.echo(batch_script(job), nl=False)
        else:
            show_json(
                {
                    "recipe": prepared.loaded.tree.plain(),
                    "files": [str(Path(file)) for file in prepared.loaded.files],
                    "megatron": {"version": prepared.args.version, "argv": list(prepared.args.argv)},
                    "phases": [phase_entry(one) for one in prepared.phases],
                    "layout": asdict(prepared.layout),
                    "job": asdict(job),
                }
            )


def _one(prepared: Prepared, name: str) -> Prepared:
    """A phase by itself."""
    names = [one.name for one in prepared.phases]
    if name not in names:
        there = f"there are: {', '.join(names)}" if names else "the recipe has none"
        raise error("no-phase", f"there is no phase '{name}'", "--phase", there)
    return prepared.parts[names.index(name)]


def _show_arguments(prepared: Prepared, as_json: bool) -> None:
    """Megatron's exact arguments; of a recipe with phases those of each, by name."""
    lists = {one.name: one.args.argv for one in prepared.phases}
    if as_json:
        show_json({name: list(argv) for name, argv in lists.items()} or list(prepared.args.argv))
        return
    for one in prepared.phases:
        click.echo(f"# phase {one.name}: iterations {one.span}")
        click.echo("\n".join(flag_lines(one.args.argv)))
    if not prepared.phases:
        click.echo("\n".join(flag_lines(prepared.args.argv)))
