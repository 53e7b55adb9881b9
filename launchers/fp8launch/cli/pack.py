"""`fp8launch recipes` and `clusters`: what is there."""

from __future__ import annotations

from pathlib import Path

import click

from fp8launch.cli.output import json_option, say, show_json, show_table
from fp8launch.job.cluster import cluster_files, config_folder, load_cluster
from fp8launch.pack import pack_folder
from fp8launch.problems import UserError
from fp8launch.recipe.explain import explained, pack_recipes, places
from fp8launch.runs.submit import prepare


@click.command()
@click.argument("name", required=False)
@json_option
def recipes(name: str | None, as_json: bool) -> None:
    """List the recipes and studies of the pack, or explain one: every value, and the file and line it comes from."""
    if name is not None:
        _explain(name, as_json)
        return
    single, studies = pack_recipes(), pack_recipes("studies")
    if as_json:
        show_json([row.as_dict() for row in [*single, *studies]])
        return
    show_table(
        ["recipe", "model", "GPUs", "precision", "what for"],
        [(row.name, row.model, row.gpus, row.precision, row.recipe.description) for row in single],
    )
    click.echo()
    show_table(
        ["study", "model", "GPUs", "precision", "runs", "what for"],
        [(row.name, row.model, row.gpus, row.precision, str(row.runs), row.recipe.description) for row in studies],
    )


def _explain(name: str, as_json: bool) -> None:
    loaded = prepare(name).loaded
    files = [_short(file) for file in loaded.files]
    if as_json:
        show_json({**loaded.tree.plain(), "places": places(loaded), "files": files})
        return
    say("from " + ", ".join(files))
    click.echo(explained(loaded), nl=False)


@click.command()
@json_option
def clusters(as_json: bool) -> None:
    """List your cluster profiles, and the examples to start from."""
    rows = [*_profiles(cluster_files(), "yours"), *_profiles(_examples(), "example")]
    if as_json:
        show_json([dict(zip(("name", "kind", "file", "description"), row, strict=True)) for row in rows])
    else:
        show_table(["cluster", "kind", "file", "description"], rows)
        if not cluster_files():
            say(
                f"Put a profile of your own into {config_folder()}; one called default.yaml is used when none is named."
            )


def _examples() -> dict[str, Path]:
    return {path.stem: path for path in sorted(pack_folder("clusters").glob("*.yaml"))}


def _profiles(files: dict[str, Path], kind: str) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, path in files.items():
        try:
            description = load_cluster(str(path)).description
        except UserError as exc:
            description = f"does not load: {exc}"
        rows.append((name, kind, str(path), description))
    return rows


def _short(file: Path) -> str:
    try:
        return str(file.resolve().relative_to(pack_folder("recipes").resolve().parent))
    except ValueError:
        return str(file)
