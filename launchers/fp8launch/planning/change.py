"""A change to a run: values of Megatron's arguments, and the recipe keys that set them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def flags(**values: Any) -> Change:
    """Set Megatron's arguments by flags that a recipe states under the same names."""
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
    """Clear arguments, and the flags among them that a run states."""
    return Change(dict.fromkeys(names), {f"megatron.{name}": "null" for name in names if args.get(name)})


def switched_off(args: Mapping[str, Any], *names: str) -> Change:
    """Switch off what a run has switched on of these flags."""
    on = list(filter(args.get, names))
    return Change(dict.fromkeys(on, False), cleared(args, *on).overrides)


def _everything(overrides: Mapping[str, str]) -> bool:
    return True


@dataclass(frozen=True)
class Target:
    """What a model is planned for. `fixed` are the recipe keys that the user has set, with their values; `writable`
    says whether recipes have fields for overrides."""

    gpus: int
    global_batch: int
    gpu: Gpu
    speeds: Speeds
    fixed: Mapping[str, str] = field(default_factory=dict)
    writable: Callable[[Mapping[str, str]], bool] = _everything

    def allows(self, overrides: Mapping[str, str]) -> bool:
        """Whether overrides can be written and leave alone what the user has set."""
        for key, value in self.fixed.items():
            if key in overrides and _plain(key, overrides[key]) != _plain(key, value):
                return False
        return self.writable(overrides)


def _plain(key: str, value: str) -> str:
    """One of the ways to write a value that means nothing else."""
    if key == "parallel.vp" and value == "null":
        return "1"
    return value
