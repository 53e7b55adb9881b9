"""The format of a recipe with stages."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from fp8launch.hardware.gpus import GPUS
from fp8launch.plugins.convert.section import ConvertDtype
from fp8launch.plugins.evaluate.section import EvaluateWith
from fp8launch.recipe.field_types import Name, PhaseName, Positive
from fp8launch.recipe.sections import Section

# What makes the run of a stage, and the other keys that each of them takes.
_COMMON = ("name", "set")
_JOB = ("model", "dtype", "tp", "pp", "ep", "gpu", "image")
_KEYS = {
    "recipe": ("from",),
    "convert": _JOB,
    "evaluate": (*_JOB, "tasks", "task_folder", "fewshot", "limit", "batch_size", "max_length", "backend", "offline"),
}


class Stage(Section):
    """A stage: its own recipe, or a conversion or evaluation of the result of an earlier stage.

    `from_`, `convert` and `evaluate` name earlier stages. `set` has overrides of the stage's recipe by dotted key.
    """

    name: PhaseName
    recipe: str | None = None
    from_: Annotated[PhaseName | None, Field(alias="from")] = None
    convert: PhaseName | None = None
    evaluate: PhaseName | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    dtype: ConvertDtype | None = None
    tp: Positive = 1
    pp: Positive = 1
    ep: Positive = 1
    gpu: str = "cpu"
    image: str | None = None
    tasks: list[str] | None = None
    task_folder: str | None = None
    fewshot: Annotated[int | None, Field(ge=0)] = None
    limit: Positive | None = None
    batch_size: Positive | None = None
    max_length: Positive | None = None
    backend: EvaluateWith = "hf"
    offline: bool = False

    @field_validator("gpu")
    @classmethod
    def _gpu_is_known(cls, gpu: str) -> str:
        if gpu not in GPUS:
            raise ValueError(f"gpu {gpu} is unknown; choose from {', '.join(GPUS)}")
        return gpu

    @model_validator(mode="after")
    def _is_one_kind(self) -> Stage:
        kinds = [kind for kind in _KEYS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            words = ", ".join(kinds) or "none"
            raise ValueError(f"stage {self.name} needs one of {', '.join(_KEYS)}, but has {words}")
        allowed = (*_COMMON, *kinds, *_KEYS[kinds[0]])
        stated = ["from" if name == "from_" else name for name in self.model_fields_set]
        if wrong := sorted(set(stated).difference(allowed)):
            raise ValueError(f"stage {self.name} has `{kinds[0]}`, which does not take {', '.join(wrong)}")
        if self.evaluate is not None and not self.tasks:
            raise ValueError(f"stage {self.name} needs `tasks`: a list of tasks of lm-eval")
        return self

    @property
    def source(self) -> str | None:
        """The earlier stage whose result this one starts from."""
        return self.from_ or self.convert or self.evaluate


class Stages(Section):
    """A recipe with stages."""

    name: Name
    description: str = ""
    stages: Annotated[list[Stage], Field(min_length=1, max_length=50)]

    @model_validator(mode="after")
    def _refer_to_earlier_stages(self) -> Stages:
        earlier: list[str] = []
        for stage in self.stages:
            if stage.name in earlier:
                raise ValueError(f"two stages are called {stage.name}")
            if stage.source is not None and stage.source not in earlier:
                known = ", ".join(earlier) or "none"
                raise ValueError(f"stage {stage.name} starts from {stage.source}, which is no earlier stage ({known})")
            earlier.append(stage.name)
        return self
