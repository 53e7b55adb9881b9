"""What an import finds before it becomes a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8launch.diagnostics import Problem


@dataclass(frozen=True)
class Launch:
    """Megatron's arguments, sections of a recipe by name, and what could not be carried over.

    `script` is the name of the training script that they were for, None where that is not known.
    """

    argv: tuple[str, ...]
    sections: Mapping[str, object] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    script: str | None = None
