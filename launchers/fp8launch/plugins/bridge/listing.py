"""`fp8launch recipes --engine bridge`: NVIDIA's recipes, and the throughput that NVIDIA publishes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8launch.cli.output import echo, eprint, show_json, show_table
from fp8launch.diagnostics import UserError, did_you_mean, error
from fp8launch.plugins.bridge import index
from fp8launch.plugins.bridge.index import BridgeRecipe
from fp8launch.plugins.bridge.published import PublishedRow, recipe_of, rows, rows_of, why_unattributed
from fp8launch.wording import counted

# `gpu`, `model` and `precision`; None for any.
Filters = Mapping[str, str | None]


def show(name: str | None, release: str | None, filters: Filters, published: bool, as_json: bool) -> None:
    """List the recipes of a release, by default the newest, or all published figures; with a name, explain a recipe.

    Raises UserError for unknown names.
    """
    if published:
        _show_figures(release, filters, as_json)
    elif name is not None:
        _explain(index.find(name, release), as_json)
    else:
        _show_recipes(release or index.releases()[-1], filters, as_json)


def _show_recipes(release: str, filters: Filters, as_json: bool) -> None:
    found = index.select(release, **filters)
    if not found:
        raise _nothing(release, filters)
    if as_json:
        show_json(list(map(_record, found)))
        return
    pretraining: list[tuple[str, ...]] = []
    fine_tuning: list[tuple[str, ...]] = []
    for recipe in found:
        figures = rows_of(recipe)
        throughput = f"{figures[0].tokens_per_s_per_gpu:,}" if figures else ""
        row = (recipe.name, _layout(recipe), f"{recipe.micro_batch} of {recipe.global_batch}")
        if recipe.task == "pretrain":
            pretraining.append((*row, throughput))
        else:
            fine_tuning.append(row)
    others = ", ".join(index.releases()[:-1])
    eprint(f"{counted(len(found), 'recipe')} of Megatron-Bridge {release}; other releases: {others}")
    dropped = ("layout", "batch")
    if pretraining:
        columns = ("recipe", *dropped, "published (tokens/s/GPU)")
        show_table(columns, pretraining, unbroken=("recipe",), drop=dropped)
    if fine_tuning:
        # These have the longest names, and no published speed.
        name = "recipe for fine-tuning"
        show_table((name, *dropped), fine_tuning, unbroken=(name,), drop=dropped)


def _nothing(release: str, filters: Filters) -> UserError:
    """Return the error for filters without a match: it names the first unknown value, or else their combination."""
    what = lacks = f"Megatron-Bridge {release} has no recipe with"
    for field, value in filters.items():
        if value is None:
            continue
        what += f" --{field} {value}"
        if not index.select(release, **{field: value}):
            known = index.values_of(field, release)
            fix = did_you_mean(value.lower(), known, f"use one of {', '.join(known)}")
            return error("no-such-recipe", f"{lacks} --{field} {value}", None, fix)
    return error("no-such-recipe", f"{what} together", None, "leave out one of the filters")


def _explain(recipe: BridgeRecipe, as_json: bool) -> None:
    if as_json:
        show_json(_record(recipe))
        return
    facts = {
        "GPUs": f"{recipe.gpus} {recipe.gpu}",
        "precision": recipe.precision,
        "layout": _layout(recipe),
        "batch": f"micro batch {recipe.micro_batch}, global batch {recipe.global_batch}",
        "sequence": str(recipe.sequence),
        "iterations": str(recipe.iterations),
        "task": recipe.task,
        "data": _data(recipe),
        "reads from the hub": ", ".join(filter(None, dict.fromkeys((*recipe.hub, recipe.tokenizer)))) or "nothing",
    }
    for row in rows_of(recipe):
        text = f"{row.tokens_per_s_per_gpu:,} tokens/s/GPU"
        if row.tflops_per_gpu is not None:
            text += f", {row.tflops_per_gpu:,} TFLOP/s/GPU"
        facts[f"published, {row.container}"] = text
    eprint(f"Megatron-Bridge {recipe.release}, {recipe.module}.{recipe.function}")
    for label, value in facts.items():
        echo(f"{label + ':':<22}{value}")
    sections: Mapping[str, Any] = {"environment": recipe.environment, "model": recipe.settings, **recipe.sections}
    for section, values in sections.items():
        if isinstance(values, Mapping) and values:
            echo(f"{section}:")
            for key, value in sorted(values.items()):
                echo(f"  {key}: {value}")


def _data(recipe: BridgeRecipe) -> str:
    """Return the data that a recipe reads, as far as the index knows it."""
    text = str(recipe.data.get("hub") or recipe.data.get("folder") or recipe.data.get("class") or "random tokens")
    if "packed" in recipe.data:
        text += f", packed to {recipe.data['packed']} tokens"
    return text


def _record(recipe: BridgeRecipe) -> dict[str, Any]:
    published = []
    for row in rows_of(recipe):
        published.append({name: getattr(row, name) for name in ("container", "tokens_per_s_per_gpu", "tflops_per_gpu")})
    return {**recipe.as_dict(), "published": published}


def _show_figures(release: str | None, filters: Filters, as_json: bool) -> None:
    if release is not None and release not in index.releases():
        fix = f"use one of {', '.join(index.releases())}"
        raise error("no-such-release", f"the catalog has no Megatron-Bridge {release}", None, fix)
    found = [row for row in rows() if _fits(row, release, **filters)]
    if as_json:
        show_json(list(map(_figure_record, found)))
        return
    table = []
    without = 0
    for row in found:
        recipe = recipe_of(row)
        title = f"{recipe.name} of {recipe.release}" if recipe else f"none: {why_unattributed(row)}"
        without += recipe is None
        work = row.model if row.task == "pre-training" else f"{row.model} {row.task}"
        batch = ", ".join([f"{row.micro_batch} of {row.global_batch}", *_sizes(row.layout)])
        run = f"{work}, {row.gpus} {row.gpu}, {row.precision}"
        table.append((row.container, run, batch, f"{row.tokens_per_s_per_gpu:,}", title))
    eprint(f"{len(found)} published figures: {len(found) - without} of a recipe, {without} of none")
    if table:
        columns = ["NeMo", "run", "batch", "tokens/s/GPU", "recipe, or why there is none"]
        show_table(columns, table, drop=("batch",))


def _fits(row: PublishedRow, release: str | None, gpu: str | None, model: str | None, precision: str | None) -> bool:
    """Return whether a row matches the filters of `index.select`."""
    if release is not None and row.release != release:
        return False
    if gpu is not None and row.gpu != gpu.lower():
        return False
    if model is not None and index.plain(model) not in index.plain(row.model):
        return False
    return precision is None or row.precision == index.plain(precision)


def _figure_record(row: PublishedRow) -> dict[str, Any]:
    recipe = recipe_of(row)
    record = {
        **vars(row),
        "layout": dict(row.layout),
        "release": row.release,
        "recipe": recipe.name if recipe else None,
        "why_none": why_unattributed(row),
    }
    del record["number"]
    return record


def _sizes(layout: Mapping[str, int]) -> list[str]:
    return [f"{axis.upper()} {size}" for axis, size in layout.items() if size > 1]


def _layout(recipe: BridgeRecipe) -> str:
    sizes = _sizes(recipe.layout)
    if recipe.fsdp:
        sizes.append("FSDP")
    return ", ".join(sizes) or "DP only"
