"""A change to a run: values of Megatron's arguments, and the recipe keys that set them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8launch.cluster.profile import Cluster
from fp8launch.hardware.gpus import Gpu
from fp8launch.plugins.plan.speeds import Speeds


@dataclass(frozen=True)
class Change:
    """Values of Megatron's arguments, and the recipe keys that set them."""

    args: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)

    def then(self, other: Change) -> Change:
        return Change({**self.args, **other.args}, {**self.overrides, **other.overrides})


def flags(**values: Any) -> Change:
    """Set Megatron's arguments through the flags of the same names."""
    overrides = {}
    for name, value in values.items():
        text = str(value)
        if isinstance(value, bool):
            text = text.lower()
        elif isinstance(value, list):
            text = f"[{', '.join(value)}]"
        overrides[f"megatron.{name}"] = text
    return Change(values, overrides)


def cleared(args: Mapping[str, Any], *names: str) -> Change:
    """Clear arguments, and remove the flags that a run sets for them."""
    return Change(dict.fromkeys(names), {f"megatron.{name}": "null" for name in names if args.get(name)})


def switched_off(args: Mapping[str, Any], *names: str) -> Change:
    """Switch off the flags that a run has switched on."""
    on = list(filter(args.get, names))
    return Change(dict.fromkeys(on, False), cleared(args, *on).overrides)


def _everything(overrides: Mapping[str, str]) -> bool:
    return True


@dataclass(frozen=True)
class Target:
    """The GPUs and the batch that a model is planned for.

    `fixed` are the values of recipe keys that the user has set. `writable` says whether recipes of the engine have
    fields for some overrides. `cluster` is the profile of the cluster with these GPUs, if any.
    """

    gpus: int
    global_batch: int
    gpu: Gpu
    speeds: Speeds
    fixed: Mapping[str, str] = field(default_factory=dict)
    writable: Callable[[Mapping[str, str]], bool] = _everything
    cluster: Cluster | None = None

    @property
    def odd_factor(self) -> int:
        """The odd part of the number of GPUs."""
        return self.gpus // (self.gpus & -self.gpus)

    @property
    def batch_for_all_gpus(self) -> int | None:
        """The next larger global batch that all GPUs can share, None if the odd part of their number divides it."""
        if self.global_batch % self.odd_factor == 0:
            return None
        return math.ceil(self.global_batch / self.gpus) * self.gpus

    def allows(self, overrides: Mapping[str, str]) -> bool:
        """Whether overrides can be written and do not contradict what the user has set."""
        for key, value in self.fixed.items():
            if key in overrides and _plain(key, overrides[key]) != _plain(key, value):
                return False
        return self.writable(overrides)


def _plain(key: str, value: str) -> str:
    """Return the canonical notation of a value: no virtual stages is `null` or 1."""
    if key == "parallel.vp" and value == "null":
        return "1"
    return value
