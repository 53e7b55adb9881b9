"""The published figures of Megatron-Bridge as Megatron's arguments, from the recipe and model of each figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fp8launch.megatron.architecture import architecture
from fp8launch.plugins.bridge.attributes import of_recipe
from fp8launch.plugins.bridge.published import recipe_of, rows


@dataclass(frozen=True)
class Run:
    """A measured run: its arguments by Megatron's attribute name, and tokens/s/GPU."""

    name: str
    family: str
    gpu: str
    gpus: int
    global_batch: int
    args: dict[str, Any]
    measured: float
    # Whether a router without forced balance was in its first iterations.
    untrained_router: bool = False


def published_runs() -> Iterator[Run]:
    """Return every pre-training figure that belongs to one recipe of a known model, without hybrids."""
    return (run for run in _runs() if not run.args.get("is_hybrid_model"))


def hybrid_runs() -> Iterator[Run]:
    """Return the figures of hybrid models."""
    return (run for run in _runs() if run.args.get("is_hybrid_model"))


def _runs() -> Iterator[Run]:
    for row in rows():
        recipe = recipe_of(row)
        if recipe is None or row.task != "pre-training":
            continue
        args = of_recipe(recipe) | {"micro_batch_size": row.micro_batch, "seq_length": row.sequence}
        if architecture(args) is None:
            continue
        yield Run(
            f"{recipe.model} {row.gpu} x{row.gpus} {row.precision} ({row.container})",
            recipe.model,
            row.gpu,
            row.gpus,
            row.global_batch,
            args,
            row.tokens_per_s_per_gpu,
        )
