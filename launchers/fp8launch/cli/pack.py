"""`fp8launch recipes`, `images` and `clusters`: what is there."""

from __future__ import annotations

from pathlib import Path

import click

from fp8launch.cli.output import json_option, say, show_json, show_table
from fp8launch.job.cluster import cluster_files, config_folder, load_cluster
from fp8launch.job.images import catalogue
from fp8launch.pack import pack_folder
from fp8launch.problems import UserError
from fp8launch.recipe.load import load_recipe
from fp8launch.runs.submit import prepare, resolved_yaml


@click.command()
@click.argument("name", required=False)
@json_option
def recipes(name: str | None, as_json: bool) -> None:
    """List the recipes of the pack, or show one resolved, with the files that it comes from."""
    if name is not None:
        prepared = prepare(name)
        if as_json:
            show_json(prepared.loaded.tree.plain())
            return
        say("from " + ", ".join(_short(file) for file in prepared.loaded.files))
        click.echo(resolved_yaml(prepared), nl=False)
        return
    found = [load_recipe(str(path)).recipe for path in sorted(pack_folder("recipes").glob("*.yaml"))]
    if as_json:
        show_json(
            [
                {
                    "name": r.name,
                    "description": r.description,
                    "gpu": r.resources.gpu,
                    "gpus": r.resources.world_size,
                    "precision": r.precision.recipe if r.precision else None,
                }
                for r in found
            ]
        )
        return
    show_table(
        ["recipe", "GPUs", "precision", "what for"],
        [
            (
                r.name,
                f"{r.resources.nodes} x {r.resources.gpus_per_node} {r.resources.gpu}",
                r.precision.recipe if r.precision else "",
                r.description,
            )
            for r in found
        ],
    )


@click.command()
@json_option
def images(as_json: bool) -> None:
    """List the image names that recipes can use."""
    known = catalogue()
    if as_json:
        show_json(known)
    else:
        show_table(["image", "URI", "source"], [(name, e["uri"], e.get("source", "")) for name, e in known.items()])


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
            say(f"Put a profile of your own into {config_folder()}; one called default.yaml is used when none is named.")


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
