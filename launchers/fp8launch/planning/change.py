"""A change to a run: values of Megatron's arguments, and the recipe keys that set them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8launch.hardware.gpus import Gpu
from fp8launch.planning.speeds import Speeds


@dataclass(frozen=True)
class Change:
    """Values of Megatron's arguments, and the recipe keys that set them."""

    args: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)

    def then(self, other: Change) -> Change:
        return Change({**self.args, **other.args}, {**self.overrides, **other.overrides})


@dataclass(frozen=True)
class Target:
    """What a model is planned for. `fixed` are the recipe keys that the user has set."""

    gpus: int
    global_batch: int
    gpu: Gpu
    speeds: Speeds
    fixed: frozenset[str] = frozenset()
