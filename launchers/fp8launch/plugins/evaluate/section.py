"""The section `evaluate` of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fp8launch.plugins.convert.section import ConvertDtype
from fp8launch.recipe.schema import Recipe, section_of
from fp8launch.recipe.sections import Section

EvaluateWith = Literal["hf", "megatron"]
# The supervisor of a follower wants a folder for checkpoints, and there are none.
FOLLOWER_STATE = "follower"


class Evaluate(Section):
    """An evaluation, for `engine: evaluate`. `fp8launch evaluate` writes this section.

    `model` is a Hugging Face model: what is evaluated or, with checkpoints, what supplies configuration and
    tokenizer. `checkpoint` is the folder of one iteration, and `run` the folder of the run that wrote it.

    With `every`, the job follows a run that may still train: it evaluates every Nth checkpoint in the folder
    `checkpoints`, where the run writes one each `interval` iterations. `patience` is in minutes.
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
    every: int | None = Field(default=None, ge=1)
    checkpoints: str | None = None
    interval: int | None = Field(default=None, ge=1)
    patience: int | None = Field(default=None, ge=1)
    keep: bool = False


def evaluate_of(recipe: Recipe) -> Evaluate:
    return section_of(recipe, "evaluate", Evaluate)
