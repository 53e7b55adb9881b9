"""The throughput that NVIDIA publishes for Megatron-Bridge, and the recipe that each figure belongs to.

`tools/bridge_published.py` reads the rows from Bridge's performance summary and its archive. A figure belongs to a
recipe of the release in the same container with the same model, task, GPUs, precision, batch and layout. Rows of
containers older than 26.04, and rows that differ from every recipe of their release, belong to none.
"""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8launch.plugins.bridge.index import BridgeRecipe, plain, recipes_of, releases

_DATA = Path(__file__).with_name("published.json.xz")
# NeMo container to the Megatron-Bridge in it (docs/releases/software-versions.md of Bridge).
_RELEASES = {"26.04": "0.4.0", "26.04.01": "0.4.0", "26.06": "0.5.0", "26.06.01": "0.5.0", "26.08": "0.6.0"}
_TASKS = {"pre-training": ("pretrain",), "sft": ("sft",), "lora": ("lora", "peft")}
_PRECISIONS = {"BF16": "bf16", "FP8": "fp8cs", "FP8-CS": "fp8cs", "MXFP8": "fp8mx", "FP8-MX": "fp8mx", "NVFP4": "nvfp4"}


@dataclass(frozen=True)
class PublishedRow:
    """A figure of NVIDIA's tables, with its position.

    `layout` has the keys tp, pp, cp, vp and ep as far as the row states them.
    """

    number: int
    container: str
    task: str
    model: str
    gpu: str
    gpus: int
    precision: str
    global_batch: int
    micro_batch: int
    sequence: int
    layout: Mapping[str, int]
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float | None

    @property
    def release(self) -> str | None:
        """The release of Megatron-Bridge in the row's container, or None if the index lacks it."""
        return _RELEASES.get(self.container)


@functools.cache
def rows() -> tuple[PublishedRow, ...]:
    """Return all published rows, the newest container first."""
    records = json.loads(lzma.decompress(_DATA.read_bytes()))
    return tuple(_row(number, record) for number, record in enumerate(records))


def recipe_of(row: PublishedRow) -> BridgeRecipe | None:
    """Return the recipe that a row belongs to, or None if no recipe or several different recipes fit."""
    return _attribution().get(row.number)


def rows_of(recipe: BridgeRecipe) -> list[PublishedRow]:
    """Return the figures that belong to a recipe, or to the same recipe of an earlier patch release."""
    minor = recipe.release.rpartition(".")[0]
    for release in [each for each in reversed(releases()) if each.rpartition(".")[0] == minor]:
        other = recipes_of(release).get(recipe.name)
        if (
            (release, recipe.name) in _figures()
            and other is not None
            and replace(other, release="") == replace(recipe, release="")
        ):
            return _figures()[release, recipe.name]
    return []


def unattributed() -> list[PublishedRow]:
    """Return the figures that belong to no recipe of the index."""
    return [row for row in rows() if recipe_of(row) is None]


def why_unattributed(row: PublishedRow) -> str | None:
    """Return why a figure belongs to no recipe, or None if it belongs to one."""
    if recipe_of(row) is not None:
        return None
    if row.release is None:
        return f"NeMo {row.container} has a Megatron-Bridge before {min(_RELEASES.values())}"
    of_model = [one for one in _measured(row.release) if plain(one.model) == plain(row.model)]
    if not of_model:
        return f"the index of {row.release} has no recipe of this model"
    near = [one for one in of_model if _of_kind(row, one) and one.gpus == row.gpus]
    if not near:
        return f"the index of {row.release} has no recipe of this model for {row.gpus} {row.gpu} in {row.precision}"
    nearest = min(near, key=lambda one: (len(_differing(row, one)), one.name))
    differing = _differing(row, nearest)
    if not differing:
        return f"more than one recipe of {row.release} has these settings"
    return f"{nearest.name} of {row.release} has {', '.join(differing)}"


def _measured(release: str) -> list[BridgeRecipe]:
    """Return the recipes that NVIDIA measures: performance recipes, and none of the library."""
    return [recipe for recipe in recipes_of(release).values() if not recipe.library]


def _differing(row: PublishedRow, recipe: BridgeRecipe) -> list[str]:
    """Return the settings in which a recipe and a row differ."""
    compared = [
        ("global batch", recipe.global_batch, row.global_batch),
        ("micro batch", recipe.micro_batch, row.micro_batch),
    ]
    for axis, size in row.layout.items():
        compared.append((axis.upper(), recipe.layout.get(axis) or 1, size))
    return [f"{name} {own}" for name, own, published in compared if own != published]


@functools.cache
def _attribution() -> Mapping[int, BridgeRecipe]:
    """Return the recipe of each row that belongs to exactly one, by the row's number."""
    by_model: dict[tuple[str, str], list[BridgeRecipe]] = {}
    for release in sorted({row.release for row in rows() if row.release}):
        for recipe in _measured(release):
            by_model.setdefault((release, plain(recipe.model)), []).append(recipe)
    found = {}
    for row in rows():
        candidates = by_model.get((row.release or "", plain(row.model)), [])
        fitting = [recipe for recipe in candidates if _belongs(row, recipe)]
        if len(fitting) == 1:
            found[row.number] = fitting[0]
    return found


@functools.cache
def _figures() -> Mapping[tuple[str, str], list[PublishedRow]]:
    """Return the rows of each recipe, by release and name."""
    found: dict[tuple[str, str], list[PublishedRow]] = {}
    for row in rows():
        recipe = recipe_of(row)
        if recipe is not None:
            found.setdefault((recipe.release, recipe.name), []).append(row)
    return found


def _of_kind(row: PublishedRow, recipe: BridgeRecipe) -> bool:
    return recipe.task in _TASKS[row.task] and (row.gpu, row.precision) == (recipe.gpu, recipe.precision)


def _belongs(row: PublishedRow, recipe: BridgeRecipe) -> bool:
    return _of_kind(row, recipe) and recipe.gpus == row.gpus and not _differing(row, recipe)


def _row(number: int, record: Mapping[str, Any]) -> PublishedRow:
    layout = {axis: int(record[axis] or 1) for axis in ("tp", "pp", "cp", "vp", "ep") if axis in record}
    return PublishedRow(
        number=number,
        container=record["container"],
        task=record["task"],
        model=record["model"],
        gpu=record["system"].removeprefix("DGX-").lower(),
        gpus=record["gpus"],
        # Tables without a column for it state FP8 in their heading.
        precision=_PRECISIONS[record.get("precision", "FP8")],
        global_batch=record["global_batch"],
        micro_batch=record["micro_batch"],
        sequence=record["sequence"],
        layout=layout,
        tokens_per_s_per_gpu=record["tokens_per_s_per_gpu"],
        tflops_per_gpu=record["tflops_per_gpu"],
    )
