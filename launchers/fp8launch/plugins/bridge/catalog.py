"""NVIDIA's performance recipes as `fp8launch recipes --engine bridge` lists and explains them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fp8launch.engines.recipe_catalog import CatalogRecipe, PublishedFigure, RecipeCatalog
from fp8launch.plugins.bridge import index
from fp8launch.plugins.bridge.published import PublishedRow, recipe_of, rows, rows_of, why_unattributed


class BridgeCatalog(RecipeCatalog):
    """The index of recipe functions, with the throughput that NVIDIA publishes for them."""

    project: ClassVar[str] = "Megatron-Bridge"

    def releases(self) -> tuple[str, ...]:
        return index.releases()

    def select(self, release: str, **filters: str | None) -> list[CatalogRecipe]:
        return list(map(_shown, index.select(release, **filters)))

    def values_of(self, field: str, release: str) -> list[str]:
        return index.values_of(field, release)

    def find(self, name: str, release: str | None) -> CatalogRecipe:
        return _shown(index.find(name, release))

    def published(self, release: str | None, **filters: str | None) -> list[PublishedFigure]:
        return [_figure(row) for row in rows() if _fits(row, release, **filters)]


def _shown(recipe: index.BridgeRecipe) -> CatalogRecipe:
    figures = rows_of(recipe)
    published = []
    facts = {
        "GPUs": f"{recipe.gpus} {recipe.gpu}",
        "precision": recipe.precision,
        "layout": _layout(recipe),
        "batch": f"micro batch {recipe.micro_batch}, global batch {recipe.global_batch}",
        "sequence": str(recipe.sequence),
        "iterations": str(recipe.iterations),
        "reads from the hub": ", ".join(recipe.hub) or "nothing",
    }
    for row in figures:
        text = f"{row.tokens_per_s_per_gpu:,} tokens/s/GPU"
        if row.tflops_per_gpu is not None:
            text += f", {row.tflops_per_gpu:,} TFLOP/s/GPU"
        facts[f"published, {row.container}"] = text
        published.append(
            {
                "container": row.container,
                "tokens_per_s_per_gpu": row.tokens_per_s_per_gpu,
                "tflops_per_gpu": row.tflops_per_gpu,
            }
        )
    throughput = ""
    if figures:
        throughput = f"{figures[0].tokens_per_s_per_gpu:,}"
    sections: Mapping[str, Any] = {
        "environment": recipe.environment,
        "model": recipe.settings,
        **recipe.sections,
    }
    return CatalogRecipe(
        name=recipe.name,
        layout=_layout(recipe),
        batch=f"{recipe.micro_batch} of {recipe.global_batch}",
        throughput=throughput,
        source=f"{recipe.release}, {recipe.module}.{recipe.function}",
        facts=facts,
        sections={name: values for name, values in sections.items() if isinstance(values, Mapping) and values},
        record={**recipe.as_dict(), "published": published},
    )


def _fits(row: PublishedRow, release: str | None, gpu: str | None, model: str | None, precision: str | None) -> bool:
    """The filters of `index.select`, for a row."""
    if release is not None and row.release != release:
        return False
    if gpu is not None and row.gpu != gpu.lower():
        return False
    if model is not None and index.plain(model) not in index.plain(row.model):
        return False
    return precision is None or row.precision == index.plain(precision)


def _figure(row: PublishedRow) -> PublishedFigure:
    recipe, why_none = recipe_of(row), why_unattributed(row)
    title = None
    record = {**vars(row), "layout": dict(row.layout), "release": row.release, "recipe": None, "why_none": why_none}
    del record["number"]
    if recipe:
        title = f"{recipe.name} of {recipe.release}"
        record["recipe"] = recipe.name
    work = row.model
    if row.task != "pre-training":
        work += f" {row.task}"
    return PublishedFigure(
        where=row.container,
        run=f"{work}, {row.gpus} {row.gpu}, {row.precision}",
        batch=", ".join([f"{row.micro_batch} of {row.global_batch}", *_sizes(row.layout)]),
        throughput=f"{row.tokens_per_s_per_gpu:,}",
        recipe=title,
        why_none=why_none,
        record=record,
    )


def _sizes(layout: Mapping[str, int]) -> list[str]:
    return [f"{axis.upper()} {size}" for axis, size in layout.items() if size > 1]


def _layout(recipe: index.BridgeRecipe) -> str:
    sizes = _sizes(recipe.layout)
    if recipe.fsdp:
        sizes.append("FSDP")
    return ", ".join(sizes) or "DP only"
