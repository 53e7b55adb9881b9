"""The section `evaluate` of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fp8launch.plugins.convert.section import ConvertDtype
from fp8launch.recipe.schema import Recipe, section_of
from fp8launch.recipe.sections import Section

EvaluateWith = Literal["hf", "megatron"]


class Evaluate(Section):
    """An evaluation, for `engine: evaluate`. `fp8launch evaluate` writes this section.

    `model` is a Hugging Face model: what is evaluated or, with `checkpoint`, what supplies configuration and
    tokenizer. `checkpoint` is the folder of one iteration, and `run` the folder of the run that wrote it.
    """

    model: str | None = None
    checkpoint: str | None = None
    run: str | None = None
    backend: EvaluateWith | None = None
    tasks: list[str] | None = None
    task_folder: str | None = None
    fewshot: int | None = Field(default=None, ge=0)
    limit: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    max_length: int | None = Field(default=None, ge=1)
    dtype: ConvertDtype | None = None


def evaluate_of(recipe: Recipe) -> Evaluate:
    return section_of(recipe, "evaluate", Evaluate)
