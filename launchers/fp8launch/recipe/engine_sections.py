"""The sections of a recipe that one engine alone reads."""

from __future__ import annotations

from typing import Literal

from fp8launch.recipe.field_types import Overrides, Version
from fp8launch.recipe.sections import Section


class Bridge(Section):
    """A recipe of Megatron-Bridge by its name, for `engine: bridge`; the newest release that has it unless one is set.

    `overrides` are fields of Bridge's configuration, such as `{train: {train_iters: 50}}`. `model` is a local folder
    with the Hugging Face `config.json` that the recipe would read from the hub.
    """

    recipe: str | None = None
    release: Version | None = None
    model: str | None = None
    overrides: Overrides = {}


ConvertDirection = Literal["hf-to-megatron", "megatron-to-hf"]
ConvertDtype = Literal["bf16", "fp16", "fp32"]


class Convert(Section):
    """A conversion of weights, for `engine: convert`: what `fp8launch convert` submits, which writes this section.

    `model` is a Hugging Face model: a folder, or a name on the hub; the source, or what the output shall be like.
    `checkpoint` is the folder of one iteration, `fingerprint` a digest of the input.
    """

    direction: ConvertDirection | None = None
    model: str | None = None
    checkpoint: str | None = None
    out: str | None = None
    dtype: ConvertDtype | None = None
    fingerprint: str | None = None
