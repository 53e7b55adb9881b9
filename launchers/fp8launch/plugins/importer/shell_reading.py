"""What reading a launch script finds: its commands, its variables, and what could not be known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from fp8launch.plugins.importer.shell_holes import Holes


@dataclass(frozen=True)
class Command:
    """A command with its words expanded. `wrappers` are the words before each `bash -c` around it, outermost first.

    `certain` is False when it stands under a condition that could not be decided.
    """

    words: tuple[str, ...]
    env: Mapping[str, str]
    line: int
    certain: bool
    wrappers: tuple[tuple[str, ...], ...] = ()


@dataclass
class Reading:
    """All commands of a script in order, and the holes that marks refer to.

    `arrays` are its arrays at the end of the script, `texts` its other variables that begin with a flag, split at white
    space as a shell splits an unquoted variable. `steps` and `size` count what has limits: commands, and what the
    commands and variables hold.
    """

    commands: list[Command] = field(default_factory=list)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    holes: Holes = field(default_factory=Holes)
    steps: int = 0
    size: int = 0


class Mode(IntEnum):
    """Whether commands are reached: never, under a condition that is not known, surely."""

    SKIP = 0
    MAYBE = 1
    RUN = 2


# How a command ends: True and False as far as tests decide; ASSUMED for one that is taken to succeed; None is unknown.
ASSUMED = "assumed"
Truth: TypeAlias = "bool | str | None"
