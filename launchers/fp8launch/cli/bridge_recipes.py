"""`fp8launch recipes --engine bridge`: NVIDIA's performance recipes of Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8launch.cli.output import echo, eprint, show_json, show_table
from fp8launch.diagnostics import UserError, error, nearest
from fp8launch.engines.bridge.index import BridgeRecipe, find, releases, select, values_of
from fp8launch.engines.bridge.published import rows_of

PREFIX = "bridge:"


def show(
    name: str | None, release: str | None, gpu: str | None, model: str | None, precision: str | None, as_json: bool
) -> None:
    """List the recipes of a release that fit the filters, or explain one. Raises UserError for unknown names."""
    if name is not None:
        _explain(find(name.removeprefix(PREFIX), release), as_json)
        return
    shown = release or releases()[-1]
    found = select(shown, gpu, model, precision)
    if not found:
        raise _nothing(shown, {"gpu": gpu, "model": model, "precision": precision})
    if as_json:
        show_json([_json(one) for one in found])
        return
    eprint(f"{len(found)} recipes of Megatron-Bridge {shown}; other releases: {', '.join(releases()[:-1])}")
    show_table(
        ["recipe", "layout", "batch", "published (tokens/s/GPU)"],
        [(one.name, _layout(one), f"{one.micro_batch} of {one.global_batch}", _published(one)) for one in found],
        unbroken=("recipe",),
        drop=("layout", "batch"),
    )


def _explain(recipe: BridgeRecipe, as_json: bool) -> None:
    if as_json:
        show_json(_json(recipe))
        return
    eprint(f"Megatron-Bridge {recipe.release}, {recipe.module}.{recipe.function}")
    lines: dict[str, Any] = {
        "GPUs": f"{recipe.gpus} {recipe.gpu}",
        "precision": recipe.precision,
        "layout": _layout(recipe),
        "batch": f"micro batch {recipe.micro_batch}, global batch {recipe.global_batch}",
        "sequence": recipe.sequence,
        "iterations": recipe.iterations,
        "reads from the hub": ", ".join(recipe.hub) or "nothing",
    }
    for row in rows_of(recipe):
        figure = f"{row.tokens_per_s_per_gpu:,} tokens/s/GPU"
        if row.tflops_per_gpu is not None:
            figure += f", {row.tflops_per_gpu:,} TFLOP/s/GPU"
        lines[f"published, {row.container}"] = figure
    for label, value in lines.items():
        echo(f"{label + ':':<22}{value}")
    for section, values in {"environment": recipe.environment, "model": recipe.settings, **recipe.sections}.items():
        if isinstance(values, Mapping) and values:
            echo(f"{section}:")
            for key, value in sorted(values.items()):
                echo(f"  {key}: {value}")


def _layout(recipe: BridgeRecipe) -> str:
    sizes = [f"{axis.upper()} {size}" for axis, size in recipe.layout.items() if size > 1]
    if recipe.fsdp:
        sizes.append("FSDP")
    return ", ".join(sizes) or "DP only"


def _published(recipe: BridgeRecipe) -> str:
    figures = rows_of(recipe)
    return f"{figures[0].tokens_per_s_per_gpu:,}" if figures else ""


def _json(recipe: BridgeRecipe) -> dict[str, Any]:
    published = [
        {
            "container": row.container,
            "tokens_per_s_per_gpu": row.tokens_per_s_per_gpu,
            "tflops_per_gpu": row.tflops_per_gpu,
        }
        for row in rows_of(recipe)
    ]
    return {**recipe.as_dict(), "published": published}


def _nothing(release: str, filters: Mapping[str, str | None]) -> UserError:
    """The error of filters that no recipe fits: an unknown value if there is one, else their combination."""
    stated = {field: value for field, value in filters.items() if value is not None}
    for field, value in stated.items():
        if select(release, **{field: value}):
            continue
        known = values_of(field, release)
        near = nearest(value.lower(), known)
        fix = f"did you mean '{near}'?" if near else f"use one of {', '.join(known)}"
        return error("no-such-recipe", f"Megatron-Bridge {release} has no recipe with --{field} {value}", None, fix)
    words = " ".join(f"--{field} {value}" for field, value in stated.items())
    message = f"Megatron-Bridge {release} has no recipe with {words} together"
    return error("no-such-recipe", message, None, "leave out one of the filters")
