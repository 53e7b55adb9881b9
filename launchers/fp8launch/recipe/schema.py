"""The recipe model: its sections and the constraints between them."""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field, create_model, field_validator, model_validator

from fp8launch import plugin_registry
from fp8launch.diagnostics import nearest
from fp8launch.hardware.connections import CONNECTIONS, NEED_MANY, connections
from fp8launch.hardware.gpus import GPUS
from fp8launch.recipe.field_types import (
    AxisKey,
    AxisValue,
    EnvName,
    ExtraFlag,
    FlagValue,
    Name,
    PhaseName,
    Positive,
    Reason,
    RuleCode,
)
from fp8launch.recipe.sections import (
    Batch,
    Checkpoint,
    Container,
    Data,
    Health,
    Launch,
    Optimizer,
    Parallel,
    Phase,
    Precision,
    Reference,
    Resources,
    Section,
    Software,
    Survive,
    Train,
)
from fp8launch.recipe.validation_problems import fields_by_name

# Sections with free keys, named by the user or Megatron. An axis may vary any of them.
_FREE = ("model", "megatron", "megatron_extra", "env", "phases")

SomeSection = TypeVar("SomeSection", bound=Section)


class Recipe(Section):
    """The core's recipe. `recipe_class()` adds the sections of plugins."""

    # Defaults are not validated: that would build the validator of every section at each start.
    name: Name
    description: str = ""
    engine: Name | None = None
    model: dict[str, FlagValue] = {}
    precision: Precision | None = None
    parallel: Parallel = Parallel.model_construct()
    batch: Batch = Batch.model_construct()
    train: Train = Train.model_construct()
    optimizer: Optimizer = Optimizer.model_construct()
    data: Data | None = None
    checkpoint: Checkpoint = Checkpoint.model_construct()
    survive: Survive = Survive.model_construct()
    health: Health = Health.model_construct()
    resources: Resources = Resources.model_construct()
    container: Container = Container.model_construct()
    launch: Launch = Launch.model_construct()
    software: Software = Software.model_construct()
    env: dict[EnvName, str | int | float | None] = {}
    secrets: list[EnvName] = []
    megatron: dict[str, FlagValue] = {}
    megatron_extra: dict[ExtraFlag, FlagValue] = {}
    silence: dict[RuleCode, Reason] = {}
    notes: list[str] = []
    reference: Reference | None = None
    # A study: one run for every combination of these values and node counts.
    axes: dict[AxisKey, Annotated[list[AxisValue], Field(min_length=1)]] = {}
    nodes: Annotated[list[Positive], Field(min_length=1)] | None = None
    # Parts of one training run, in this order.
    phases: Annotated[dict[PhaseName, Phase], Field(max_length=50)] = {}

    @field_validator("phases", "axes", mode="before")
    @classmethod
    def _none_of_them(cls, value: object) -> object:
        if value is None:  # `--set phases=null`: a run without phases; `axes: null`: a single run
            return {}
        return value

    @field_validator("axes")
    @classmethod
    def _axes_vary_what_exists(cls, axes: dict[str, list[AxisValue]]) -> dict[str, list[AxisValue]]:
        for key, values in axes.items():
            _refuse_unknown_axis(key)
            if len(set(map(repr, values))) < len(values):
                raise ValueError(f"axis {key} has the same value twice")
        return axes

    @model_validator(mode="after")
    def _nodes_vary_once(self) -> Recipe:
        if self.nodes is not None and len(set(self.nodes)) < len(self.nodes):
            raise ValueError("`nodes` has the same number twice")
        if self.nodes is not None and "resources.nodes" in self.axes:
            raise ValueError(
                "`nodes` and the axis resources.nodes vary the same value; use `nodes`, which also scales the batch"
            )
        return self

    @model_validator(mode="after")
    def _going_on_needs_checkpoints(self) -> Recipe:
        if self.survive.attempts > 1 and not self.goes_on:
            raise ValueError(
                "`survive.attempts` above 1 needs `checkpoint.dir` and `checkpoint.interval`",
                "--set checkpoint.dir=checkpoints --set checkpoint.interval=100, or the same lines in the recipe",
            )
        if self.phases and not self.goes_on:
            raise ValueError(
                "`phases` need `checkpoint.dir` and `checkpoint.interval`, because each phase continues from the "
                "checkpoint of the previous one"
            )
        return self

    @property
    def goes_on(self) -> bool:
        """Return whether the run writes checkpoints from which another attempt can continue."""
        return self.checkpoint.dir is not None and self.checkpoint.interval is not None

    @property
    def continues_its_folder(self) -> bool:
        """Return whether `checkpoint.load` names the folder that the run saves to, so that it continues from there."""
        folder, load = self.checkpoint.dir, self.checkpoint.load
        return folder is not None and load is not None and posixpath.normpath(folder) == posixpath.normpath(load)

    @property
    def is_study(self) -> bool:
        return bool(self.axes or self.nodes)

    @property
    def environment(self) -> dict[str, str]:
        """The recipe's environment variables as text, without those set to null.

        `CUDA_DEVICE_MAX_CONNECTIONS: auto` becomes the value that this layout needs on this GPU.
        """
        found = {name: str(value) for name, value in self.env.items() if value is not None}
        if found.get(CONNECTIONS) == "auto":
            found[CONNECTIONS] = self._connections()
        return found

    def _connections(self) -> str:
        flags = {name.replace("-", "_"): value for name, value in self.megatron.items()}
        tp = self.parallel.tp or flags.get("tensor_model_parallel_size") or 1
        cp = self.parallel.cp or flags.get("context_parallel_size") or 1
        many = self.parallel.fsdp not in (None, "none") or any(map(flags.get, NEED_MANY))
        return connections(split=tp != 1 or cp != 1, many=many, capability=GPUS[self.resources.gpu].capability)


def recipe_class() -> type[Recipe]:
    """Return `Recipe` with the sections that active plugins add."""
    return _with_sections(tuple(plugin_registry.loaded("recipe_sections")))


def recipe_keys() -> list[str]:
    """Return the top-level keys of a recipe in their usual order."""
    keys = list(Recipe.model_fields)
    after = keys.index("launch") + 1
    return [*keys[:after], *plugin_registry.offered("recipe_sections"), *keys[after:]]


def section_of(recipe: Recipe, name: str, kind: type[SomeSection]) -> SomeSection:
    """Return a section that a plugin adds."""
    section = getattr(recipe, name)
    assert isinstance(section, kind)
    return section


@functools.cache
def _with_sections(sections: tuple[tuple[str, type[Section]], ...]) -> type[Recipe]:
    fields: dict[str, Any] = {name: (section, section.model_construct()) for name, section in sections}
    return create_model("Recipe", __base__=Recipe, **fields)


def section_fields() -> dict[str, list[str]]:
    """Return the field names of each section, as written in recipes."""
    sections: dict[str, type[Section]] = {"precision": Precision, "data": Data}
    for name, info in recipe_class().model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            sections[name] = info.annotation
    return {section: list(fields_by_name(model)) for section, model in sections.items()}


def _refuse_unknown_axis(key: str) -> None:
    """Raise ValueError for an axis that is not a key of a recipe."""
    section, field = key.split(".")[:2]
    if section in _FREE:
        return
    fields = section_fields()
    if section not in fields:
        raise ValueError(f"axis {key}: '{section}' is not a section{_or(section, [*fields, *_FREE])}")
    if field not in fields[section]:
        raise ValueError(f"axis {key}: {section} has no '{field}'{_or(field, fields[section])}")


def _or(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f"; did you mean '{near}'?" if near else ""
