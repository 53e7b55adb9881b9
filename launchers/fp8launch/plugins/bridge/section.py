"""The section `bridge` of a recipe."""

from __future__ import annotations

from fp8launch.recipe.field_types import Overrides, Version
from fp8launch.recipe.schema import Recipe, section_of
from fp8launch.recipe.sections import Section


class Bridge(Section):
    """A recipe of Megatron-Bridge by its name, for `engine: bridge`, by default of the newest release that has it.

    `overrides` are fields of Bridge's configuration, such as `{train: {train_iters: 50}}`. `model` is a local folder
    with the Hugging Face `config.json` that the recipe would read from the hub. `data` is a local folder with
    `training.jsonl` for a fine-tuning recipe, or `mock` for random tokens.
    """

    recipe: str | None = None
    release: Version | None = None
    model: str | None = None
    data: str | None = None
    overrides: Overrides = {}


def bridge_of(recipe: Recipe) -> Bridge:
    return section_of(recipe, "bridge", Bridge)
