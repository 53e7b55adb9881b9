"""The section `convert` of a recipe."""

from __future__ import annotations

from typing import Literal

from fp8launch.recipe.schema import Recipe, section_of
from fp8launch.recipe.sections import Section

ConvertDirection = Literal["hf-to-megatron", "megatron-to-hf"]
ConvertDtype = Literal["bf16", "fp16", "fp32"]


class Convert(Section):
    """A conversion of weights, for `engine: convert`. `fp8launch convert` writes this section.

    `model` is a Hugging Face model, a folder or a name on the hub: the source, or the template of the output.
    `checkpoint` is the folder of one iteration, `fingerprint` a digest of the input.
    """

    direction: ConvertDirection | None = None
    model: str | None = None
    checkpoint: str | None = None
    out: str | None = None
    dtype: ConvertDtype | None = None
    fingerprint: str | None = None


def convert_of(recipe: Recipe) -> Convert:
    return section_of(recipe, "convert", Convert)
