"""The section `accelerate` of a recipe."""

from __future__ import annotations

from typing import Literal

from fp8launch.recipe.schema import Recipe, section_of
from fp8launch.recipe.sections import Section


class Accelerate(Section):
    """Training with Hugging Face Accelerate, for `engine: accelerate`, which the recipes in `peers/` use.

    `fp8` is the library for FP8. With `rowwise`, torchao scales each row instead of each tensor. Megatron has no name
    for this, so `precision.recipe` stays the one with a scale per tensor.
    """

    sharding: Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"] | None = None
    fp8: Literal["torchao", "transformer_engine", "msamp"] | None = None
    rowwise: bool = False


def accelerate_of(recipe: Recipe) -> Accelerate:
    return section_of(recipe, "accelerate", Accelerate)
