"""Patterns of a log line whose time grows with the length of the line and no faster, whatever the line holds.

A log holds anything, and a supervisor that thinks about one line for minutes holds the allocation. So `.*`, which
makes an expression try every pair of places, is taken out of the expression: its parts are looked for one after the
other. The fixed text that every match holds is looked for before all of them, at the speed of memory.

Standard library only, on any Python from 3.7: this also runs on a compute node's own Python, outside the image.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_ANYTHING = ".*"
# Characters that end a run of fixed text, and those that make the character before them optional.
_SPECIAL = frozenset("^$.|()[]{}*+?\\")
_OPTIONAL = frozenset("*?{")
_SHORTEST = 3


class LinePattern:
    """A regular expression without alternatives at its top level; `.*` may stand there only, outside groups."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.needle = fixed_text(expression)
        self._parts: list[Any] = []  # compiled when a line holds the fixed text: most patterns never are

    def matches(self, line: str) -> bool:
        if self.needle not in line:
            return False
        if not self._parts:
            self._parts = list(map(re.compile, self.expression.split(_ANYTHING)))
        at = 0
        for part in self._parts:
            found = part.search(line, at)
            if found is None:
                return False
            at = found.end()
        return True


def fixed_text(expression: str) -> str:
    """The longest text that every match of the expression holds. ValueError where there is none worth looking for."""
    runs = [""]
    depth = at = 0
    while at < len(expression):
        character = expression[at]
        step, stands_for_itself = 1, character not in _SPECIAL
        escaped = character == "\\"
        if escaped:
            character = expression[at + 1]
            step, stands_for_itself = 2, not character.isalnum()
        following = expression[at + step : at + step + 1]
        if character == "[" and not escaped:
            at = _end_of_class(expression, at)
            runs.append("")
            continue
        if character == "(" and not escaped:
            depth += 1
        if character == ")" and not escaped:
            depth -= 1
        if stands_for_itself and depth == 0 and following not in _OPTIONAL:
            runs[-1] += character
        else:
            runs.append("")
        if character == "{" and not escaped:
            step = expression.index("}", at) - at + 1
        at += step
    longest = max(runs, key=len)
    if len(longest) < _SHORTEST:
        raise ValueError(f"{expression!r} matches lines that have no text in common")
    return longest


def _end_of_class(expression: str, at: int) -> int:
    """The end of the character class that begins at a bracket; a bracket inside it has a backslash before it."""
    while expression[at] != "]":
        if expression[at] == "\\":
            at += 1
        at += 1
    return at + 1


def needles(patterns: Iterable[LinePattern], *more: str) -> tuple[bytes, ...]:
    """The texts of which one is in every line that any pattern matches, without those that hold another one."""
    texts = {pattern.needle for pattern in patterns} | set(more)
    shortest: list[str] = []
    for text in sorted(texts, key=len):
        if not any(other in text for other in shortest):
            shortest.append(text)
    return tuple(text.encode() for text in sorted(shortest))
