"""The result of reading a launch script, before it becomes a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8launch.diagnostics import Problem


@dataclass(frozen=True)
class Launch:
    """Megatron's arguments, sections of a recipe by name, and problems with what could not be imported.

    `script` is the name of the training script, or None if it is not known.
    """

    argv: tuple[str, ...]
    sections: Mapping[str, object] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    script: str | None = None
