"""`fp8launch recipes`: list the pack's recipes and studies, or explain one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import click

from fp8launch import engines, plugin_registry
from fp8launch.cli import complete
from fp8launch.cli.output import echo, eprint, json_option, show_json, show_table
from fp8launch.diagnostics import did_you_mean, error
from fp8launch.hardware.gpus import GPUS
from fp8launch.hardware.quantization import precision_names
from fp8launch.job.prepared import prepare
from fp8launch.recipe.catalog import Part, Row, explained, pack_parts, pack_recipes, places
from fp8launch.resources import pack_folder
from fp8launch.rundir.names import recipe_named

# Lists recipes or explains one. Takes a name or None, a release, the filters, and the values of --published and --json.
Listing: TypeAlias = "Callable[[str | None, str | None, Mapping[str, str | None], bool, bool], None]"
_PUBLISHED = plugin_registry.offered("published_recipes")
_ABSENT = plugin_registry.absent("published_recipes")


@click.command()
@click.argument("name", required=False, shell_complete=complete.recipes)
@click.option("--engine", type=click.Choice([engines.default().name, *_PUBLISHED, *_ABSENT]),
              default=engines.default().name, show_default=True,
              help="The pack's own recipes, or NVIDIA's performance recipes of Megatron-Bridge.")  # fmt: skip
@click.option("--gpu", metavar="GPU", help="Only recipes for this GPU, such as h100.")
@click.option("--model", metavar="TEXT", help="Only recipes whose model's name contains TEXT, such as qwen3.")
@click.option("--precision", metavar="NAME", help="Only recipes of this precision, such as mxfp8.")
@click.option("--kind", metavar="KIND", help="List only this kind, such as recipes, studies, models or hardware.")
@click.option("--release", metavar="X.Y.Z", help="With --engine bridge: the release (default: the newest known).")
@click.option(
    "--published",
    is_flag=True,
    help="With --engine bridge: all throughputs that NVIDIA publishes, each with its recipe or why it has none.",
)
@json_option
def recipes(
    name: str | None,
    engine: str,
    gpu: str | None,
    model: str | None,
    precision: str | None,
    kind: str | None,
    release: str | None,
    published: bool,
    as_json: bool,
) -> None:
    """List the recipes and studies of the pack and the parts that recipes extend, or explain one.

    An explanation shows every value and the file and line that set it.

    With --engine bridge, or a NAME such as bridge:RECIPE, list or explain Megatron-Bridge's performance recipes.
    """
    prefix, colon, plain_name = (name or "").partition(":")
    if colon and prefix in _PUBLISHED:
        engine, name = prefix, plain_name
    if absent := plugin_registry.absent_error("published_recipes", engine, f"--engine {engine}", "--engine"):
        raise absent
    if engine not in _PUBLISHED:
        if release is not None:
            raise click.UsageError("--release needs --engine bridge")
        if published:
            raise click.UsageError("--published needs --engine bridge")
        if name is not None:
            _explain(name, as_json)
        else:
            _list(gpu, model, precision, kind, as_json)
        return
    if published and name is not None:
        raise click.UsageError("--published lists the figures of all recipes: leave out the name, or use --model")
    filters = {"gpu": gpu, "model": model, "precision": precision}
    listing: Listing = plugin_registry.load(_PUBLISHED[engine])
    listing(name, release, filters, published, as_json)


def _list(gpu: str | None, model: str | None, precision: str | None, kind: str | None, as_json: bool) -> None:
    """List the recipes, studies or parts of the pack that match the filters."""
    if gpu is not None:
        _known("--gpu", gpu.lower(), GPUS)
    if precision is not None:
        _known("--precision", precision.lower(), precision_names())
    parts = pack_parts()
    kinds = ("recipes", "studies", *dict.fromkeys(part.kind for part in parts))
    if kind is not None:
        _known("--kind", kind, kinds)
    if kind not in (None, "recipes", "studies"):
        _show_parts([part for part in parts if part.kind == kind], as_json)
        return
    single: list[Row] = []
    studies: list[Row] = []
    if kind != "studies":
        single = _fitting(pack_recipes(), gpu, model, precision)
    if kind != "recipes":
        studies = _fitting(pack_recipes("studies"), gpu, model, precision)
    if as_json:
        show_json(list(map(Row.as_dict, [*single, *studies])))
        return
    _show_rows(single, studies)
    if kind is None and not (gpu or model or precision):
        eprint(f"parts to extend: `fp8launch recipes --kind KIND`, for {', '.join(kinds[2:])}")


def _show_rows(single: Sequence[Row], studies: Sequence[Row]) -> None:
    if not single and not studies:
        eprint("no recipe of the pack fits these filters; `fp8launch recipes` lists all")
    if single:
        show_table(
            ["recipe", "model", "GPUs", "precision", "description"],
            map(attrgetter("name", "model", "gpus", "precision", "recipe.description"), single),
            unbroken=("recipe",),
            drop=("model",),
        )
    if single and studies:
        echo()
    if studies:
        rows = []
        for row in studies:
            rows.append((row.name, row.model, row.gpus, row.precision, str(row.runs), row.recipe.description))
        show_table(
            ["study", "model", "GPUs", "precision", "runs", "description"],
            rows,
            unbroken=("study",),
            drop=("model", "precision"),
        )


def _known(option: str, value: str, known: Iterable[str]) -> None:
    """Raise UserError, with the nearest known name, for an unknown value."""
    names = list(known)
    if value not in names:
        fix = did_you_mean(value, names, f"use one of {', '.join(names)}")
        word = option.removeprefix("--")
        raise error(f"unknown-{word}", f"unknown {word} '{value}'", option, fix)


def _show_parts(parts: Sequence[Part], as_json: bool) -> None:
    if as_json:
        show_json(list(map(asdict, parts)))
        return
    show_table(["to extend", "description"], map(attrgetter("name", "description"), parts), unbroken=("to extend",))


def _fitting(rows: Iterable[Row], gpu: str | None, model: str | None, precision: str | None) -> list[Row]:
    """Return the rows that match all given filters."""
    found = []
    for row in rows:
        if gpu is not None and row.recipe.resources.gpu != gpu.lower():
            continue
        if model is not None and model.lower().replace("-", "_") not in row.model:
            continue
        if precision is None or precision.lower() in row.precision.split(", "):
            found.append(row)
    return found


def _explain(name: str, as_json: bool) -> None:
    loaded = prepare(recipe_named(name, say=eprint)).loaded
    files = list(map(_short, loaded.files))
    if as_json:
        show_json({**loaded.tree.plain(), "places": places(loaded), "files": files})
        return
    eprint("from " + ", ".join(files))
    echo(explained(loaded), nl=False)


def _short(file: Path) -> str:
    try:
        return str(file.resolve().relative_to(pack_folder("recipes").resolve().parent))
    except ValueError:
        return str(file)
