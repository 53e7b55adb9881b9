"""The result of reading a launch script: commands, variables and holes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from fp8launch.plugins.importer.shell_holes import Holes


@dataclass(frozen=True)
class Command:
    """A command with its words expanded. `wrappers` are the words before each `bash -c` around it, outermost first.

    `certain` is false if the command depends on an undecided condition.
    """

    words: tuple[str, ...]
    env: Mapping[str, str]
    line: int
    certain: bool
    wrappers: tuple[tuple[str, ...], ...] = ()


@dataclass
class Reading:
    """All commands of a script in order, and the holes that marks refer to.

    `arrays` are the arrays at the end of the script. `texts` are its other variables that begin with a flag, split at
    white space as a shell splits an unquoted variable. `steps` and `size` are the limited quantities: the number of
    commands, and the characters in commands and variables.
    """

    commands: list[Command] = field(default_factory=list)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    holes: Holes = field(default_factory=Holes)
    steps: int = 0
    size: int = 0


class Mode(IntEnum):
    """Whether commands are reached: never, under an undecided condition, or certainly."""

    SKIP = 0
    MAYBE = 1
    RUN = 2


# How a command ends: True or False if a test decides it, ASSUMED if success is assumed, None if unknown.
ASSUMED = "assumed"
Truth: TypeAlias = "bool | str | None"
